"""Read the events of a run as they are written, and keep their numbers as rows of arrays.

Samples of a step and texts of a rollout are not kept; ``step_event`` reads the line again.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from taut.train.log.events import (
    LASTING,
    MEASURED,
    PREFIXES,
    Event,
    measured,
    stands,
)
from taut.train.run_dir import EVENTS
from taut_tools.page.tail import EventTail, event_at

KEPT = ("eval", "best", "warning", "budget", "checkpoint", "resume")
"""Kinds of events that are kept whole."""


class Column(NamedTuple):
    """A curve: numbers by step, in the order of writing. That is the order of steps, except for numbers that a resume
    does not revoke.
    """

    steps: NDArray[np.int64]
    values: NDArray[np.float64]


class Block:
    """Numbers of the events of one kind with the same fields of the same types: a row for each event, so that an event
    is one append, however many curves it has a point of.
    """

    def __init__(self, event: Event) -> None:
        known = measured(event)
        self.names = list(known)
        self._is_number = [name in known for name in event]
        self._lines, self._steps, self._rows = array("q"), array("q"), array("d")

    def append(self, line: int, step: int, event: Event) -> None:
        """Append an event; ``line`` is its place in the file."""
        self._lines.append(line)
        self._steps.append(step)
        self._rows.extend(compress(event.values(), self._is_number))

    def keep(self, last: int) -> None:
        """Drop the rows after step ``last``."""
        end = bisect_right(self._steps, last)
        del self._lines[end:], self._steps[end:], self._rows[end * len(self.names) :]

    def column(self, name: str) -> tuple[NDArray[np.int64], Column]:
        """The places in the file and the numbers of a field. Copies, since an array with a view cannot grow."""
        rows = np.frombuffer(self._rows).reshape(-1, len(self.names))
        values = rows[:, self.names.index(name)].copy()
        return np.array(self._lines), Column(np.array(self._steps), values)


@dataclass
class History:
    """The events of the run in ``out`` that no resume has revoked. ``update`` reads the appended ones."""

    out: Path
    start: Event = field(default_factory=dict)
    """Newest start event; each resume writes one."""
    started: float | None = None
    """Time at which the run began."""
    end: Event | None = None
    """Last event of a run that has ended."""
    checks: dict[str, Event] = field(default_factory=dict)
    """Newest check of each name."""
    kept: dict[str, list[Event]] = field(default_factory=lambda: {kind: [] for kind in KEPT})
    curves: dict[str, list[Block]] = field(default_factory=dict)
    """Blocks with the numbers of each curve; ``column`` joins them."""
    last_step: int = 0
    written: float = 0.0
    """Time of the last event."""

    def __post_init__(self) -> None:
        self._tail = EventTail(self.out / EVENTS)
        self._num_begun = 0
        self._steps, self._offsets = array("q"), array("q")
        """Steps, and the place of their events in the file."""
        self._blocks: dict[tuple[object, ...], Block] = {}
        """Blocks by kind and fields of their events."""

    def update(self) -> None:
        """Read the events that were appended since the last call."""
        for offset, event in self._tail.read():
            if self._num_begun != self._tail.num_begun:
                self._forget()
            self._take(offset, event)

    def step_event(self, step: int) -> Event | None:
        """Read the whole event of a step again; None for an unknown step."""
        at = bisect_left(self._steps, step)
        if at == len(self._steps) or self._steps[at] != step:
            return None
        return event_at(self._tail.path, self._offsets[at])

    def column(self, name: str) -> Column:
        """The numbers of one of ``curves``."""
        blocks, field_name = self.curves[name], name.partition("/")[2]
        lines, columns = zip(*(block.column(field_name) for block in blocks), strict=True)
        order = np.argsort(np.concatenate(lines)) if len(blocks) > 1 else slice(None)
        steps, values = zip(*columns, strict=True)
        return Column(np.concatenate(steps)[order], np.concatenate(values)[order])

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
            self._steps.append(step)
            self._offsets.append(offset)
        if kind in PREFIXES:
            self._block_of(event).append(offset, step, event)

    def _block_of(self, event: Event) -> Block:
        key = event["kind"], bool(event.get("skipped")), *event, *map(type, event.values())
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = Block(event)
            for name in block.names:
                self.curves.setdefault(f"{PREFIXES[event['kind']]}/{name}", []).append(block)
        return block

    def _revoke(self, resume: Event) -> None:
        """Drop the events that a resume revokes."""
        last, self.end = resume["from_step"], None
        for kind, events in self.kept.items():
            self.kept[kind] = [event for event in events if stands(event, resume)]
        for (of_kind, *_), block in self._blocks.items():
            is_measured_again = of_kind in MEASURED and not resume.get("is_measured", True)
            if of_kind not in LASTING:
                block.keep(last - 1 if is_measured_again else last)
        end = bisect_right(self._steps, last)
        del self._steps[end:], self._offsets[end:]
        self.last_step = min(self.last_step, last)
