"""What is asked of the stand-in and what it answers. Imports nothing: tests that only ask need not wait for torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Note(NamedTuple):
    """Something that happened, and where."""

    kind: str
    """wait, copy or refused."""
    what: str
    """The operation, in words."""
    where: str
    """Functions, the innermost first: ``types.totals < train.step_statistics.summarize``. Stable when lines move."""
    lines: str
    """The same with line numbers, and the text of the innermost line of taut."""


class Mark(NamedTuple):
    """What happened in a part of a run."""

    notes: Counter[Note]
    kernels: Counter[str]
    bytes_moved: int
    peak: int
    allocated: int
    """Bytes that live at its end."""


@dataclass(frozen=True)
class Case:
    """A run."""

    method: str
    family: str = "llama"
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Besides those of tests/helpers."""
    beside_cpu: bool = True
    """Whether the CPU runs it too, in float64."""
    has_numbers: bool = True
    is_saved: bool = True
    """False: it ends where the model is to be saved."""
    before: str | None = None
    """``module:function`` that is called first: a planted fault."""

    def __str__(self) -> str:
        return ",".join([self.method, self.family, *(f"{k}={v}" for k, v in self.keys.items())])


@dataclass(frozen=True)
class Found:
    """What a run showed."""

    losses: list[float]
    expected: list[float] | None
    """The losses of the CPU."""
    steps: list[Mark]
    """What each step did, from the end of the one before; the first with all of the set-up."""
    after: Mark
    """What came after the last step."""
    peak: int
    seconds: float


MOST_SHARED = 232448
"""Bytes of shared memory that a block of an H100 can have."""


@dataclass
class Compiled:
    """What was compiled (compiled_kernels.py)."""

    shared: dict[str, int] = field(default_factory=dict)
    """Kernel -> bytes of shared memory."""
    launches: int = 0
