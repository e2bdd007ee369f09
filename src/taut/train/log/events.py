"""``events.jsonl``: the record of a run, one JSON object per line. The other reports are views of it.

An event has ``kind`` (one of KINDS), ``time`` (seconds since 1970) and the fields of its kind. A line is passed to the
system when its event happens, so a killed process loses none; it is forced to the disk (fsync) at checkpoints, at a
resume and at the end, so a power failure loses nothing that a checkpoint relies on.

Lines are strict JSON: non-finite floats are the strings "nan", "inf" and "-inf". ``read_events`` turns such strings
back into floats, except within lists and mappings.

A killed writer may leave half a line at the end: readers skip it, and the next writer removes it. A ``resume`` line
with ``from_step`` k revokes earlier events of steps after k; with ``is_measured`` false also the evaluations after step
k, which are repeated. It revokes no ``utilization``: the machine was as busy as that. A file that is deleted or moved
during the run is written again (``EventLog.restore``).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TextIO, TypeAlias, get_args

from pydantic_core import from_json

from taut.errors import DataError, OutputError
from taut.io import files

Event: TypeAlias = dict[str, Any]
Kind = Literal[
    "start",
    "check",
    "step",
    "rollout",
    "utilization",
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
LASTING = ("utilization",)
"""Kinds that a resume does not revoke, whatever their step."""
SYNCED = ("checkpoint", "resume", "end")
BLOCK = 2**16
"""Bytes of the first read from the end."""
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


PREFIXES = {"step": "train", "rollout": "rollout", "eval": "eval", "utilization": "system"}
"""Kinds of events with curves -> prefix of the curves' names."""
NOT_CURVES = ("step", "time")
NOT_MEASURED = ("loss", "grad_norm")
"""Fields that are 0 in the event of a skipped step, which has no such value."""


class ReportLost(Exception):
    """A report that can no longer be written; the message names it and the reason."""


class EventLog:
    """Appends events to a file, which must not be a symbolic link: its target may belong to something else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = _open_to_append(path)
            number = self._file.fileno()
            os.ftruncate(number, _read_all(number).rfind(b"\n") + 1)  # drops a torn last line
        except OSError as error:
            raise _unwritable(path, error) from error

    def restore(self) -> str | None:
        """Write the file again if it was deleted during the run; returns a notice, or None if it is in place. Raises
        OutputError if another file is in its place.
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
            content = _read_all(number)
            files.write_bytes(self.path, content)
            restored = _open_to_append(self.path)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self._file.close()
        self._file = restored
        num_lines = content.count(b"\n")
        return f"{self.path} was deleted or moved during the run: written again, with the {num_lines:,} lines it had"

    def __call__(self, event: Event) -> None:
        line = json.dumps(to_json(event), allow_nan=False, ensure_ascii=False)
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
        except OSError as error:  # closing retries the last write
            raise _unwritable(self.path, error) from error


def read_events(path: str | Path) -> list[Event]:
    """Read the valid events: each step once, however often the run was killed and resumed."""
    events: list[Event] = []
    for event in all_events(Path(path)):
        if event["kind"] == "resume":
            events = [earlier for earlier in events if stands(earlier, event)]
        events.append(event)
    return events


def all_events(path: Path) -> Iterator[Event]:
    """Read every event, including those that a resume revokes."""
    try:
        with files.open_regular(path) as file:
            lines = file.read().split(b"\n")
    except OSError as error:
        raise unreadable(path, error) from error
    for number, line in enumerate(lines[:-1], start=1):
        yield parse_event(f"{path}:{number}", line)


def newest_first(path: Path) -> Iterator[Event]:
    """Read the valid events, last one first; of a long file only as much as is consumed."""
    resumes: list[Event] = []
    for number, line in enumerate(_lines_back(path), start=1):
        event = parse_event(f"{path}, line {number} from its end", line)
        if all(stands(event, resume) for resume in resumes):
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
                    lines.pop()  # the torn line, or nothing, after the last line end
                    is_last = False
                yield from reversed(lines)
                size *= 2
            if not is_last:
                yield begun
    except OSError as error:
        raise unreadable(path, error) from error


