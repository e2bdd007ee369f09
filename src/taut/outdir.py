"""The output directory of a run: refused or claimed, never half-written.

    out/resolved.json    the configuration in force, decisions included
    out/events.jsonl     what happened
    out/checkpoints/     training state
    out/model/           the result, in Hugging Face format

``require_usable`` only looks, so that it can be called before anything is loaded; ``claim`` writes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from taut.errors import OutputError

MARK = "resolved.json"
"""The file by which a directory is known to be a run of taut's."""


def require_usable(out: Path, *, resume: bool, overwrite: bool, inputs: Sequence[str] = ()) -> None:
    """Raise OutputError unless the run may be written to ``out``. Writes nothing.

    ``inputs``: what the run reads; overwriting must not delete it.
    """
    if resume and overwrite:
        raise OutputError("resume=true and overwrite=true contradict each other; keep one")
    if out.exists() and not out.is_dir():
        raise OutputError(f"out={out} is a file; expected a directory; name another")
    _require_writable(out)
    if not out.is_dir() or not any(out.iterdir()):
        return
    if overwrite and not (out / MARK).is_file():
        raise OutputError(
            f"out={out} holds files that are not a taut run (no {MARK}); "
            "overwrite=true deletes only runs; name another directory"
        )
    for path in inputs if overwrite else ():
        if Path(path).expanduser().resolve().is_relative_to(out.resolve()):
            raise OutputError(
                f"overwrite=true would delete {path}, which this run reads and which lies in out={out}; "
                "name another out"
            )
    if not (resume or overwrite):
        raise OutputError(
            f"out={out} exists and is not empty; name another directory, or say resume=true to go on or "
            "overwrite=true to replace it"
        )


def claim(out: Path, resolved: Mapping[str, Any], *, overwrite: bool) -> None:
    """Make the directory, emptied where it is overwritten, and write the configuration into it."""
    try:
        if overwrite and out.is_dir():
            shutil.rmtree(out)
        out.mkdir(parents=True, exist_ok=True)
        beside = out / f".{MARK}.partial"
        beside.write_text(json.dumps(resolved, indent=1) + "\n", encoding="utf-8")
        beside.replace(out / MARK)
    except OSError as error:
        raise OutputError(f"out={out} cannot be written: {error.strerror}; name another") from error


def _require_writable(out: Path) -> None:
    place = out.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise OutputError(f"out={out} cannot be made: {place} is a file; name another directory")
    if not os.access(place, os.W_OK | os.X_OK):
        raise OutputError(f"out={out} cannot be written: no permission in {place}; name another")
