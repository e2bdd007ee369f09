"""Statistics of a few answers: intervals, pass@k, and how well predicted probabilities are calibrated.

    expected calibration error = sum over bins of (count / total) * |mean predicted - mean seen|     (arXiv:1706.04599)

For a pair with the difference d = score(chosen) - score(rejected), a Bradley-Terry model predicts that the answer it
prefers is the better one with probability s(|d|), at least one half, and the data say whether it was. The prediction
does not depend on which answer was chosen. Equal scores count as half right.

Pure functions of numbers; the global random state is not used. Imports numpy and types only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from taut.types import FloatArray

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
    center = (rate + z * z / (2 * trials)) / scale
    half = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials)) / scale
    # at a rate of 0 center equals half, and their computed difference is rounding
    low = max(0.0, center - half) if rate > 0 else 0.0
    return Interval(low, min(1.0, center + half) if rate < 1 else 1.0)


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


NUM_BINS = 10


@dataclass(frozen=True, slots=True)
class Bin:
    """Predictions in [low, high), the last bin's end included."""

    low: float
    high: float
    count: int
    predicted: float | None
    """Mean predicted probability; None without predictions."""
    seen: float | None
    """Observed frequency; None without predictions."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Predicted probabilities against observed frequencies."""

    bins: tuple[Bin, ...]
    error: float
    """The expected calibration error."""

    def as_dict(self) -> dict[str, Any]:
        names = Bin.__slots__
        bins = [{name: getattr(each, name) for name in names} for each in self.bins]
        return {"error": self.error, "bins": bins}


def calibrate(predicted: FloatArray, seen: FloatArray, low: float = 0.0) -> Calibration:
    """Probabilities from ``low`` to 1, and outcomes from 0 to 1, in ten bins of one width."""
    assert predicted.size and predicted.shape == seen.shape, "an outcome for each prediction"
    # the last bin has its end, too
    edges = np.linspace(low, 1.0, NUM_BINS + 1)
    at = np.clip(np.searchsorted(edges, predicted, side="right") - 1, 0, NUM_BINS - 1)
    bins, error = [], 0.0
    for number in range(NUM_BINS):
        inside = at == number
        count = int(inside.sum())
        means = (float(predicted[inside].mean()), float(seen[inside].mean())) if count else None
        if means is not None:
            error += count / predicted.size * abs(means[0] - means[1])
        bins.append(
            Bin(float(edges[number]), float(edges[number + 1]), count, *(means or (None, None)))
        )
    return Calibration(tuple(bins), error)
