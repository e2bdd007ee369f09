"""Preference optimisation without a reference: ORPO, SimPO, AlphaPO, CPO.

With q = log pi(y|x) / |y| the mean log-probability of an answer's tokens, s the logistic function, w the better and l
the worse answer:

    ORPO     sft + beta * -log s(log odds(w) - log odds(l)),   log odds = q - log(1 - e^q)
                                                    arXiv 2403.07691, eq. 6 and 7, with beta for lambda
    SimPO    -log s(beta * (q_w - q_l) - gamma)     arXiv 2405.14734, eq. 6
    AlphaPO  SimPO with (1 - e^(-alpha q)) / alpha for q         arXiv 2501.03884
    CPO      sft_weight * sft + f of log pi(w|x) - log pi(l|x)   arXiv 2401.08417, eq. 3, f as in losses/margins.py

    sft      the mean of -logp over the tokens of preferred answers (TRL's ORPO takes their prompts, too)

SimPO, AlphaPO and CPO are ``Preference`` with a reference that is not there. ORPO's odds are finite where q is 0: -q is
not let below what the dtype can tell from 0.

May import types, errors, torch and its neighbours in losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from taut.losses.answers import (
    answers,
    mean,
    nll_of_best,
    pair_metrics,
    sequence_metrics,
)
from taut.losses.loss import Loss, Unit
from taut.losses.preference import Preference
from taut.types import LossSum, Packed, Scores, Wants

CpoVariant: TypeAlias = Literal["sigmoid", "hinge", "ipo"]


def simpo(
    beta: float,
    gamma: float,
    *,
    alpha: float = 0.0,
    label_smoothing: float = 0.0,
    sft_weight: float = 0.0,
    entropy: bool = False,
) -> Preference:
    """SimPO; with ``alpha`` AlphaPO."""
    return Preference(
        beta=beta,
        gamma=gamma,
        label_smoothing=label_smoothing,
        sft_weight=sft_weight,
        length_normalised=True,
        divergence="alpha" if alpha else "reverse_kl",
        alpha=alpha,
        reference_free=True,
        entropy=entropy,
    )


def cpo(
    beta: float,
    variant: CpoVariant = "sigmoid",
    *,
    label_smoothing: float = 0.0,
    sft_weight: float = 1.0,
    entropy: bool = False,
) -> Preference:
    """CPO."""
    return Preference(
        beta=beta,
        terms=((variant, 1.0),),
        label_smoothing=label_smoothing,
        sft_weight=sft_weight,
        reference_free=True,
        entropy=entropy,
    )


@dataclass(frozen=True)
class Orpo(Loss):
    """See the module docstring."""

    beta: float = 0.1
    """The weight of the odds ratio: lambda in the paper."""
    entropy: bool = False
    """Whether the entropy is among the metrics."""

    @property
    def units(self) -> Mapping[str, Unit]:
        return {"odds_ratio": "pair", "sft": "better_token"}

    @property
    def needs_values(self) -> tuple[str, ...]:
        return ("preference",)

    @property
    def wants(self) -> Wants:
        return Wants(entropy=self.entropy)

    @property
    def best_by(self) -> tuple[str, ...]:
        return ("rewards/accuracy", "rewards/margin")

    def __call__(self, scores: Scores, packed: Packed) -> LossSum:
        found = answers(scores, packed, has_reference=False)
        mean_logp_S = found.logp_S / found.length_S
        odds_S = log_odds(mean_logp_S)
        ratio_P = odds_S.index_select(0, packed.better_P) - odds_S.index_select(0, packed.worse_P)
        terms = {
            "odds_ratio": -self.beta * logsigmoid(ratio_P).sum(),
            "sft": nll_of_best(scores.logp_N, packed),
        }
        metrics = pair_metrics(self.beta * mean_logp_S, found, packed)
        metrics["log_odds_ratio"] = mean(ratio_P)
        return LossSum(terms, metrics | sequence_metrics(scores, found, kl=False))


def log_odds(logp_S: Tensor) -> Tensor:
    """log(p / (1 - p)) of p = e^logp: -(a + log(1 - e^-a)) with a = -logp, which nothing cancels in."""
    unlikely_S = (-logp_S).clamp_min(torch.finfo(logp_S.dtype).eps)
    return -(unlikely_S + (-torch.expm1(-unlikely_S)).log())
