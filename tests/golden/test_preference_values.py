"""Losses of preferences by hand.

Let an answer of one token have log-ratio u = log pi - log ref, and s the logistic function: s(0) = 1/2, s(ln 3) = 3/4,
s(ln 9) = 9/10. Where policy and reference are one, every u is 0, whatever the data:

    sigmoid, robust, aot  -ln s(0) = ln 2            hinge      1 - 0 = 1
    ipo                   (1 / (2 beta))^2           sppo       2 (1 / (2 beta))^2
    nca, bco              2 ln 2                     apo        s(0) + s(0) = 1
    exo                   KL([1/2, 1/2] || [1 - e, e]) = -ln 2 - (ln e + ln(1 - e)) / 2
    discopop              (1 - s(0)) ln 2 + s(0) e^0 = (1 + ln 2) / 2

With beta = 1, u_w = ln 3 and u_l = -ln 3, so x = ln 9:

    sigmoid   -ln 0.9                                of the pair turned round: -ln 0.1
    smoothed by 0.1: -0.9 ln 0.9 - 0.1 ln 0.1        robust at 0.1: (-0.9 ln 0.9 + 0.1 ln 0.1) / 0.8
    ipo       (ln 9 - 1/2)^2                         hinge      max(0, 1 - ln 9) = 0; turned round: 1 + ln 9
    exo       at e = 0.1: KL([0.9, 0.1] || [0.9, 0.1]) = 0
    discopop  at tau = 1: 0.1 * -ln 0.9 + 0.9 / 9
    nca       -ln 3/4 - (ln 1/4 + ln 3/4) / 2        bco        the mean reward is 0: -2 ln 3/4
    sppo      2 (ln 3 - 1/2)^2                       apo_zero   1/4 + 1/4;  apo_down  3/4 + 1/10
    forward_kl  (1 - 1/3) - (1 - 3) = 8/3            js         ln(2 * 3/4) - ln(2 * 1/4) = ln 3
    alpha 1/2   2 (1 - 1/sqrt 3) - 2 (1 - sqrt 3) = 4 / sqrt 3
"""

from __future__ import annotations

from dataclasses import replace
from math import exp, log, log1p, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.preference_rows import ONE, answer, plain_pairs, with_values

from taut.config import from_mapping
from taut.data.packing import ALONE, pack
from taut.losses.loss import Loss
from taut.losses.preference import CpoLoss, DpoLoss, KtoLoss, OrpoLoss, PairLoss, SimpoLoss
from taut.losses.reward import BradleyTerry, Process, Regression
from taut.train import step_statistics
from taut.types import LossSum, Packed, Scores

