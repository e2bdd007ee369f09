"""The runs in directories, and the state of each.

    running       a live process holds the run's lock; the reason names it
    finished      the run is complete
    interrupted   a signal ended it, its state is saved
    stopped       an error ended it; the reason is shown
    died          it has neither an end nor a process: it was killed
    damaged       its resolved.json or events.jsonl cannot be read; the reason is shown

Checkpoints are listed by name; a resume verifies their content. Only the last events are read. Nothing is written.

No torch here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from taut.errors import TautError
from taut.train.log.events import Event, newest_first
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
AFTER_END = ("checkpoint", "warning")
"""Events that may follow the end: of a checkpoint that was being written."""

State = Literal["running", "finished", "interrupted", "stopped", "died", "damaged"]
ENDED: tuple[State, ...] = ("interrupted", "stopped", "died")
"""States from which a run can resume."""


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
    """Loss of that step. A policy gradient's says nothing of how well it goes: look at ``reward``."""
    reward: float | None
    """Mean reward of the newest rollout; None: the run has none, or its rollouts have no rewards."""
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


def states_in(places: Sequence[Path]) -> list[RunState]:
    """Every run in the directories, newest first."""
    outs = [out for place in places for out in find(place)]
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
    rollout: Event = {}
    try:
        resolved = read_resolved(out)
    except TautError as error:
        damage.append(str(error))
    try:
        config = resolved.get("config")
        generates = isinstance(config, dict) and "rollout" in config
        newest, end, step, rollout = _last_events(out / EVENTS, generates)
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
        reward=_number(rollout.get("reward")),
        checkpoint=checkpoints[-1] if checkpoints else None,
        written=written,
        reason=reason,
    )


def find(place: Path, depth: int = DEPTH) -> Iterator[Path]:
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
        yield from find(path, depth - 1)


def _last_events(path: Path, generates: bool) -> tuple[Event | None, Event | None, Event, Event]:
    """The newest event, the event that ended the run if no other followed, the newest step, and of a run that generates
    the newest rollout ({}: none).
    """
    newest, end, is_after_end = None, None, True
    step: Event = {}
    rollout: Event = {}
    for event in newest_first(path) if path.is_file() else ():
        newest = newest or event
        if is_after_end and event["kind"] not in AFTER_END:
            is_after_end = False
            end = event if event["kind"] == "end" else None
        if event["kind"] == "step":
            step = step or event
        if event["kind"] == "rollout":
            rollout = rollout or event
        if step and (rollout or not generates):
            break
    return newest, end, step, rollout


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
