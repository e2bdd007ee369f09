"""Where a step's time goes: wall and processor seconds of each step and of the functions that are watched.

A watched function is timed without the watched ones it calls; what a step spends in none of them is ``training``.
Imported by the workers of ``benchmarks/grpo.py``; imports nothing of taut or its peers.
"""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np


def peak_mb() -> float:
    """The largest resident set of the process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def helpers_mb() -> float:
    """What the processes that this one has started hold now."""
    pids = [
        pid
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]
    lines = [
        line
        for pid in pids
        for line in Path("/proc", pid, "status").read_text().splitlines()
        if line.startswith("VmRSS:")
    ]
    return sum(int(line.split()[1]) for line in lines) / 1024


def _now() -> Any:
    return np.array([time.perf_counter(), time.process_time()])


class Phases:
    """A stack of what is being timed; time counts for its top."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.helpers_mb = 0.0
        """The most that processes it has started held at the end of a step."""
        self.peak_mb = 0.0
        """The largest resident set until the end of the last step."""
        self._spent: dict[str, Any] = defaultdict(lambda: np.zeros(2))
        self._stack = ["training"]
        self._since = _now()

    def begin(self) -> None:
        """The first step begins here."""
        self._spent.clear()
        self._since = _now()

    def end_step(self) -> None:
        """A step ends, and the next begins."""
        self._charge()
        step = {}
        for name in ("generation", "scoring", "training"):
            step[name], step[f"{name}_cpu"] = self._spent[name].tolist()
        step["seconds"], step["cpu_seconds"] = sum(self._spent.values()).tolist()
        self.steps.append(step)
        self.helpers_mb, self.peak_mb = max(self.helpers_mb, helpers_mb()), peak_mb()
        self._spent.clear()

    def watch(self, owner: Any, function: str, name: str) -> None:
        """Count the time in ``owner.function`` under a name."""
        original = getattr(owner, function)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._charge()
            self._stack.append(name)
            try:
                return original(*args, **kwargs)
            finally:
                self._charge()
                self._stack.pop()

        setattr(owner, function, timed)

    def _charge(self) -> None:
        now = _now()
        self._spent[self._stack[-1]] += now - self._since
        self._since = now
