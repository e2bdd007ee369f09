"""Write the pinned picture: ``python -m tests.golden.record``, from the root of the repository.

A picture that is easily taken again pins nothing, so this writes only files that are not there: to take a new one,
say in the commit what a user will see differently and why renames.toml cannot say it, delete the files of
``picture/`` that it is about, and look at the difference line by line. It refuses to write while renames.toml has
entries, for they are about the picture that is there: bring runs.toml up to the new names and empty the table first.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.golden.renames import load_renames
from tests.golden.snapshot import (
    EXAMINED,
    PICTURE,
    RUNS,
    keys_of_run,
    take_check,
    take_run,
    take_surface,
    working_in,
    write_inputs,
)


def record() -> None:
    """Write the files of the picture that are not there."""
    renames = load_renames()
    if renames.entries():
        sys.exit("renames.toml has entries; bring runs.toml up to the new names and empty it first")
    with tempfile.TemporaryDirectory() as folder, working_in(Path(folder)):
        os.environ["TAUT_CACHE"] = str(Path(folder, "cache"))
        write_inputs()
        for name in RUNS["runs"]:
            file = PICTURE / "methods" / f"{name}.json"
            if not file.exists():
                write(file, take_run(name, keys_of_run(name), renames))
        for name in EXAMINED:
            file = PICTURE / "methods" / f"check_{name}.json"
            if not file.exists():
                write(file, take_check(name, keys_of_run(name), renames))
        if not (PICTURE / "surface.json").exists():
            write(PICTURE / "surface.json", take_surface())


def write(file: Path, tree: Any) -> None:
    """JSON with one line for each thing that can differ by itself."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(_lines(tree, "", 3) + "\n", encoding="utf-8")
    print(file)


def _lines(tree: Any, indent: str, depth: int) -> str:
    if not tree or depth == 0 or not isinstance(tree, dict | list):
        return json.dumps(tree, ensure_ascii=False)
    inner = indent + " "
    if isinstance(tree, list):
        items = [inner + json.dumps(item, ensure_ascii=False) for item in tree]
    else:
        items = [f"{inner}{json.dumps(k)}: {_lines(v, inner, depth - 1)}" for k, v in tree.items()]
    opening, closing = "[]" if isinstance(tree, list) else "{}"
    return "".join([opening, "\n", ",\n".join(items), "\n", indent, closing])


if __name__ == "__main__":
    record()
