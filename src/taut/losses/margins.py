"""The functions of the DPO family: what a pair's two log-ratios cost. One function and one entry for each.

With r = the score of an answer (its log-ratio log pi(y|x) - log ref(y|x), or what a divergence makes of it), w the
better and l the worse answer, d = r_w - r_l, m the margin, s the logistic function, e the label smoothing:

    x = beta * d - m        m: a target margin (SimPO's gamma) or the data's (ODPO, arXiv 2402.10571)

    sigmoid       -(1 - e) log s(x) - e log s(-x)           DPO, arXiv 2305.18290, eq. 7; e > 0: cDPO (E. Mitchell, A
                                                            note on DPO with noisy preferences, 2023)
    ipo           ((x - 1/2) / beta)^2 = (d - m / beta - 1 / (2 beta))^2 on log-ratios per token
                                                            IPO, arXiv 2310.12036, eq. 17, with beta for tau. The paper
                                                            writes sums; its results are of means per token, as TRL's
    hinge         max(0, 1 - x)                             SLiC, arXiv 2305.10425, on log-ratios (RSO, 2309.06657)
    robust        (-(1 - e) log s(x) + e log s(-x)) / (1 - 2e)
                                                            rDPO, arXiv 2403.00409. Not bounded from below
    exo           KL([s(x), s(-x)] || [1 - e, e])           EXO, arXiv 2402.00856, eq. 16 with two answers
    discopop      (1 - s(x / tau)) * -log s(x) + s(x / tau) * exp(-x)
                                                            DiscoPOP, arXiv 2406.08414, eq. 5 (log-ratio modulated)
    nca           -log s(beta r_w) - (log s(-beta r_w) + log s(-beta r_l)) / 2
                                                            NCA, arXiv 2402.05369, two answers labelled 1 and 0
    bco           -log s(beta r_w - c) - log s(c - beta r_l)
                                                            BCO, arXiv 2404.04656; c = the mean of beta r over all
                                                            answers of the step, a constant (the paper: a running one)
    sppo          (r_w - 1 / (2 beta))^2 + (r_l + 1 / (2 beta))^2
                                                            SPPO, arXiv 2405.00675, eq. 4.7 where the better answer
                                                            wins for sure
    apo_zero      s(-beta r_w) + s(beta r_l)                APO, arXiv 2408.06266, eq. 7
    apo_down      s(beta r_w) + s(-beta d)                  APO, arXiv 2408.06266, eq. 8
    aot           sigmoid's, of beta * (a_(i) - b_(i)): the differences log pi(w) - log pi(l) of the step, sorted,
                  against the reference's, sorted           AOT, arXiv 2406.05882, paired
    aot_unpaired  sigmoid's, of beta * (r_w(i) - r_l(i)): the better answers of the step, sorted, against the worse
                                                            AOT, arXiv 2406.05882, unpaired

The order of AOT is over the whole step: a pair's partner reaches it as a constant (``Variant.statistics``). Unpaired,
both partners move, so a pair is charged for its better answer against a constant, and for its worse one against
another: the gradients add, and half of the sum is the value.

Finite, with finite gradients, for log-ratios of any size that float32 holds the square of.

May import torch. losses.preference imports it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


class Compared(NamedTuple):
    """Pairs of answers, and the constants of the functions."""

    better_P: Tensor
    """Scores of the better answers: log-ratios, or what a divergence makes of them."""
    worse_P: Tensor
    margin_P: Tensor
    beta: float
    smoothing: float
    tau: float
    stats: Mapping[str, Tensor]

    @property
    def x_P(self) -> Tensor:
        return self.beta * (self.better_P - self.worse_P) - self.margin_P


class Observed(NamedTuple):
    """All pairs of a step, without gradient."""

    better_P: Tensor
    worse_P: Tensor
    reference_P: Tensor
    """log ref(w) - log ref(l)"""
    beta: float


def _smoothed(x_P: Tensor, smoothing: float) -> Tensor:
    if smoothing == 0:
        return -logsigmoid(x_P)
    return -(1 - smoothing) * logsigmoid(x_P) - smoothing * logsigmoid(-x_P)


def sigmoid(pairs: Compared) -> Tensor:
    return _smoothed(pairs.x_P, pairs.smoothing)


def ipo(pairs: Compared) -> Tensor:
    return ((pairs.x_P - 0.5) / pairs.beta) ** 2


def hinge(pairs: Compared) -> Tensor:
    return torch.relu(1 - pairs.x_P)


def robust(pairs: Compared) -> Tensor:
    x_P, flipped = pairs.x_P, pairs.smoothing
    return (flipped * logsigmoid(-x_P) - (1 - flipped) * logsigmoid(x_P)) / (1 - 2 * flipped)


def exo(pairs: Compared) -> Tensor:
    x_P = pairs.x_P
    for_better_P = torch.sigmoid(x_P) * (logsigmoid(x_P) - math.log1p(-pairs.smoothing))
    for_worse_P = torch.sigmoid(-x_P) * (logsigmoid(-x_P) - math.log(pairs.smoothing))
    return for_better_P + for_worse_P


def discopop(pairs: Compared) -> Tensor:
    """s(x / tau) * exp(-x) is formed in the exponent: one factor is 0 where the other overflows."""
    x_P, tau = pairs.x_P, pairs.tau
    logistic_P = torch.sigmoid(-x_P / tau) * -logsigmoid(x_P)
    return logistic_P + (logsigmoid(x_P / tau) - x_P).exp()


def nca(pairs: Compared) -> Tensor:
    better_P, worse_P = pairs.beta * pairs.better_P, pairs.beta * pairs.worse_P
    return -logsigmoid(better_P) - 0.5 * (logsigmoid(-better_P) + logsigmoid(-worse_P))


def bco(pairs: Compared) -> Tensor:
    shift = pairs.stats["bco_shift"].to(pairs.better_P)
    better_P, worse_P = pairs.beta * pairs.better_P, pairs.beta * pairs.worse_P
    return -logsigmoid(better_P - shift) - logsigmoid(shift - worse_P)


def sppo(pairs: Compared) -> Tensor:
    half = 0.5 / pairs.beta
    return (pairs.better_P - half) ** 2 + (pairs.worse_P + half) ** 2


def apo_zero(pairs: Compared) -> Tensor:
    return torch.sigmoid(-pairs.beta * pairs.better_P) + torch.sigmoid(pairs.beta * pairs.worse_P)


def apo_down(pairs: Compared) -> Tensor:
    falls_P = torch.sigmoid(-pairs.beta * (pairs.better_P - pairs.worse_P))
    return torch.sigmoid(pairs.beta * pairs.better_P) + falls_P


def aot(pairs: Compared) -> Tensor:
    moved_P = pairs.better_P - pairs.worse_P + pairs.stats["aot_offset_P"].to(pairs.better_P)
    return _smoothed(pairs.beta * moved_P, pairs.smoothing)


def aot_unpaired(pairs: Compared) -> Tensor:
    against_P = pairs.stats["aot_worse_P"].to(pairs.better_P)
    for_better_P = _smoothed(pairs.beta * (pairs.better_P - against_P), pairs.smoothing)
    against_P = pairs.stats["aot_better_P"].to(pairs.better_P)
    for_worse_P = _smoothed(pairs.beta * (against_P - pairs.worse_P), pairs.smoothing)
    both_P = for_better_P + for_worse_P
    return both_P - 0.5 * both_P.detach()


def _mean_reward(step: Observed) -> dict[str, Tensor]:
    return {"bco_shift": step.beta * torch.cat([step.better_P, step.worse_P]).mean()}


def _partner(value_P: Tensor, other_P: Tensor) -> Tensor:
    """For each value the entry of ``other_P`` that has the same rank."""
    partner_P = torch.empty_like(other_P)
    partner_P[value_P.argsort(stable=True)] = other_P.sort().values
    return partner_P


def _offset_of_rank(step: Observed) -> dict[str, Tensor]:
    """What makes log pi(w) - log pi(l) - b_(i) of the pair's own r_w - r_l."""
    policy_P = step.better_P - step.worse_P + step.reference_P
    return {"aot_offset_P": step.reference_P - _partner(policy_P, step.reference_P)}


