"""How far probabilities can be believed: what was predicted against what was seen, in bins.

    expected calibration error = sum over bins of (count / total) * |mean predicted - mean seen|     (arXiv:1706.04599)

Of a pair with the difference d = score(chosen) - score(rejected) a Bradley-Terry model predicts that the answer it
prefers is the better one with probability s(|d|), at least one half, and it is seen whether it was; so nothing is known
beforehand of which answer was chosen. Equal scores are seen half right.

Pure functions of numbers. May import types. Commands and reports import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from taut.types import FloatArray

NUM_BINS = 10


@dataclass(frozen=True, slots=True)
class Bin:
    """Predictions in [low, high), the last bin's end included."""

    low: float
    high: float
    count: int
    predicted: float | None
    """Their mean; None where there are none."""
    seen: float | None
    """The mean of what came of them."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Predictions against what was seen."""

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


def calibrate_pairs(gaps: FloatArray) -> Calibration:
    """Of score(chosen) - score(rejected) for each pair."""
    return calibrate(sigmoid(np.abs(gaps)), wins(gaps), low=0.5)


def wins(gaps: FloatArray) -> FloatArray:
    """1 where the chosen answer has the higher score, 0.5 where both are equal."""
    return (np.sign(gaps) + 1) / 2


def sigmoid(x: FloatArray) -> FloatArray:
    """1 / (1 + exp(-x)), for any x."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)
