"""Find the runs in directories, and the state of each.

    running            a live process holds the run's lock; the reason names it
    finished           complete
    learned_nothing    complete, but no step had a gradient or no rewards differed; the reason says why
    interrupted        ended by a signal, with its state saved
    stopped            ended by an error, which is the reason
    died               neither an end nor a process: killed
    damaged            resolved.json or events.jsonl cannot be read; the reason says why

Only the last events are read. Checkpoints are listed by name; a resume verifies their content. Nothing is written.

No torch here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from taut.config import written
from taut.errors import TautError
from taut.io import files
from taut.io.console import one_line
from taut.train.log.events import Event, newest_first
from taut.train.run_dir import (
    BEST,
    BEST_FILE,
    CHECKPOINTS,
    EVENTS,
    FINISHED,
    MARK,
    MODEL,
    complete,
    dotted,
    owner,
    read_resolved,
    step_of,
)

NOT_COMPARED = ("out", "resume", "overwrite", "log.", "check")
"""Beginnings of keys that do not change what is learned."""
MAX_SETTINGS = 4
"""Settings in a cell."""
DEPTH = 3
"""Levels of directories that are searched for runs."""
AFTER_END = ("checkpoint", "warning")
"""Events that may follow the end, of a checkpoint that was being written."""

State = Literal[
    "running", "finished", "learned_nothing", "interrupted", "stopped", "died", "damaged"
]
ENDED: tuple[State, ...] = ("interrupted", "stopped", "died")
"""States from which a run can resume."""


@dataclass(frozen=True)
class RunState:
    """The state of a run."""

    out: Path
    state: State
    method: str | None
    """Name of the method; None where it cannot be read."""
    step: int
    """The last valid step."""
    num_steps: int | None
    loss: float | None
    """Loss of that step; with a policy gradient ``reward`` shows progress, the loss does not."""
    reward: float | None
    """Mean reward of the newest rollout; None without rollouts or rewards."""
    held_out: float | None
    """Newest held-out loss; None if none was measured in the last events."""
    best: dict[str, Any] | None
    """The best measurement, of the model in ``best/``: metric, value, step; None without ``eval.best``."""
    checkpoint: Path | None
    """The newest complete checkpoint."""
    written: float
    """Time of the last event, in seconds since 1970."""
    seconds: float | None
    """From the first event to the last, pauses before a resume included."""
    reason: str | None
    """Why the run ended, which process runs it, or what is damaged."""
    settings: dict[str, Any] = field(default_factory=dict, repr=False)
    """Dotted key -> the value in force: the configuration, with what taut chose where it leaves a key open."""

    @property
    def resumes_after(self) -> int | None:
        """The step after which ``taut resume`` continues; None if it cannot."""
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
    """Find the state of the run in ``out``."""
    # its lock, its configuration and its last events; a damaged file is reported as the state
    holder = owner(out)
    resolved, damage = {}, []
    newest: Event | None = None
    end: Event | None = None
    step: Event = {}
    rollout: Event = {}
    held_out: float | None = None
    try:
        resolved = read_resolved(out)
    except TautError as error:
        damage.append(str(error))
    try:
        config = resolved.get("config")
        generates = isinstance(config, dict) and "rollout" in config
        newest, end, step, rollout, held_out = _last_events(out / EVENTS, generates)
    except TautError as error:
        damage.append(str(error))

    # a live process outweighs damage, and damage the last event
    state, reason = _state_at_end(end, out)
    if damage:
        state, reason = "damaged", "; ".join(damage)
    if holder is not None:
        state, reason = "running", "; ".join([holder, *damage])
    num_steps, method = resolved.get("num_steps"), resolved.get("method")
    checkpoints = complete(out / CHECKPOINTS)
    written = None if newest is None else _number(newest.get("time"))
    begun = None if written is None else _begun(out / EVENTS)
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
        held_out=held_out,
        best=_best(out),
        checkpoint=checkpoints[-1] if checkpoints else None,
        written=written,
        seconds=None if begun is None or newest is None else newest["time"] - begun,
        reason=reason,
        settings=settings_of(resolved),
    )


def find(place: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Find the runs in a directory, which may be a run itself; runs within runs are not searched for."""
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