def _partners(step: Observed) -> dict[str, Tensor]:
    return {
        "aot_worse_P": _partner(step.better_P, step.worse_P),
        "aot_better_P": _partner(step.worse_P, step.better_P),
    }


class Variant(NamedTuple):
    """A member of the family."""

    value: Callable[[Compared], Tensor]
    """[P], to be summed."""
    is_of_x: bool = False
    """A function of x alone: it takes margins, divergences and the absence of a reference."""
    is_smoothed: bool = False
    """It reads the label smoothing."""
    is_averaged: bool = False
    """It is given log-ratios per token."""
    statistics: Callable[[Observed], dict[str, Tensor]] | None = None
    """What it needs of the whole step."""


VARIANTS: dict[str, Variant] = {
    "sigmoid": Variant(sigmoid, is_of_x=True, is_smoothed=True),
    "ipo": Variant(ipo, is_of_x=True, is_averaged=True),
    "hinge": Variant(hinge, is_of_x=True),
    "robust": Variant(robust, is_of_x=True, is_smoothed=True),
    "exo": Variant(exo, is_of_x=True, is_smoothed=True),
    "discopop": Variant(discopop, is_of_x=True),
    "nca": Variant(nca),
    "bco": Variant(bco, statistics=_mean_reward),
    "sppo": Variant(sppo),
    "apo_zero": Variant(apo_zero),
    "apo_down": Variant(apo_down),
    "aot": Variant(aot, is_smoothed=True, statistics=_offset_of_rank),
    "aot_unpaired": Variant(aot_unpaired, is_smoothed=True, statistics=_partners),
}
"""name -> what it costs; the formulas are in the module's docstring."""