LN3, LN9 = log(3), log(9)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def of_pairs(loss: Loss, logp: list[float], reference: list[float] | None = None) -> LossSum:
    """The loss of pairs of one token: log-probabilities better, worse, better, ..."""
    packed = plain_pairs([(1, 1)] * (len(logp) // 2))
    packed = with_values(packed, ref_logp_N=tensor(*(reference or [0.0] * len(logp))))
    return whole_step(loss, packed, Scores(tensor(*logp)))


def whole_step(loss: Loss, packed: Packed, scores: Scores) -> LossSum:
    if loss.observes:
        stats = step_statistics.compute_statistics(loss, [loss.observe(scores, packed)], ONE)
        ((packed, _),) = step_statistics.attach_statistics([(packed, True)], stats, ONE)
    return loss(scores, packed)


def dpo(name: str = "sigmoid", **keys: Any) -> DpoLoss:
    return from_mapping(DpoLoss, {"loss": name, "beta": 1.0, **keys})


def simpo(beta: float, gamma: float, alpha: float = 0.0) -> SimpoLoss:
    return SimpoLoss(beta=beta, gamma=gamma, alpha=alpha)


def value(found: LossSum) -> float:
    return float(torch.stack(list(found.terms.values())).sum())


AT_START = [
    (dpo(beta=0.3), log(2)),
    (dpo(label_smoothing=0.2), log(2)),
    (dpo("robust", label_smoothing=0.2), log(2)),
    (dpo("aot", label_smoothing=0.2), log(2)),
    (dpo("aot_unpaired"), log(2)),
    (dpo("hinge"), 1.0),
    (dpo("ipo", beta=0.1), 25.0),
    (dpo("sppo", beta=0.1), 50.0),
    (dpo("nca"), 2 * log(2)),
    (dpo("bco"), 2 * log(2)),
    (dpo("apo_zero"), 1.0),
    (dpo("apo_down"), 1.0),
    (dpo("exo", label_smoothing=0.1), -log(2) - (log(0.1) + log(0.9)) / 2),
    (dpo("discopop"), (1 + log(2)) / 2),
    (dpo(divergence="forward_kl"), log(2)),
    (dpo(divergence="js"), log(2)),
    (dpo(divergence="alpha"), log(2)),
]


@pytest.mark.parametrize(("loss", "expected"), AT_START)
def test_where_policy_and_reference_are_one(loss: PairLoss, expected: float) -> None:
    logp = [-0.5, -2.0, -3.0, -0.25]
    found = of_pairs(loss, logp, logp)
    assert value(found) / 2 == pytest.approx(expected, rel=1e-12)
    metrics = {name: float(total) / float(count) for name, (total, count) in found.metrics.items()}
    assert metrics == pytest.approx(
        {
            "rewards/chosen": 0.0,
            "rewards/rejected": 0.0,
            "rewards/margin": 0.0,
            "rewards/accuracy": 0.5,
            "logps/chosen": -1.75,
            "logps/rejected": -1.125,
            "length/chosen": 1.0,
            "length/rejected": 1.0,
            "kl": 0.0,
        }
    )


THREE_TO_ONE = [
    (dpo(), -log(0.9), -log(0.1)),
    (dpo(label_smoothing=0.1), -0.9 * log(0.9) - 0.1 * log(0.1), -0.9 * log(0.1) - 0.1 * log(0.9)),
    (dpo("robust", label_smoothing=0.1), (0.1 * log(0.1) - 0.9 * log(0.9)) / 0.8, None),
    (dpo("ipo"), (LN9 - 0.5) ** 2, (LN9 + 0.5) ** 2),
    (dpo("hinge"), 0.0, 1 + LN9),
    (dpo("exo", label_smoothing=0.1), 0.0, 0.8 * log(9)),
    (dpo("discopop", discopop_tau=1.0), 0.1 * -log(0.9) + 0.1, 0.9 * -log(0.1) + 0.9),
    (dpo("nca"), -log(3 / 4) - (log(1 / 4) + log(3 / 4)) / 2, None),
    (dpo("bco"), -2 * log(3 / 4), -2 * log(1 / 4)),
    (dpo("sppo"), 2 * (LN3 - 0.5) ** 2, 2 * (LN3 + 0.5) ** 2),
    (dpo("apo_zero"), 0.5, 1.5),
    (dpo("apo_down"), 0.85, 0.25 + 0.9),
    (dpo(divergence="forward_kl"), log1p(exp(-8 / 3)), log1p(exp(8 / 3))),
    (dpo(divergence="js"), -log(3 / 4), -log(1 / 4)),
    (dpo(divergence="alpha", alpha=0.5), log1p(exp(-4 / sqrt(3))), log1p(exp(4 / sqrt(3)))),
]

WITHOUT_REFERENCE = [
    (simpo(1.0, 0.0, alpha=0.5), log1p(exp(-4 / sqrt(3))), log1p(exp(4 / sqrt(3)))),
    (simpo(1.0, 0.0, alpha=1.0), log1p(exp(-8 / 3)), log1p(exp(8 / 3))),
    (simpo(1.0, 0.0), -log(0.9), -log(0.1)),
    (simpo(1.0, LN3), -log(3 / 4), None),
]
"""Losses that take the log-ratio itself for the log-probability of an answer."""


@pytest.mark.parametrize(("loss", "expected", "turned"), THREE_TO_ONE + WITHOUT_REFERENCE)
def test_three_times_likelier_and_a_third_as_likely(
    loss: PairLoss, expected: float, turned: float | None
) -> None:
    reference = [0.0, 0.0] if loss.reference_free else [-4.0, -2.0]
    better, worse = reference
    found = of_pairs(loss, [better + LN3, worse - LN3], reference)
    assert value(found) == pytest.approx(expected, abs=1e-12)
    assert float(found.metrics["rewards/accuracy"][0]) == 1
    if turned is not None:
        found = of_pairs(loss, [better - LN3, worse + LN3], reference)
        assert value(found) == pytest.approx(turned, abs=1e-12)
        assert float(found.metrics["rewards/accuracy"][0]) == 0


def test_lengths_margins_weights_and_sums() -> None:
    """u_w = ln 9 over two tokens and u_l = -ln 3 over one: per token ln 3 and -ln 3. Then margins of 2 against 1/2 at
    weight 0.4: x less 0.6. MPO: 0.8 -ln 0.9 + 0.2 -2 ln 3/4 + 1 (the mean of two tokens' -logp).
    """
    scores = Scores(tensor(LN9 - 2, -2, -LN3))
    packed = with_values(plain_pairs([(2, 1)]), ref_logp_N=tensor(-2, -2, 0))
    normalized = whole_step(dpo(length_normalized=True), packed, scores)
    assert value(normalized) == pytest.approx(-log(0.9), rel=1e-12)
    assert float(normalized.metrics["rewards/margin"][0]) == pytest.approx(LN9)
    assert value(whole_step(dpo("ipo"), packed, scores)) == pytest.approx((LN9 - 0.5) ** 2)
    assert value(whole_step(dpo(), packed, scores)) == pytest.approx(log1p(1 / 27))
    assert float(normalized.metrics["kl"][0]) == pytest.approx(LN9 - LN3)
    spread = with_values(packed, margin=tensor(2, 0.5))
    wanted = log1p(exp(0.6) / 9)
    loss = dpo(length_normalized=True, margin=0.4)
    assert value(whole_step(loss, spread, scores)) == pytest.approx(wanted, rel=1e-12)
    mpo = replace(
        loss, margin=0.0, loss=["sigmoid", "bco"], loss_weights=[0.8, 0.2], sft_weight=1.0
    )
    found = whole_step(mpo, packed, scores).terms
    assert float(found["sigmoid"]) == pytest.approx(0.8 * -log(0.9))
    assert float(found["bco"]) == pytest.approx(0.4 * -log(3 / 4))
    assert float(found["sft"]) == pytest.approx(4 - LN9)


def test_weights_of_targets_count() -> None:
    """A token of weight 2 counts as two that are alike: u_w = 2 ln 3 over a length of 2."""
    packed = with_values(plain_pairs([(1, 1)]), ref_logp_N=tensor(0, 0))
    packed = replace(packed, weight_N=tensor(2, 1))
    scores = Scores(tensor(LN3, -LN3))
    assert value(dpo()(scores, packed)) == pytest.approx(log1p(1 / 27))
    assert value(dpo(length_normalized=True)(scores, packed)) == pytest.approx(-log(0.9))


def test_orders_over_the_step() -> None:
    """Paired: log pi(w) - log pi(l) is ln 9 and 0, the reference's 0 and ln 3: sorted, 0 - 0 and ln 9 - ln 3.
    Of two tokens each, ln 27 and 0 per token against 0 and ln 3: 0 - 0 and ln 27 - ln 3.
    Unpaired: r_w is ln 9, -ln 3 and r_l 0, 0: sorted, -ln 3 and ln 9.
    BCO: the mean reward of ln 9, 0, 0, ln 3 is 3/4 ln 3.
    """
    logp, reference = [LN9, 0.0, 0.0, 0.0], [0.0, 0.0, LN3, 0.0]
    paired = of_pairs(dpo("aot"), logp, reference)
    assert value(paired) / 2 == pytest.approx((log(2) - log(3 / 4)) / 2, rel=1e-12)
    unpaired = of_pairs(dpo("aot_unpaired"), logp, reference)
    assert value(unpaired) / 2 == pytest.approx((-log(1 / 4) - log(0.9)) / 2, rel=1e-12)
    longer = with_values(plain_pairs([(2, 1)] * 2), ref_logp_N=tensor(0, 0, 0, LN3, LN3, 0))
    scores = Scores(tensor(LN9 + LN3, LN9 + LN3, 0, 0, 0, 0))
    per_token = whole_step(dpo("aot", length_normalized=True), longer, scores)
    assert value(per_token) == pytest.approx(log(2) - log(0.9), rel=1e-12)
    c = 0.75 * LN3
    shifted = of_pairs(dpo("bco", beta=2.0), [LN3, 0.0, 0.0, LN3 / 2])
    costs = [log1p(exp(c - LN9)), log1p(exp(c)), log1p(exp(-c)), log1p(exp(LN3 - c))]
    assert value(shifted) == pytest.approx(sum(costs), rel=1e-12)


def test_answers_by_themselves() -> None:
    """KTO, z = ln 3: a good answer at ln 9 costs s(-(ln 9 - ln 3)) = 1/4, a bad one at 0 s(0 - ln 3) = 1/4, twice.
    APO: s(-ln 9) + 2 s(0). BCO: c = (ln 9 + 0) / 2 = ln 3, -ln s(ln 3) each, the bad one's twice.
    """
    packed = with_values(plain_pairs([(1, 1)]), ref_logp_N=tensor(0, 0), label=tensor(1, 0))
    scores = Scores(tensor(LN9, 0))
    kto = KtoLoss(beta=1.0, undesirable_weight=2.0)
    told = replace(packed, stats=kto.statistics({"log_ratio_S": tensor(LN9, 0)}))
    assert value(kto(scores, told)) == pytest.approx(0.75, rel=1e-12)
    metrics = kto(scores, told).metrics
    total, count = metrics["z0"]
    assert (float(total), float(count)) == (pytest.approx(2 * LN3), 2)
    assert float(metrics["rewards/accuracy"][0]) == 2
    below = kto.statistics({"log_ratio_S": tensor(-LN9, 0)})
    assert float(below["z0"]) == 0
    apo = whole_step(replace(kto, loss="apo_zero"), packed, scores)
    assert value(apo) == pytest.approx(0.1 + 1.0, rel=1e-12)
    loss = replace(kto, loss="bco")
    of_kinds = loss.statistics({"log_ratio_S": tensor(LN9, LN9, 0), "label_S": tensor(1, 1, 0)})
    assert float(of_kinds["bco_shift"]) == pytest.approx(LN3)
    of_one = loss.statistics({"log_ratio_S": tensor(LN9, LN3), "label_S": tensor(0, 0)})
    assert float(of_one["bco_shift"]) == pytest.approx(1.5 * LN3)
    bco = whole_step(loss, packed, scores)
    assert value(bco) == pytest.approx(-3 * log(3 / 4), rel=1e-12)


def test_without_a_reference() -> None:
    """p_w = 3/4 and p_l = 1/4: odds 3 and 1/3, their ratio 9; log p_w - log p_l = ln 3; 1 - 1/p is -1/3 and -3."""
    logp, sft = [log(3 / 4), log(1 / 4)], -log(3 / 4)
    orpo = of_pairs(OrpoLoss(beta=0.5), logp)
    assert value(orpo) == pytest.approx(0.5 * -log(0.9) + sft, rel=1e-12)
    assert value(of_pairs(simpo(1.0, 0.0), logp)) == pytest.approx(-log(3 / 4), rel=1e-12)
    assert value(of_pairs(simpo(1.0, LN3), logp)) == pytest.approx(log(2), rel=1e-12)
    alphapo = of_pairs(simpo(1.0, 0.0, alpha=1.0), logp)
    assert value(alphapo) == pytest.approx(log1p(exp(-8 / 3)), rel=1e-12)
    assert value(of_pairs(CpoLoss(beta=2.0), logp)) == pytest.approx(-log(0.9) + sft, rel=1e-12)
    hinge = of_pairs(CpoLoss(beta=0.5, loss="hinge", sft_weight=2.0), logp)
    assert value(hinge) == pytest.approx(1 - LN3 / 2 + 2 * sft, rel=1e-12)
    ipo = of_pairs(CpoLoss(beta=0.5, loss="ipo", sft_weight=0.0), logp)
    assert value(ipo) == pytest.approx((LN3 - 1) ** 2, rel=1e-12)
    free = of_pairs(dpo(reference_free=True), logp)
    assert value(free) == pytest.approx(-log(3 / 4), rel=1e-12)


def test_scalar_heads() -> None:
    """Scores ln 9 + 1 and 1: -ln s(ln 9), drawn to a sum of 0 by 0.1 (ln 9 + 2)^2; a margin of ln 3 leaves ln 3.
    Squared errors to 2 and 0. Steps at ln 3, 0 and -ln 3 labeled 1, 0.5 and 0: -ln 3/4, ln 2 and -ln 3/4.
    """
    packed = with_values(plain_pairs([(1, 1)]), margin=tensor(LN3, 0), score=tensor(2, 0))
    scores = Scores(tensor(), scalar_R=tensor(LN9 + 1, 1))
    found = BradleyTerry(centering_coef=0.1)(scores, packed)
    assert float(found.terms["bradley_terry"]) == pytest.approx(-log(0.9), rel=1e-12)
    assert float(found.terms["centring"]) == pytest.approx(0.1 * (LN9 + 2) ** 2, rel=1e-12)
    assert value(BradleyTerry(margin=1.0)(scores, packed)) == pytest.approx(-log(3 / 4), rel=1e-12)
    assert value(Regression()(scores, packed)) == pytest.approx((LN9 - 1) ** 2 + 1, rel=1e-12)
    metrics = {name: float(total) / float(count) for name, (total, count) in found.metrics.items()}
    assert metrics["accuracy"] == 1
    assert metrics["score/mean"] == pytest.approx(LN3 + 1)
    assert metrics["score/mean_square"] - metrics["score/mean"] ** 2 == pytest.approx(LN3**2)
    steps = replace(
        answer("steps", [1, 2], [3, 4, 5], 0),
        read_at_R=np.array([2, 3, 4]),
        read_values={"label": np.array([1.0, 0.5, 0.0])},
    )
    told = Scores(tensor(), scalar_R=tensor(LN3, 0, -LN3))
    found = Process()(told, pack([steps], ALONE))
    assert value(found) == pytest.approx(-2 * log(3 / 4) + log(2), rel=1e-12)
    assert float(found.metrics["accuracy"][0]) == 2.5
