"""The events of a run, read as they are written: what is needed of each is kept, its curves as columns of numbers.

A step's samples and a rollout's texts are not kept; ``step_event`` reads the line again.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from pathlib import Path

from taut.train.log.events import (
    LASTING,
    MEASURED,
    PREFIXES,
    Event,
    EventTail,
    event_at,
    measured,
    stands,
)
from taut.train.run_dir import EVENTS

KEPT = ("eval", "best", "warning", "budget", "checkpoint", "resume")
"""Kinds of events that are kept as they are."""


@dataclass
class Column:
    """Numbers by step, in the order of steps but for what a resume does not revoke."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def append(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)

    def keep(self, last: int) -> None:
        """Drop what is after step ``last``."""
        end = bisect_right(self.steps, last)
        del self.steps[end:], self.values[end:]


@dataclass
class History:
    """The events of the run in ``out`` that stand, each step once. ``update`` reads what was appended."""

    out: Path
    start: Event = field(default_factory=dict)
    """The newest one: a resumed run writes another."""
    started: float | None = None
    """When the run began."""
    end: Event | None = None
    """The last event of a run that has ended."""
    checks: dict[str, Event] = field(default_factory=dict)
    """The newest of each name."""
    kept: dict[str, list[Event]] = field(default_factory=lambda: {kind: [] for kind in KEPT})
    curves: dict[str, Column] = field(default_factory=dict)
    last_step: int = 0
    written: float = 0.0
    """Time of the last event."""

    def __post_init__(self) -> None:
        self._tail = EventTail(self.out / EVENTS)
        self._num_begun = 0
        self._lines = Column()
        """Where the event of each step is in the file."""
        self._columns: dict[str, dict[str, Column]] = {}
        """The curves by kind of event and field."""

    def update(self) -> None:
        """Read what was appended since the last time."""
        for offset, event in self._tail.read():
            if self._num_begun != self._tail.num_begun:
                self._forget()
            self._take(offset, event)

    def step_event(self, step: int) -> Event | None:
        """The whole event of a step."""
        at = bisect_left(self._lines.steps, step)
        if at == len(self._lines.steps) or self._lines.steps[at] != step:
            return None
        return event_at(self._tail.path, int(self._lines.values[at]))

    def _forget(self) -> None:
        tail = self._tail
        vars(self).update(vars(History(self.out)))
        self._tail, self._num_begun = tail, tail.num_begun

    def _take(self, offset: int, event: Event) -> None:
        kind = event["kind"]
        self.written = event.get("time", self.written)
        if kind == "start":
            self.start, self.end = event, None
            self.started = self.started or event.get("time")
        elif kind == "end":
            self.end = event
        elif kind == "check":
            self.checks[str(event.get("name"))] = event
        elif kind == "resume":
            self._revoke(event)
        if kind in KEPT:
            self.kept[kind].append(event)
        step = event.get("step", self.last_step)
        if kind == "step":
            self.last_step = step
            self._lines.append(step, offset)
        columns = self._columns.setdefault(kind, {})
        for name, value in measured(event).items():
            column = columns.get(name)
            if column is None:
                column = columns[name] = Column()
                self.curves[f"{PREFIXES[kind]}/{name}"] = column
            column.steps.append(step)
            column.values.append(value)

    def _revoke(self, resume: Event) -> None:
        """Drop the events that a resume takes back."""
        last, self.end = resume["from_step"], None
        for kind, events in self.kept.items():
            self.kept[kind] = [event for event in events if stands(event, resume)]
        for kind, columns in self._columns.items():
            is_measured_again = kind in MEASURED and not resume.get("is_measured", True)
            for column in columns.values() if kind not in LASTING else ():
                column.keep(last - 1 if is_measured_again else last)
        self._lines.keep(last)
        self.last_step = min(self.last_step, last)
