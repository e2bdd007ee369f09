"""The formulas TRL 1.16 publishes for its preference trainers, written down again, against ours: values and gradients.

Theirs are functions of an answer's summed log-probability, [P] for chosen and rejected; ours of the listed targets.
Where the two differ on purpose they are compared in the setting in which they must agree, and that is said:

- its sigmoid knows no label smoothing (cDPO): compared at 0, and the smoothed form with its CPO's, which has it
- its bco_pair has no shift: compared with a shift of 0; the shift itself is golden's
- its f-divergence alpha is 1 - ours; it divides by the length after the divergence, ours before: compared one at a time
- its discopop is inf * 0 for differences below about -700 / beta: compared where it is finite
- its KTO takes z of a micro-batch's mismatched pairs: given the same z, the same loss
- its ORPO's sft term is over prompt and answer, ours over the answer: only the odds ratio is compared with it
- its kl, accuracies (ties count 0) and rewards are metrics and have no part here
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import pytest
import torch
from tests.helpers.preference_rows import plain_pairs, scales, with_values
from torch import Tensor
from torch.nn.functional import logsigmoid

from taut.config import from_mapping
from taut.losses.loss import Loss
from taut.losses.preference import CpoLoss, DpoLoss, KtoLoss, OrpoLoss, SimpoLoss
from taut.losses.reward import BradleyTerry
from taut.types import Packed, Scores

LIMIT = 1e-10
BETA, EPSILON, TAU, Z0 = 0.1, 0.15, 0.05, 1.7
CALM, WIDE, EXTREME = 0.3, 30.0, 1e4
"""How far a token's log-probability goes; log-ratios of answers are some times as large."""


class Trl(NamedTuple):
    """What TRL's loss functions are given."""

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_length: Tensor
    rejected_length: Tensor

    @property
    def ratios(self) -> tuple[Tensor, Tensor]:
        return self.chosen - self.ref_chosen, self.rejected - self.ref_rejected

    @property
    def x(self) -> Tensor:
        chosen, rejected = self.ratios
        return BETA * (chosen - rejected)

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        return self.chosen / self.chosen_length, self.rejected / self.rejected_length


