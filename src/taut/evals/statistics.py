"""What a few answers say of a model: intervals, and how often one of k tries would be right.

Pure functions of numbers; draws nothing from the global random state. Imports numpy only. Evals, commands and the demo
import it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
ROUNDING = 1e-14
"""A mean smaller than this share of the largest value is rounding."""


class Interval(NamedTuple):
    """A 95% interval."""

    low: float
    high: float


def wilson_interval(hits: float, trials: int, z: float = 1.959964) -> Interval:
    """Wilson's score interval for a proportion.

    ``hits`` may be a sum of shares of trials: for values between 0 and 1 the interval is then at least wide enough.
    """
    assert trials > 0, "a proportion of at least one trial"
    assert -1e-9 <= hits <= trials + 1e-9, "hits are among the trials"
    rate = min(max(hits / trials, 0.0), 1.0)
    scale = 1 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / scale
    half = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials)) / scale
    # at a rate of 0 centre equals half, and their computed difference is rounding
    low = max(0.0, centre - half) if rate > 0 else 0.0
    return Interval(low, min(1.0, centre + half) if rate < 1 else 1.0)


def bootstrap_interval(values: Sequence[float], seed: int = 0) -> Interval:
    """The percentile bootstrap interval of the mean."""
    assert values, "a mean of at least one value"
    draw = np.random.default_rng(seed)
    array = np.asarray(values, dtype=np.float64)
    means = [array[draw.integers(0, array.size, array.size)].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [0.025, 0.975]).tolist()
    return Interval(_without_rounding(low, array), _without_rounding(high, array))


def mean(values: Sequence[float]) -> float:
    """The mean; exactly 0 where values cancel but for rounding."""
    array = np.asarray(values, dtype=np.float64)
    return _without_rounding(float(array.mean()), array)


def _without_rounding(number: float, of: NDArray[np.float64]) -> float:
    """``number``, or 0 where it is only what rounding leaves of values that cancel."""
    return 0.0 if abs(number) < ROUNDING * float(np.abs(of).max()) else number


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """The chance that one of k samples is right, estimated without bias from more (arXiv:2107.03374).

    1 - C(n - c, k) / C(n, k)
    """
    assert 0 <= num_right <= num_samples and 1 <= k <= num_samples, "k of the samples drawn"
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)
