"""Calibration of pairs, from numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from taut.evals.statistics import calibrate
from taut_tools.score.score import calibrate_pairs, sigmoid, wins


def test_a_bin_holds_what_was_predicted_and_what_was_seen() -> None:
    """Two at 0.62, one of them right; one at 0.97, right: 2/3 |0.62 - 0.5| + 1/3 |0.97 - 1| = 0.08 + 0.01."""
    found = calibrate(np.array([0.62, 0.62, 0.97]), np.array([1.0, 0.0, 1.0]), low=0.5)
    assert found.error == pytest.approx(0.09)
    assert [each.count for each in found.bins] == [0, 0, 2, 0, 0, 0, 0, 0, 0, 1]
    assert (found.bins[2].low, found.bins[2].high) == pytest.approx((0.6, 0.65))
    assert (found.bins[2].predicted, found.bins[2].seen) == pytest.approx((0.62, 0.5))
    assert found.bins[0].predicted is None
    assert found.as_dict()["bins"][9]["seen"] == 1.0


def test_a_pair_is_predicted_by_the_size_of_its_difference() -> None:
    """|d| = ln 3 is 3/4; of four such pairs three are right: nothing is off."""
    gaps = np.log(3) * np.array([1.0, 1.0, 1.0, -1.0])
    assert calibrate_pairs(gaps).error == pytest.approx(0.0, abs=1e-12)
    assert calibrate_pairs(-gaps).error == pytest.approx(0.5)


def test_equal_scores_are_half_right() -> None:
    assert wins(np.array([0.0, 2.0, -0.1])).tolist() == [0.5, 1.0, 0.0]
    assert calibrate_pairs(np.zeros(3)).error == 0.0


def test_the_ends_and_extremes_are_in_a_bin() -> None:
    found = calibrate(np.array([0.0, 1.0]), np.array([0.0, 1.0]))
    assert [found.bins[0].count, found.bins[-1].count] == [1, 1]
    assert sigmoid(np.array([-1e4, 1e4])).tolist() == [0.0, 1.0]
