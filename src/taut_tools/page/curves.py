"""Reduce a curve of any length to a bounded number of points: mean, minimum and maximum of each bucket of steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from taut_tools.page.history import Column

DIGITS = 10
"""Significant digits of a point."""


def bucketed(
    columns: Mapping[str, Column], points: int, first: int | None = None, last: int | None = None
) -> dict[str, Any]:
    """Reduce curves between ``first`` and ``last`` to ``{"step": [...], "series": {name: {"mean", "min", "max"}}}``.

    ``step`` has the last step of each bucket; of at most ``points`` steps each is a bucket. A series with one value in
    each bucket has no min and max. An empty bucket has None, and one with a NaN has the mean "nan".
    """
    read: dict[str, Column] = {}
    for name, (steps, values) in columns.items():
        if (np.diff(steps) < 0).any():  # of a resumed run
            order = np.argsort(steps, kind="stable")
            steps, values = steps[order], values[order]
        begin = 0 if first is None else int(np.searchsorted(steps, first))
        end = None if last is None else int(np.searchsorted(steps, last, side="right"))
        read[name] = Column(steps[begin:end], values[begin:end])
    every = np.unique(np.concatenate([np.empty(0, np.int64), *(s for s, _ in read.values())]))
    if every.size <= points:
        ends = every
    else:
        width = (every[-1] - every[0] + 1) / points
        number = ((every - every[0]) / width).astype(np.int64)
        ends = every[np.append(np.flatnonzero(np.diff(number)), every.size - 1)]
    series = {name: _series(steps, values, ends) for name, (steps, values) in read.items()}
    return {"step": ends.tolist(), "series": series}


def _series(
    steps: NDArray[np.int64], values: NDArray[np.float64], ends: NDArray[np.int64]
) -> dict[str, list[Any]]:
    bucket = np.searchsorted(ends, steps)
    begins = np.flatnonzero(np.diff(bucket, prepend=-1))
    counts = np.diff(begins, append=steps.size)
    at = bucket[begins]

    def spread(numbers: NDArray[np.float64]) -> list[Any]:
        out: list[Any] = [None] * ends.size
        for index, number in zip(at.tolist(), numbers.tolist(), strict=True):
            out[index] = _shown(number)
        return out

    if not steps.size:
        return {"mean": [None] * ends.size}
    with np.errstate(invalid="ignore", over="ignore"):  # inf - inf
        mean = np.add.reduceat(values, begins) / counts
    if counts.max() == 1:
        return {"mean": spread(mean)}
    low, high = np.fmin.reduceat(values, begins), np.fmax.reduceat(values, begins)
    return {"mean": spread(mean), "min": spread(low), "max": spread(high)}


def _shown(number: float) -> float | str:
    """A number in JSON; one that is not finite as text, as in events."""
    if np.isfinite(number):
        return float(f"{number:.{DIGITS}g}")
    return str(number)
