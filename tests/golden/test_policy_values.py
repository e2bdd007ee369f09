"""Policy gradients by hand.

Two answers: a of two tokens with advantages 1, b of one with advantage -2. Ratios are 3/2 and 1 in a, 1/2 in b; bounds
0.2 and 0.28, so clip holds 3/2 at 1.28 (A > 0), and 1/2 at 0.8 (A < 0). What the tokens cost:

    clip          -1.28, -1;    -min(-2/2, -2 * 0.8) = 1.6            of a ratio of 4 in b: 8, and of a dual clip 3: 6
    gspo          s of a = sqrt(3/2) = 1.2247, within 1.28: -s, -s; b as clip
    gspo_token    the same
    cispo         1.28 * -log pi = 1.28 * ln 2, 1 * ln 2;             0.8 * 2 log pi = -1.6 ln 4
    sapo          of warmths 1 and 1: -4 s(1/2), -4 s(0) = -2;        8 s(-1/2)            s the logistic function
    gmpo          of bounds 0.1: e^((0.1 + 0) / 2) twice, negative;   of b: ln(1/2) held at -0.1: 2 e^-0.1
    reinforce     ln 2, ln 2;                                         2 log pi = -2 ln 4

with pi = 1/2 of each token of a, 1/4 of b's. Averages of the costs x, y; z of the two answers:

    token (x + y + z) / 3        sequence ((x + y) / 2 + z) / 2       constant, length 10: (x + y + z) / (2 * 10)
"""

from __future__ import annotations

from dataclasses import replace
from math import exp, log, sqrt

import pytest
import torch
from tests.helpers.preference_rows import plain_pairs, scales

from taut.losses.policy import Bounds, Kl, PolicyGradient
from taut.losses.settings import Average
from taut.types import Packed, Scores

LOGP = torch.tensor([-log(2), -log(2), -log(4)], dtype=torch.float64)


def answers(*ratios: float) -> Packed:
    streams = {
        "advantage_N": torch.tensor([1.0, 1.0, -2.0], dtype=torch.float64),
        "old_logp_N": LOGP - torch.tensor(ratios, dtype=torch.float64).log(),
        "ref_logp_N": torch.tensor([-log(4), -log(2), -log(4)], dtype=torch.float64),
    }
    return replace(plain_pairs([(2, 1)]), streams=streams)


def value(loss: PolicyGradient, packed: Packed, term: str = "policy") -> float:
    total = loss(Scores(LOGP), packed).terms[term]
    return float(total) * scales(loss, [packed])[term]


def s(x: float) -> float:
    return 1 / (1 + exp(-x))


USUAL = Bounds(0.2, 0.28)
COSTS: list[tuple[str, Bounds, list[float]]] = [
    ("clip", USUAL, [-1.28, -1.0, 1.6]),
    ("gspo", USUAL, [-sqrt(1.5), -sqrt(1.5), 1.6]),
    ("gspo_token", USUAL, [-sqrt(1.5), -sqrt(1.5), 1.6]),
    ("cispo", USUAL, [1.28 * log(2), log(2), -1.6 * log(4)]),
    ("sapo", Bounds(0.2, 0.28, None, 1.0, 1.0), [-4 * s(0.5), -2.0, 8 * s(-0.5)]),
    ("gmpo", Bounds(0.1, 0.1), [-exp(0.05), -exp(0.05), 2 * exp(-0.1)]),
    ("reinforce", USUAL, [log(2), log(2), -2 * log(4)]),
]


@pytest.mark.parametrize(("name", "bounds", "costs"), COSTS)
def test_what_tokens_cost_and_how_they_are_averaged(
    name: str, bounds: Bounds, costs: list[float]
) -> None:
    x, y, z = costs
    by_hand: dict[Average, float] = {
        "token": (x + y + z) / 3,
        "sequence": ((x + y) / 2 + z) / 2,
        "constant": (x + y + z) / 20,
    }
    for average, expected in by_hand.items():
        length = 10 if average == "constant" else None
        loss = PolicyGradient(name, bounds, average, length, is_fresh=False)
        assert value(loss, answers(1.5, 1.0, 0.5)) == pytest.approx(expected, rel=1e-12)


def test_a_dual_clip_bounds_what_a_bad_token_costs() -> None:
    loss = PolicyGradient(is_fresh=False)
    packed = answers(1.0, 1.0, 4.0)
    assert value(loss, packed) == pytest.approx((-1 - 1 + 8) / 3)
    assert value(replace(loss, bounds=Bounds(0.2, 0.28, 3.0)), packed) == pytest.approx(4 / 3)


def test_what_divergence_costs() -> None:
    """One token has u = ln 2, at a ratio of 3/2: k2 is 3/2 (ln 2)^2 / 2, k3 1/2 - 1 + ln 2. Of three tokens."""
    packed = answers(1.5, 1.0, 1.0)
    k2, k3 = 1.5 * log(2) ** 2 / 2, log(2) - 0.5
    of = {
        gradient: PolicyGradient(is_fresh=False, kl=Kl(0.1, gradient)) for gradient in ("k2", "k3")
    }
    assert value(of["k2"], packed, "kl") == pytest.approx(0.1 * k2 / 3)
    assert value(of["k3"], packed, "kl") == pytest.approx(0.1 * k3 / 3)
    assert value(replace(of["k3"], average="sequence"), packed, "kl") == pytest.approx(0.1 * k3 / 4)
    total, count = of["k2"](Scores(LOGP), packed).metrics["kl"]
    assert float(total / count) == pytest.approx(k3 / 3)
