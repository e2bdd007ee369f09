"""``taut runs [DIR ...]``: the runs in some directories with their states, the most recently written first.

    running       a live process holds the run's lock; the reason names it
    finished      the run is complete
    interrupted   a signal ended it, its state is saved
    stopped       an error ended it; the reason is shown
    died          it has neither an end nor a process: it was killed
    damaged       its resolved.json or events.jsonl cannot be read; the reason is shown

``taut resume`` continues an interrupted, stopped or died run: after its newest complete checkpoint, or from step 1.
Checkpoints are listed by name; a resume verifies their content. Only the last events are read. Nothing is written.

Imports no torch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from taut.config import configclass, user_path
from taut.errors import OutputError, TautError
from taut.io.console import one_line
from taut.train.log.events import Event, newest_first, to_json
from taut.train.run_dir import (
    CHECKPOINTS,
    EVENTS,
    MARK,
    MODEL,
    complete,
    owner,
    read_resolved,
    step_of,
)

DEPTH = 3
"""Levels below a directory that are searched for runs."""
DEFAULT = Path("runs")
AFTER_END = ("checkpoint", "warning")
"""Events that may follow the end: of a checkpoint that was being written."""

State = Literal["running", "finished", "interrupted", "stopped", "died", "damaged"]
ENDED: tuple[State, ...] = ("interrupted", "stopped", "died")
"""States from which a run can resume."""


@configclass
class Runs:
    """List the runs in directories."""

    directories: list[str] = field(default_factory=list)
    """Directories to search, three levels deep; default: runs, or else the current directory."""
    json: bool = False
    """Print a JSON array instead of a table."""


@dataclass(frozen=True)
class RunState:
    """The state of a run."""

    out: Path
    state: State
    method: str | None
    """The name of the method; None where it cannot be read."""
    step: int
    """The last valid step."""
    num_steps: int | None
    loss: float | None
    """Loss of that step."""
    checkpoint: Path | None
    """The newest complete checkpoint."""
    written: float
    """Time of the last event, in seconds since 1970."""
    reason: str | None
    """Why it ended, which process runs it, or the damage."""

    @property
    def resumes_after(self) -> int | None:
        """The step after which ``taut resume`` continues; None where it cannot."""
        if self.state not in ENDED:
            return None
        return 0 if self.checkpoint is None else step_of(self.checkpoint)


def run(config: Runs) -> int:
    """Print the runs."""
    places = _places(config.directories)
    states = runs(places)
    if config.json:
        listed = [{**asdict(state), "resumes_after": state.resumes_after} for state in states]
        sys.stdout.write(json.dumps(to_json(listed), indent=1, ensure_ascii=False) + "\n")
    elif states:
        sys.stdout.write(table(states, time.time()))
    else:
        looked = ", ".join(map(str, places))
        sys.stdout.write(f"no runs in {looked}: no directory with a {MARK}\n")
    return 0


def runs(directories: Sequence[str | os.PathLike[str]]) -> list[RunState]:
    """Every run in the directories (none: those that ``taut runs`` searches), newest first. Raises OutputError where a
    directory cannot be read.
    """
    outs = [out for place in _places(directories) for out in _find(place)]
    distinct = {out.resolve(): out for out in reversed(outs)}
    return sorted(
        map(state_of, distinct.values()), key=lambda state: (-state.written, str(state.out))
    )


def state_of(out: Path) -> RunState:
    """The state of the run in ``out``."""
    holder = owner(out)
    resolved, damage = {}, []
    newest: Event | None = None
    end: Event | None = None
    step: Event = {}
    try:
        resolved = read_resolved(out)
    except TautError as error:
        damage.append(str(error))
    try:
        newest, end, step = _last_events(out / EVENTS)
    except TautError as error:
        damage.append(str(error))
    state, reason = _state_at_end(end, out)
    if damage:
        state, reason = "damaged", "; ".join(damage)
    if holder is not None:
        state, reason = "running", "; ".join([holder, *damage])
    num_steps, method = resolved.get("num_steps"), resolved.get("method")
    checkpoints = complete(out / CHECKPOINTS)
    written = None if newest is None else _number(newest.get("time"))
    if not written:
        try:
            written = (out / MARK).stat().st_mtime
        except OSError:  # removed meanwhile: the run is damaged
            written = 0.0
    return RunState(
        out=out,
        state=state,
        method=method if isinstance(method, str) else None,
        step=step.get("step", 0),
        num_steps=num_steps if isinstance(num_steps, int) else None,
        loss=_number(step.get("loss")),
        checkpoint=checkpoints[-1] if checkpoints else None,
        written=written,
        reason=reason,
    )


def table(states: Iterable[RunState], now: float) -> str:
    """The runs, one per line."""
    head = ("run", "method", "state", "step", "loss", "checkpoint", "wrote", "")
    rows = [head, *(_row(state, now) for state in states)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "".join(f"{line}\n" for line in lines)


def _row(state: RunState, now: float) -> tuple[str, ...]:
    after = state.resumes_after
    resumes = (
        "" if after is None else f"resumes {f'after step {after}' if after else 'from step 1'}"
    )
    why = " ".join("; ".join(filter(None, [resumes, state.reason])).split())
    return (
        one_line(str(state.out)),
        one_line(state.method or ""),
        state.state,
        f"{state.step}/{'?' if state.num_steps is None else state.num_steps}",
        "" if state.loss is None else f"{state.loss:.4f}",
        "" if state.checkpoint is None else one_line(state.checkpoint.name),
        _age(state.written, now),
        why,
    )


def _age(then: float, now: float) -> str:
    """The age as text, ``12 s ago``; a date after two days."""
    seconds = max(0.0, now - then)
    for name, length, count in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 48)):
        if seconds < count * length:
            return f"{seconds // length:.0f} {name} ago"
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(then))


def _places(directories: Sequence[str | os.PathLike[str]]) -> list[Path]:
    if not directories:
        return [DEFAULT if DEFAULT.is_dir() else Path()]
    places = [user_path(os.fspath(directory), "directories") for directory in directories]
    for place in places:
        if not (place.is_dir() and os.access(place, os.R_OK | os.X_OK)):
            raise OutputError(
                f"found {str(place)!r}, which is no directory that can be read; expected one to look for runs in; "
                "name another"
            )
    return places


def _find(place: Path, depth: int = DEPTH) -> Iterator[Path]:
    """The runs in a directory, which may be a run itself. Runs are not searched."""
    try:
        if (place / MARK).is_file():
            yield place
            return
        below = sorted(
            Path(entry)
            for entry in os.scandir(place)
            if not entry.name.startswith(".") and entry.is_dir()
        )
    except OSError:  # no permission, or removed meanwhile
        return
    for path in below if depth else ():
        yield from _find(path, depth - 1)


def _last_events(path: Path) -> tuple[Event | None, Event | None, Event]:
    """The newest event, the event that ended the run if no other followed, and the newest step ({}: none)."""
    newest, end, is_after_end = None, None, True
    for event in newest_first(path) if path.is_file() else ():
        newest = newest or event
        if is_after_end and event["kind"] not in AFTER_END:
            is_after_end = False
            end = event if event["kind"] == "end" else None
        if event["kind"] == "step":
            return newest, end, event
    return newest, end, {}


def _state_at_end(end: Event | None, out: Path) -> tuple[State, str | None]:
    """The state of a run without a process, and why it ended."""
    if end is None:
        return "died", None
    outcome, reason = end.get("outcome"), end.get("reason")
    if outcome == "finished":
        result = Path(end.get("model") or MODEL).name  # or the adapter
        is_there = (out / result).is_dir()
        return ("finished", None) if is_there else ("stopped", f"finished, but {result}/ is gone")
    if outcome in ("interrupted", "stopped"):
        state: State = "interrupted" if outcome == "interrupted" else "stopped"
        return state, str(reason)
    return "died", None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