def _last_events(
    path: Path, generates: bool
) -> tuple[Event | None, Event | None, Event, Event, float | None]:
    """Read from the end of the log: the newest event; the end, if no step followed; the newest step; in a run that
    generates the newest rollout ({} where there is none); and the newest held-out loss among these.
    """
    newest, end, is_after_end = None, None, True
    step: Event = {}
    rollout: Event = {}
    held_out: float | None = None
    for event in newest_first(path) if path.is_file() else ():
        newest = newest or event
        if is_after_end and event["kind"] not in AFTER_END:
            is_after_end = False
            end = event if event["kind"] == "end" else None
        if event["kind"] == "eval" and held_out is None:
            held_out = _number(event.get("loss"))
        if event["kind"] == "step":
            step = step or event
        if event["kind"] == "rollout":
            rollout = rollout or event
        if step and (rollout or not generates):
            break
    return newest, end, step, rollout, held_out


def _best(out: Path) -> dict[str, Any] | None:
    """What ``best.json`` says of the best model."""
    try:
        note = json.loads((out / BEST / BEST_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # there is none, or it is being replaced
        return None
    is_note = isinstance(note, dict) and isinstance(note.get("value"), int | float)
    return {key: note.get(key) for key in ("metric", "value", "step")} if is_note else None


def _begun(path: Path) -> float | None:
    """Time of the first event."""
    try:
        with files.open_regular(path) as file:
            return _number(json.loads(file.readline()).get("time"))
    except (OSError, ValueError, AttributeError):  # damage is told of the last events
        return None


def differing(states: Sequence[RunState]) -> list[dict[str, Any]]:
    """Of each run the settings that another run of its method has otherwise; {} where the method has one run."""
    values: dict[tuple[str | None, str], set[str]] = {}
    for state in states:
        for key, value in state.settings.items():
            values.setdefault((state.method, key), set()).add(json.dumps(value, sort_keys=True))
    return [
        {
            key: value
            for key, value in state.settings.items()
            if len(values[state.method, key]) > 1 and not key.startswith(NOT_COMPARED)
        }
        for state in states
    ]


def settings_in_words(settings: Mapping[str, Any]) -> str:
    """Some settings in a cell: ``learning_rate=1e-4 rank=16``."""
    parts = [f"{key.rpartition('.')[2]}={written(value)}" for key, value in settings.items()]
    more = len(parts) - MAX_SETTINGS
    return one_line(" ".join(parts[:MAX_SETTINGS])) + (f" and {more} more" if more > 0 else "")


def settings_of(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value of a configuration; of a key that is open, what was decided."""
    config = resolved.get("config")
    settings = dict(dotted(config)) if isinstance(config, dict) else {}
    for decision in resolved.get("decisions") or ():
        name = decision.get("name") if isinstance(decision, dict) else None
        if isinstance(name, str) and name in settings and settings[name] is None:
            settings[name] = decision.get("value")
    return settings


def _state_at_end(end: Event | None, out: Path) -> tuple[State, str | None]:
    """The state of a run without a process, and the reason."""
    if end is None:
        return "died", None
    outcome, reason = end.get("outcome"), end.get("reason")
    if outcome in FINISHED:
        result = Path(end.get("model") or MODEL).name  # or the adapter
        if not (out / result).is_dir():
            return "stopped", f"finished, but {result}/ is gone"
        return outcome, end.get("learned_nothing") or end.get("ended_early")
    if outcome in ("interrupted", "stopped"):
        state: State = "interrupted" if outcome == "interrupted" else "stopped"
        return state, str(reason)
    return "died", None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
