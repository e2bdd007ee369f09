"""``taut runs [DIR ...]``: the runs in some directories, the one that wrote last first, and what became of each.

    running       a live process holds the run's lock; which one is told
    finished      nothing is left to do
    interrupted   a signal ended it, its state saved
    stopped       an error ended it; the reason is told
    died          neither an end nor a process: it was killed
    damaged       its resolved.json or events.jsonl cannot be read; what is wrong is told

An interrupted, stopped or died run goes on with ``taut resume``: after its newest complete checkpoint, from step 1
where it has none. Checkpoints are listed by their names; what is in them is verified by whoever resumes. Of the events
no more is read than the last ones. Nothing is written.

Imports no torch. The command line imports it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

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
"""How many levels below a directory runs are looked for."""
DEFAULT = Path("runs")
AFTER_END = ("checkpoint", "warning")
"""What a run may still say after its end: of a checkpoint that was being written."""

State = Literal["running", "finished", "interrupted", "stopped", "died", "damaged"]
ENDED: tuple[State, ...] = ("interrupted", "stopped", "died")
"""What can be gone on with."""


@configclass
class Runs:
    """The runs in some directories."""

    directories: list[str] = field(default_factory=list)
    """Where to look, three levels deep; by default in runs, or where that is not, in the current directory."""
    json: bool = False
    """Print a JSON array instead of a table."""


@dataclass(frozen=True)
class RunState:
    """What became of a run."""

    out: Path
    state: State
    method: str | None
    """sft and its like; None where it cannot be read."""
    step: int
    """The last step in force."""
    num_steps: int | None
    loss: float | None
    """Of that step."""
    checkpoint: Path | None
    """The newest complete one."""
    written: float
    """When the run last wrote, in seconds since 1970."""
    reason: str | None
    """Why it ended, who runs it, or what is wrong with it."""

    @property
    def resumes_after(self) -> int | None:
        """The step after which ``taut resume`` goes on; None where there is nothing to go on with."""
        if self.state not in ENDED:
            return None
        return 0 if self.checkpoint is None else step_of(self.checkpoint)


class Seen(NamedTuple):
    """What the last events say."""

    step: int = 0
    loss: float | None = None
    written: float | None = None
    end: Event | None = None
    """The event that ended the run, if nothing has happened since."""


def run(config: Runs) -> int:
    """Print the runs."""
    places = _places(config.directories)
    found = runs(places)
    if config.json:
        listed = [{**asdict(one), "resumes_after": one.resumes_after} for one in found]
        sys.stdout.write(json.dumps(to_json(listed), indent=1, ensure_ascii=False) + "\n")
    elif found:
        sys.stdout.write(table(found, time.time()))
    else:
        looked = ", ".join(map(str, places))
        sys.stdout.write(f"no runs in {looked}: no directory with a {MARK}\n")
    return 0


def runs(directories: Sequence[str | os.PathLike[str]]) -> list[RunState]:
    """Every run in the directories, newest first; of none, where ``taut runs`` looks. Raises OutputError where one of
    them cannot be looked into."""
    outs = [out for place in _places(directories) for out in _find(place)]
    distinct = {out.resolve(): out for out in reversed(outs)}
    return sorted(map(state_of, distinct.values()), key=lambda one: (-one.written, str(one.out)))


def state_of(out: Path) -> RunState:
    """What became of the run in ``out``."""
    holder = owner(out)
    resolved, wrong = {}, []
    seen = Seen()
    try:
        resolved = read_resolved(out)
    except TautError as error:
        wrong.append(str(error))
    try:
        seen = _last_seen(out / EVENTS)
    except TautError as error:
        wrong.append(str(error))
    state, reason = _became(seen.end, out)
    if wrong:
        state, reason = "damaged", "; ".join(wrong)
    if holder is not None:
        state, reason = "running", "; ".join([holder, *wrong])
    num_steps, method = resolved.get("num_steps"), resolved.get("method")
    checkpoints = complete(out / CHECKPOINTS)
    return RunState(
        out=out,
        state=state,
        method=method if isinstance(method, str) else None,
        step=seen.step,
        num_steps=num_steps if isinstance(num_steps, int) else None,
        loss=seen.loss,
        checkpoint=checkpoints[-1] if checkpoints else None,
        written=seen.written or _modified(out / MARK),
        reason=reason,
    )


def table(found: Iterable[RunState], now: float) -> str:
    """The runs, one a line; the last column may be of any length."""
    head = ("run", "method", "state", "step", "loss", "checkpoint", "wrote", "")
    rows = [head, *(_row(one, now) for one in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "".join(f"{line}\n" for line in lines)


def _row(one: RunState, now: float) -> tuple[str, ...]:
    after = one.resumes_after
    resumes = (
        "" if after is None else f"resumes {f'after step {after}' if after else 'from step 1'}"
    )
    why = " ".join("; ".join(filter(None, [resumes, one.reason])).split())
    return (
        one_line(str(one.out)),
        one_line(one.method or ""),
        one.state,
        f"{one.step}/{'?' if one.num_steps is None else one.num_steps}",
        "" if one.loss is None else f"{one.loss:.4f}",
        "" if one.checkpoint is None else one_line(one.checkpoint.name),
        _age(one.written, now),
        why,
    )


def _age(then: float, now: float) -> str:
    """How long ago: ``12 s ago``; a date where it is days."""
    seconds = max(0.0, now - then)
    for name, length, most in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 48)):
        if seconds < most * length:
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
    """The runs in a directory, which may be one itself; nothing in a run is looked at."""
    try:
        if (place / MARK).is_file():
            yield place
            return
        below = sorted(Path(entry) for entry in os.scandir(place) if _may_hold_runs(entry))
    except OSError:  # somebody else's, or gone by now
        return
    for path in below if depth else ():
        yield from _find(path, depth - 1)


def _may_hold_runs(entry: os.DirEntry[str]) -> bool:
    return not entry.name.startswith(".") and entry.is_dir()


def _last_seen(path: Path) -> Seen:
    """The last step in force, and how the run ended if it did."""
    if not path.is_file():
        return Seen()
    seen, is_after_end = Seen(), True
    for event in newest_first(path):
        if seen.written is None:
            seen = seen._replace(written=_number(event.get("time")))
        if is_after_end and event["kind"] not in AFTER_END:
            is_after_end = False
            seen = seen._replace(end=event if event["kind"] == "end" else None)
        if event["kind"] == "step":
            return seen._replace(step=event.get("step", 0), loss=_number(event.get("loss")))
    return seen


def _became(end: Event | None, out: Path) -> tuple[State, str | None]:
    """The state of a run that no process has, and why it ended."""
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


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # gone by now: it is damaged
        return 0.0


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
