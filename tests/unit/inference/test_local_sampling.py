"""Draws: by hand on three tokens, against the exact distribution on many, and where rounding could go past the end."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from taut.config import replace
from taut.inference.local import BLOCK, draw, policy_logits
from taut.inference.settings import Sampling

PLAIN = Sampling()
THREE = torch.tensor([[math.log(0.5), math.log(0.3), math.log(0.2)]], dtype=torch.float64)


def at(
    uniform: float, logits: Tensor = THREE, sampling: Sampling = PLAIN
) -> tuple[int, float, float]:
    """Token, its logprob under the policy, and at temperature 1."""
    drawn = draw(logits, sampling, [[]], torch.tensor([uniform], dtype=torch.float64))
    return int(drawn.ids_B), float(drawn.logp_B), float(drawn.logp_one_B)


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 0), (0.499, 0), (0.501, 1), (0.799, 1), (0.801, 2), (0.9999, 2)]
)
def test_the_distribution_function_is_inverted(uniform: float, token: int) -> None:
    found, logp, logp_one = at(uniform)
    assert found == token
    assert logp == logp_one == pytest.approx(float(THREE[0, token]), abs=1e-12)


def test_each_setting_by_hand() -> None:
    """p = 0.5, 0.3, 0.2."""
    half = replace(PLAIN, {"temperature": 0.5})  # squares: 0.25, 0.09, 0.04 of 0.38
    assert at(0.0, sampling=half)[1:] == pytest.approx((math.log(0.25 / 0.38), math.log(0.5)))
    top_2 = replace(PLAIN, {"top_k": 2})  # 0.5, 0.3 of 0.8
    assert at(0.99, sampling=top_2) == pytest.approx((1, math.log(0.3 / 0.8), math.log(0.3)))
    nucleus = replace(PLAIN, {"top_p": 0.6})  # 0.5 is too little, 0.5 + 0.3 enough
    assert at(0.99, sampling=nucleus) == pytest.approx((1, math.log(0.3 / 0.8), math.log(0.3)))
    only = replace(PLAIN, {"top_p": 0.5})
    assert at(0.99, sampling=only) == pytest.approx((0, 0.0, math.log(0.5)))
    likely = replace(PLAIN, {"min_p": 0.5})  # 0.2 < 0.5 * 0.5 <= 0.3
    assert at(0.99, sampling=likely) == pytest.approx((1, math.log(0.3 / 0.8), math.log(0.3)))
    greedy = replace(PLAIN, {"temperature": 0.0})
    assert at(0.99, sampling=greedy) == pytest.approx((0, 0.0, math.log(0.5)))


def test_the_penalty_moves_what_was_there_away_from_zero() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5]])
    sampling = replace(PLAIN, {"repetition_penalty": 2.0})
    assert policy_logits(logits, sampling, [[0, 1, 1]]).tolist() == [[1.0, -2.0, 0.5]]
    assert logits.tolist() == [[2.0, -1.0, 0.5]]


def test_frequencies_are_the_probabilities() -> None:
    """20,000 draws over 600 tokens, in float32: three standard deviations for 99.9% of the tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 600, generator=generator) * 2
    num = 20_000
    uniform = torch.from_numpy(np.random.default_rng(0).random(num))
    drawn = draw(logits.expand(num, -1), PLAIN, [[]] * num, uniform)
    p = logits[0].double().softmax(-1)
    gap = (torch.bincount(drawn.ids_B, minlength=600) / num - p).abs()
    assert float((gap < 3 * (p * (1 - p) / num).sqrt() + 1 / num).double().mean()) > 0.99
    assert torch.allclose(drawn.logp_B.double(), p.log()[drawn.ids_B], atol=1e-5)


@pytest.mark.parametrize("size", [3, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7])
def test_what_has_no_probability_is_never_drawn(size: int) -> None:
    logits = torch.full((1, size), -torch.inf)
    possible = [size // 3, size // 2]
    logits[0, possible] = 1.0
    for uniform in (0.0, 0.3, 0.5, 0.7, np.nextafter(1.0, 0.0)):
        assert at(float(uniform), logits)[0] in possible


def test_more_is_kept_than_the_vocabulary_has() -> None:
    assert at(0.9999, sampling=replace(PLAIN, {"top_k": 50}))[0] == 2
