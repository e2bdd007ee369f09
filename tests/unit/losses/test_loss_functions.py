"""The pieces losses of answers are made of, where they are not what their formula would overflow to."""

from __future__ import annotations

import math

import pytest
import torch
from tests.helpers.preference_rows import plain_pairs

from taut.losses.loss import STEEPEST, accuracy, relative_power
from taut.losses.preference import log_odds, nll_of_best


def slope(function: object, at: float, dtype: torch.dtype = torch.float64) -> tuple[float, float]:
    x = torch.tensor([at], dtype=dtype, requires_grad=True)
    value = function(x)  # type: ignore[operator]
    (gradient,) = torch.autograd.grad(value.sum(), x)
    return value.item(), gradient.item()


@pytest.mark.parametrize("power", [-1.0, -0.3, 0.5])
def test_a_power_goes_on_along_its_tangent(power: float) -> None:
    """(e^(power u) - 1) / power as it is up to e^30; beyond, the line that touches it there."""
    for exponent in (-500.0, -1.0, 1e-9, 3.0, STEEPEST):
        value, gradient = slope(lambda x: relative_power(x, power), exponent / power)
        assert value == pytest.approx(math.expm1(exponent) / power, rel=1e-12)
        assert gradient == pytest.approx(math.exp(exponent), rel=1e-12)
    value, gradient = slope(lambda x: relative_power(x, power), (STEEPEST + 50) / power)
    assert gradient == pytest.approx(math.exp(STEEPEST))
    assert value == pytest.approx((math.expm1(STEEPEST) + 50 * math.exp(STEEPEST)) / power)


def test_power_0_is_the_logarithm() -> None:
    assert slope(lambda x: relative_power(x, 0.0), 12.5) == (12.5, 1.0)


def test_odds_of_what_is_all_but_certain_and_all_but_impossible() -> None:
    """log p - log(1 - p); no log-probability is so near 0 that they are infinite."""
    for probability in (1e-3, 0.5, 0.999):
        value, gradient = slope(log_odds, math.log(probability))
        assert value == pytest.approx(math.log(probability / (1 - probability)), rel=1e-12)
        assert gradient == pytest.approx(1 / (1 - probability), rel=1e-9)
    assert slope(log_odds, -1e5) == (-1e5, 1.0)
    value, _ = slope(log_odds, 0.0, torch.float32)
    assert value == pytest.approx(-math.log(2**-23), rel=1e-6)


def test_ties_count_half() -> None:
    right, count = accuracy(torch.tensor([-1.0, 0.0, 0.0, 2.0, 3.0]))
    assert (float(right), float(count)) == (3.0, 5.0)
    assert float(accuracy(torch.tensor([1.0, 2.0]) - 1.0)[0]) == 1.5


def test_the_term_on_good_answers_is_of_the_best_alone() -> None:
    """Two pairs of answers of 2 and 1, 1 and 3 tokens: of seven targets the first two and the fourth."""
    packed = plain_pairs([(2, 1), (1, 3)])
    logp_N = -torch.arange(1.0, 8.0, dtype=torch.float64)
    assert float(nll_of_best(logp_N, packed)) == 1 + 2 + 4
