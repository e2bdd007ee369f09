"""``events.jsonl``: what happened in a run, one JSON object a line. The other reports are views of it.

An event has ``kind`` (one of KINDS), ``time`` (seconds since 1970) and its own fields. A line is handed to the system
when its event happens, so a killed process loses none; it is forced to the disk (fsync) at checkpoints, at a resume and
at the end, so a machine that loses power loses nothing that a checkpoint before it relies on.

Lines are strict JSON: floats that are not finite stand as the strings "nan", "inf" and "-inf". ``read_events`` turns
such strings back into floats, except within lists and mappings.

A killed writer may leave half a line at the end: readers skip it, and the next writer removes it. A ``resume`` line
with ``from_step`` k takes back what earlier lines say of steps after k; with ``is_measured`` false also what was
measured after step k, which is measured again. A file that is deleted or moved during the run is written again
(``EventLog.restore``).

Imports the standard library, numpy, durable and errors. Anyone above may import it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TextIO, TypeAlias, get_args

import numpy as np

from taut.errors import DataError, OutputError
from taut.io import files

Event: TypeAlias = dict[str, Any]
Kind = Literal[
    "start",
    "check",
    "step",
    "rollout",
    "budget",
    "eval",
    "best",
    "warning",
    "checkpoint",
    "resume",
    "end",
]

KINDS: tuple[Kind, ...] = get_args(Kind)
MEASURED = ("eval", "best")
SYNCED = ("checkpoint", "resume", "end")
BLOCK = 2**16
"""Bytes that are read first, from the end."""
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class ReportLost(Exception):
    """A view of the events that cannot be written any more; the message says which, and why."""


class EventLog:
    """Appends events to a file, which may not be a symbolic link: what it points to may be no run's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = _open_to_append(path)
            _drop_torn_line(self._file.fileno())
        except OSError as error:
            raise _unwritable(path, error) from error

    def restore(self) -> str | None:
        """Write the file again if it was deleted during the run, and say so; None where it is in place.

        Raises OutputError where another file is in its place: lines would go where nobody reads them.
        """
        try:
            number = self._file.fileno()
            is_linked = os.fstat(number).st_nlink > 0
            if is_linked and os.path.lexists(self.path):
                return None
            if os.path.lexists(self.path):
                raise OutputError(
                    f"{self.path} was replaced by another file during the run; expected the file that the run writes; "
                    "leave it alone while the run writes it"
                )
            content = _content(number)
            files.write_bytes(self.path, content)
            restored = _open_to_append(self.path)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self._file.close()
        self._file = restored
        num_lines = content.count(b"\n")
        return f"{self.path} was deleted or moved during the run: written again, with the {num_lines:,} lines it had"

    def __call__(self, event: Event) -> None:
        line = json.dumps(plain(event), allow_nan=False, ensure_ascii=False)
        try:
            self._file.write(line + "\n")
            self._file.flush()
            if event["kind"] in SYNCED:
                os.fsync(self._file.fileno())
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:  # what could not be written is tried once more
            raise _unwritable(self.path, error) from error


def read_events(path: str | Path) -> list[Event]:
    """The events in force: each step once, however often the run was killed and resumed."""
    events: list[Event] = []
    for event in all_events(Path(path)):
        if event["kind"] == "resume":
            events = [earlier for earlier in events if _stands(earlier, event)]
        events.append(event)
    return events


def all_events(path: Path) -> Iterator[Event]:
    """Every event that was written, those taken back by a resume included."""
    try:
        with files.open_regular(path) as file:
            lines = file.read().split(b"\n")
    except OSError as error:
        raise _unreadable(path, error) from error
    for number, line in enumerate(lines[:-1], start=1):
        yield _parse(f"{path}:{number}", line)


def newest_first(path: Path) -> Iterator[Event]:
    """The events in force, from the last one back; of a long file no more is read than is asked for."""
    resumes: list[Event] = []
    for number, line in enumerate(_lines_back(path), start=1):
        event = _parse(f"{path}, line {number} from its end", line)
        if all(_stands(event, resume) for resume in resumes):
            yield event
        if event["kind"] == "resume":
            resumes.append(event)


def _lines_back(path: Path) -> Iterator[bytes]:
    """The whole lines of a file, the last one first."""
    try:
        with files.open_regular(path) as file:
            position, size = file.seek(0, os.SEEK_END), BLOCK
            begun, is_last = b"", True
            while position:
                size = min(size, position)
                position = file.seek(position - size)
                begun, *lines = (file.read(size) + begun).split(b"\n")
                if lines and is_last:
                    lines, is_last = (
                        lines[:-1],
                        False,
                    )  # what follows the last end of a line is torn
                yield from reversed(lines)
                size *= 2
            if not is_last:
                yield begun
    except OSError as error:
        raise _unreadable(path, error) from error


def _stands(earlier: Event, resume: Event) -> bool:
    """Whether a resume leaves an earlier event in force."""
    step, last = earlier.get("step", 0), resume["from_step"]
    is_measured_again = not resume.get("is_measured", True) and earlier["kind"] in MEASURED
    return bool(step < last or (step == last and not is_measured_again))


def plain(value: Any) -> Any:
    """``value`` in JSON's own types."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    assert isinstance(value, os.PathLike), f"an event cannot hold a {type(value).__name__}"
    return os.fspath(value)


def _parse(place: str, line: bytes) -> Event:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict) or event.get("kind") not in KINDS:
        raise DataError(
            f"found a line that is no event at {place}; expected a JSON object with 'kind', one of "
            f"{', '.join(KINDS)}; remove the line if the file was edited by hand"
        )
    steps = [event.get("step", 0), event.get("from_step", 0)]
    if not all(isinstance(step, int) for step in steps):
        raise DataError(f"found a step that is no integer at {place}; expected a count; correct it")
    if event["kind"] == "resume" and "from_step" not in event:
        raise DataError(f"found a resume without from_step at {place}; expected a step; correct it")
    return {
        key: NOT_FINITE.get(value, value) if isinstance(value, str) else value
        for key, value in event.items()
    }


def _open_to_append(path: Path) -> TextIO:
    number = files.open_descriptor(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    return os.fdopen(number, "a", encoding="utf-8")


def _content(number: int) -> bytes:
    """All that an open file contains."""
    with os.fdopen(os.dup(number), "rb") as file:
        file.seek(0)
        return file.read()


def _drop_torn_line(number: int) -> None:
    """Cut the file back to its last whole line."""
    os.ftruncate(number, _content(number).rfind(b"\n") + 1)


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"cannot read {path}: {error.strerror}; expected the events.jsonl of a run; give its path"
    )


def _unwritable(path: Path, error: OSError) -> OutputError:
    return OutputError(
        f"cannot write {path}: {error.strerror}; expected a place with room that may be written; "
        "free it or choose another out"
    )