def drawn(scale: float, seed: int = 0) -> tuple[Packed, Tensor]:
    """Sixteen pairs of answers of 1 to 12 tokens, and log-probabilities of the policy: never above 0."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 13, (16, 2), generator=random).tolist()
    packed = plain_pairs([(chosen, rejected) for chosen, rejected in lengths])
    both = torch.randn(2, packed.num_targets, generator=random, dtype=torch.float64)
    logp_N, ref_logp_N = -(both * scale).abs()
    return with_values(packed, ref_logp_N=ref_logp_N), logp_N.requires_grad_()


def for_trl(packed: Packed, logp_N: Tensor) -> Trl:
    logp_S = packed.by_sample(logp_N)
    ref_S = packed.by_sample(packed.streams["ref_logp_N"])
    length_S = packed.by_sample(torch.ones_like(logp_N))
    split = [(x[packed.better_P], x[packed.worse_P]) for x in (logp_S, ref_S, length_S)]
    return Trl(*(value for pair in split for value in pair))


def robust(t: Trl) -> Tensor:
    clean, flipped = -(1 - EPSILON) * logsigmoid(t.x), -EPSILON * logsigmoid(-t.x)
    return (clean - flipped) / (1 - 2 * EPSILON)


def exo_pair(t: Trl) -> Tensor:
    q_w, q_l = torch.sigmoid(t.x), torch.sigmoid(-t.x)
    for_chosen = q_w * (logsigmoid(t.x) - math.log1p(-EPSILON))
    return for_chosen + q_l * (logsigmoid(-t.x) - math.log(EPSILON))


def ipo(t: Trl) -> Tensor:
    chosen, rejected = t.ratios
    gap = chosen / t.chosen_length - rejected / t.rejected_length
    return (gap - 1 / (2 * BETA)) ** 2


def sigmoid_norm(t: Trl) -> Tensor:
    chosen, rejected = t.ratios
    return -logsigmoid(BETA * (chosen / t.chosen_length - rejected / t.rejected_length))


def nca_pair(t: Trl) -> Tensor:
    chosen, rejected = (BETA * ratio for ratio in t.ratios)
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def bco_pair(t: Trl) -> Tensor:
    chosen, rejected = (BETA * ratio for ratio in t.ratios)
    return -logsigmoid(chosen) - logsigmoid(-rejected)


def sppo_hard(t: Trl) -> Tensor:
    chosen, rejected = t.ratios
    return (chosen - 0.5 / BETA) ** 2 + (rejected + 0.5 / BETA) ** 2


def apo_zero(t: Trl) -> Tensor:
    chosen, rejected = t.ratios
    return 1 - torch.sigmoid(BETA * chosen) + torch.sigmoid(BETA * rejected)


def apo_down(t: Trl) -> Tensor:
    chosen, _ = t.ratios
    return torch.sigmoid(BETA * chosen) + 1 - torch.sigmoid(t.x)


def discopop(t: Trl) -> Tensor:
    mix = torch.sigmoid(t.x / TAU)
    return -logsigmoid(t.x) * (1 - mix) + torch.exp(-t.x) * mix


def smoothed(gap: Tensor) -> Tensor:
    return -logsigmoid(BETA * gap) * (1 - EPSILON) - logsigmoid(-BETA * gap) * EPSILON


def aot(t: Trl) -> Tensor:
    policy = (t.chosen - t.rejected).sort().values
    return smoothed(policy - (t.ref_chosen - t.ref_rejected).sort().values)


def aot_unpaired(t: Trl) -> Tensor:
    chosen, rejected = t.ratios
    return smoothed(chosen.sort().values - rejected.sort().values)


def diverged(make: Callable[[Tensor], Tensor]) -> Callable[[Trl], Tensor]:
    def of(t: Trl) -> Tensor:
        chosen, rejected = t.ratios
        return -logsigmoid(BETA * (make(chosen) - make(rejected)))

    return of


def alpha_divergence(ratio: Tensor, trl_alpha: float) -> Tensor:
    return (torch.exp((trl_alpha - 1) * ratio) - 1) / (trl_alpha - 1)


def log1mexp(x: Tensor) -> Tensor:
    return torch.where(x < -math.log(2), torch.log1p(-torch.exp(x)), torch.log(-torch.expm1(x)))


def odds_ratio(t: Trl) -> Tensor:
    chosen, rejected = t.means
    log_odds = (chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected))
    return -BETA * logsigmoid(log_odds)


def simpo_loss(t: Trl) -> Tensor:
    chosen, rejected = t.means
    return -logsigmoid(2.0 * (chosen - rejected - 0.5 / 2.0))


def alphapo_loss(t: Trl) -> Tensor:
    chosen, rejected = ((1 - mean.exp().pow(-0.3)) / 0.3 for mean in t.means)
    return -logsigmoid(2.0 * (chosen - rejected - 0.5 / 2.0))


def cpo_sigmoid(t: Trl) -> Tensor:
    return smoothed(t.chosen - t.rejected)


def cpo_ipo(t: Trl) -> Tensor:
    chosen, rejected = t.means
    return (chosen - rejected - 1 / (2 * BETA)) ** 2


def dpo(name: str, **keys: Any) -> DpoLoss:
    return from_mapping(DpoLoss, {"loss": name, "beta": BETA, **keys})


EVERY = (CALM, WIDE, EXTREME)
Row = tuple[Loss, Callable[[Trl], Tensor], tuple[float, ...]]
FORMULAS: dict[str, Row] = {
    "sigmoid": (dpo("sigmoid"), lambda t: -logsigmoid(t.x), EVERY),
    "conservative": (
        dpo("sigmoid", label_smoothing=EPSILON),
        lambda t: smoothed(t.x / BETA),
        EVERY,
    ),
    "hinge": (dpo("hinge"), lambda t: torch.relu(1 - t.x), EVERY),
    "ipo": (dpo("ipo"), ipo, EVERY),
    "robust": (dpo("robust", label_smoothing=EPSILON), robust, EVERY),
    "exo_pair": (dpo("exo", label_smoothing=EPSILON), exo_pair, EVERY),
    "nca_pair": (dpo("nca"), nca_pair, EVERY),
    "bco_pair": (dpo("bco"), bco_pair, EVERY),
    "sppo_hard": (dpo("sppo"), sppo_hard, EVERY),
    "apo_zero": (dpo("apo_zero"), apo_zero, EVERY),
    "apo_down": (dpo("apo_down"), apo_down, EVERY),
    "discopop": (dpo("discopop", discopop_tau=TAU), discopop, (CALM, WIDE)),
    "aot": (dpo("aot", label_smoothing=EPSILON), aot, EVERY),
    "aot_unpaired": (dpo("aot_unpaired", label_smoothing=EPSILON), aot_unpaired, EVERY),
    "sigmoid_norm": (dpo("sigmoid", length_normalized=True), sigmoid_norm, EVERY),
    "forward_kl": (
        dpo("sigmoid", divergence="forward_kl"),
        diverged(lambda u: 1 - torch.exp(-u)),
        (CALM, 3.0),
    ),
    "js_divergence": (
        dpo("sigmoid", divergence="js"),
        diverged(lambda u: math.log(2) + logsigmoid(u)),
        EVERY,
    ),
    "alpha_divergence": (
        dpo("sigmoid", divergence="alpha", alpha=0.3),
        diverged(lambda u: alpha_divergence(u, 0.7)),
        (CALM, 3.0),
    ),
    "orpo": (OrpoLoss(beta=BETA), odds_ratio, EVERY),
    "simpo": (SimpoLoss(beta=2.0, gamma=0.5), simpo_loss, EVERY),
    "alphapo": (SimpoLoss(beta=2.0, gamma=0.5, alpha=0.3), alphapo_loss, (CALM, 10.0)),
    "cpo_sigmoid": (
        CpoLoss(beta=BETA, label_smoothing=EPSILON, sft_weight=0.0),
        cpo_sigmoid,
        EVERY,
    ),
    "cpo_hinge": (
        CpoLoss(beta=BETA, loss="hinge", sft_weight=0.0),
        lambda t: torch.relu(1 - BETA * (t.chosen - t.rejected)),
        EVERY,
    ),
    "cpo_ipo": (CpoLoss(beta=BETA, loss="ipo", sft_weight=0.0), cpo_ipo, EVERY),
}
CASES = [(name, scale) for name, (_, _, some) in FORMULAS.items() for scale in some]


def told(loss: Loss, packed: Packed, logp_N: Tensor) -> Packed:
    """The statistics of the step, which here is one micro-batch; a shift is 0, as TRL has it."""
    stats: Mapping[str, Tensor] = loss.statistics(loss.observe(Scores(logp_N.detach()), packed))
    none = {"bco_shift": torch.zeros((), dtype=torch.float64)}
    return replace(packed, stats={name: none.get(name, value) for name, value in stats.items()})


def require_equal(ours: Tensor, theirs: Tensor, logp_N: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=LIMIT, atol=1e-12)
    found, expected = (torch.autograd.grad(x, logp_N, retain_graph=True)[0] for x in (ours, theirs))
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(found, expected, rtol=LIMIT, atol=1e-12)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("name", "scale"), CASES)
def test_pairs(name: str, scale: float, seed: int) -> None:
    loss, formula, _ = FORMULAS[name]
    packed, logp_N = drawn(scale, seed)
    packed = told(loss, packed, logp_N) if loss.observes else packed
    term = "odds_ratio" if name == "orpo" else next(iter(loss.units))
    ours = loss(Scores(logp_N), packed).terms[term] * scales(loss, [packed])[term]
    require_equal(ours, formula(for_trl(packed, logp_N)).mean(), logp_N)


@pytest.mark.parametrize("scale", EVERY)
def test_a_weighted_sum_with_the_sft_term(scale: float) -> None:
    """MPO as TRL's documentation has it: loss_type sigmoid, bco_pair, sft; loss_weights 0.8, 0.2, 1.0."""
    loss = DpoLoss(beta=BETA, loss=["sigmoid", "bco"], loss_weights=[0.8, 0.2], sft_weight=1.0)
    packed, logp_N = drawn(scale)
    packed = told(loss, packed, logp_N)
    by = scales(loss, [packed])
    terms = loss(Scores(logp_N), packed).terms
    ours = torch.stack([by[name] * value for name, value in terms.items()]).sum()
    t = for_trl(packed, logp_N)
    sft = -t.chosen.sum() / t.chosen_length.sum()
    theirs = 0.8 * -logsigmoid(t.x).mean() + 0.2 * bco_pair(t).mean() + sft
    require_equal(ours, theirs, logp_N)