def stands(earlier: Event, resume: Event) -> bool:
    """Whether an earlier event stays valid after a resume."""
    if earlier["kind"] in LASTING:
        return True
    step, last = earlier.get("step", 0), resume["from_step"]
    is_measured_again = not resume.get("is_measured", True) and earlier["kind"] in MEASURED
    return bool(step < last or (step == last and not is_measured_again))


def to_json(value: Any) -> Any:
    """``value`` in JSON types; non-finite floats as strings."""
    if type(value).__module__ == "numpy" and value.ndim == 0:  # numpy itself is not needed here
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(item) for item in value]
    assert isinstance(value, os.PathLike), f"an event cannot hold a {type(value).__name__}"
    return os.fspath(value)


def parse_event(place: str, line: bytes) -> Event:
    """Parse a line. ``place``: where it is, for an error."""
    event: Any
    try:
        event = _read_json(line)
    except (ValueError, RecursionError):
        event = None
    problem = ""
    if not isinstance(event, dict) or event.get("kind") not in KINDS:
        problem = (
            f"a line that is no event at {place}; expected a JSON object with 'kind', one of {', '.join(KINDS)}; "
            "remove the line if the file was edited by hand"
        )
    elif not all(isinstance(event.get(key, 0), int) for key in ("step", "from_step")):
        problem = f"a step that is no integer at {place}; expected a count; correct it"
    elif event["kind"] == "resume" and "from_step" not in event:
        problem = f"a resume without from_step at {place}; expected a step; correct it"
    if problem:
        raise DataError(f"found {problem}")
    if b'nan"' in line or b'inf"' in line:  # seldom, and to look at each value takes longer
        for key, value in event.items():
            if type(value) is str and value in NOT_FINITE:
                event[key] = NOT_FINITE[value]
    parsed: Event = event
    return parsed


def _read_json(line: bytes) -> Any:
    """Parse with pydantic, three times as fast as json, or with json, which accepts half a surrogate pair."""
    try:
        return from_json(line, cache_strings="keys")
    except ValueError:
        return json.loads(line)


def with_intervals(event: Event) -> dict[str, tuple[Any, Any, Any]]:
    """Field of an evaluation -> value and bounds (``NAME_low``, ``NAME_high``), which may be None."""
    return {
        name: (value, event.get(f"{name}_low"), event.get(f"{name}_high"))
        for name, value in event.items()
        if not (name.endswith(("_low", "_high")) and name.rpartition("_")[0] in event)
    }


def scalars(event: Event) -> dict[str, float]:
    """Curve -> value of an event, such as ``train/loss``; empty for kinds without curves."""
    prefix = PREFIXES.get(event["kind"])
    return {f"{prefix}/{name}": float(value) for name, value in measured(event).items()}


def measured(event: Event) -> dict[str, float]:
    """Field -> number of an event that is a point of a curve."""
    if event["kind"] not in PREFIXES:
        return {}
    left_out = NOT_CURVES + (NOT_MEASURED if event.get("skipped") else ())
    return {
        name: value
        for name, value in event.items()
        if type(value) in (float, int) and name not in left_out
    }


def _open_to_append(path: Path) -> TextIO:
    number = files.open_descriptor(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    # Half a surrogate pair, which the JSON of a server or a tool may have, becomes a question mark.
    return os.fdopen(number, "a", encoding="utf-8", errors="replace")


def _read_all(number: int) -> bytes:
    """The content of an open file."""
    with os.fdopen(os.dup(number), "rb") as file:
        file.seek(0)
        return file.read()


def unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"cannot read {path}: {error.strerror}; expected the events.jsonl of a run; give its path"
    )


def _unwritable(path: Path, error: OSError) -> OutputError:
    return OutputError(
        f"cannot write {path}: {error.strerror}; expected a place with room that may be written; "
        "free it or choose another out"
    )