@pytest.mark.parametrize("scale", EVERY)
@pytest.mark.parametrize("variant", ["kto", "apo_zero"])
def test_unpaired(variant: Literal["kto", "apo_zero"], scale: float) -> None:
    """The chosen answers labeled good, the rejected ones not, weighted 1.2 and 0.7; the mean is over all of them."""
    loss = KtoLoss(beta=BETA, loss=variant, desirable_weight=1.2, undesirable_weight=0.7)
    packed, logp_N = drawn(scale)
    t = for_trl(packed, logp_N)
    label_S = torch.zeros(packed.num_samples, dtype=torch.float64)
    label_S[packed.better_P] = 1.0
    packed = replace(
        with_values(packed, label=label_S), stats={"z0": torch.tensor(Z0, dtype=torch.float64)}
    )
    ours = loss(Scores(logp_N), packed).terms[variant] * scales(loss, [packed])[variant]
    chosen, rejected = t.ratios
    kl = Z0 if variant == "kto" else 0.0
    good = 1.2 * (1 - torch.sigmoid(BETA * (chosen - kl)))
    bad = 0.7 * (1 - torch.sigmoid(BETA * (kl - rejected)))
    require_equal(ours, torch.cat([good, bad]).mean(), logp_N)


@pytest.mark.parametrize("scale", EVERY)
def test_kto_reference_point(scale: float) -> None:
    """z: the mean of log-ratios, not below 0."""
    packed, logp_N = drawn(scale)
    loss = KtoLoss()
    found = loss.statistics(
        loss.observe(Scores(logp_N), with_values(packed, label=torch.zeros(packed.num_samples)))
    )
    chosen, rejected = for_trl(packed, logp_N).ratios
    expected = torch.cat([chosen, rejected]).mean().clamp(min=0)
    torch.testing.assert_close(found["z0"], expected, rtol=LIMIT, atol=0)


@pytest.mark.parametrize("scale", EVERY)
def test_reward_model(scale: float) -> None:
    """With the data's margin and center_rewards_coefficient."""
    packed, _ = drawn(1.0)
    random = torch.Generator().manual_seed(1)
    score_R = torch.randn(packed.num_reads, generator=random, dtype=torch.float64) * scale
    score_R.requires_grad_()
    margin_P = torch.rand(packed.num_pairs, generator=random, dtype=torch.float64)
    margin_S = torch.zeros(packed.num_samples, dtype=torch.float64)
    margin_S[packed.better_P] = margin_P
    loss = BradleyTerry(margin=1.0, centering_coef=0.01)
    terms = loss(Scores(score_R[:0], scalar_R=score_R), with_values(packed, margin=margin_S)).terms
    ours = torch.stack(list(terms.values())).sum() / packed.num_pairs
    chosen, rejected = score_R[packed.better_P], score_R[packed.worse_P]
    theirs = -logsigmoid(chosen - rejected - margin_P).mean()
    theirs = theirs + 0.01 * torch.mean((chosen + rejected) ** 2)
    require_equal(ours, theirs, score_R)
