"""What losses of whole answers share: sums over an answer's targets, the term on good answers, the metrics.

A target's weight counts: log pi(y|x) is the sum of weight_N * logp_N over the answer's targets, and its length the sum
of the weights, which are 1 unless the data say otherwise.

The metric ``kl`` is the mean over all answers of log pi(y|x) - log ref(y|x), one number an answer. The answers are
the data's, not the policy's own: it says how far the policy has moved on them, and can be negative.

May import types, errors, torch and losses.loss. The other losses import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from taut.losses.loss import Loss, Predictions, Unit
from taut.types import LossSum, Packed, Scores, Wants

Metrics = dict[str, tuple[Tensor, Tensor]]

STEEPEST = 30.0
"""``relative_power`` goes on along its tangent where it would grow faster than e to this: values and gradients stay
finite for any log-ratio, and float32 holds their squares."""


class Answers(NamedTuple):
    """Sums over the targets of each sample."""

    logp_S: Tensor
    """log pi(y|x)"""
    log_ratio_S: Tensor
    """log pi(y|x) - log ref(y|x), or log pi(y|x) where there is no reference."""
    length_S: Tensor


def answers(scores: Scores, packed: Packed, *, has_reference: bool) -> Answers:
    """The sums of every sample of a micro-batch."""
    weight_N = packed.weight_N.to(scores.logp_N)
    logp_S = packed.by_sample(weight_N * scores.logp_N)
    log_ratio_S = logp_S
    if has_reference:
        ref_logp_N = packed.streams["ref_logp_N"].to(scores.logp_N)
        log_ratio_S = packed.by_sample(weight_N * (scores.logp_N - ref_logp_N))
    return Answers(logp_S, log_ratio_S, packed.by_sample(weight_N))


def nll_of_best(logp_N: Tensor, packed: Packed) -> Tensor:
    """sum of -weight * logp over the targets of preferred answers: a term of unit better_token."""
    is_best_N = packed.best_S[packed.row_N]
    return -(packed.weight_N.to(logp_N) * logp_N * is_best_N).sum()


def relative_power(log_S: Tensor, power: float) -> Tensor:
    """(u^power - 1) / power of u = e^log_S; log_S itself at power 0. Along its tangent beyond ``STEEPEST``."""
    if power == 0:
        return log_S
    exponent = power * log_S
    held = exponent.clamp_max(STEEPEST)
    return (held.expm1() + held.exp() * (exponent - held)) / power


def share_above(value: Tensor, threshold: float | Tensor = 0.0) -> Tensor:
    """How many are above the threshold; one that is equal counts half, so that a model that says nothing scores 0.5."""
    return (value > threshold).sum() + 0.5 * (value == threshold).sum()


def mean(value: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, count) of a tensor's entries."""
    return value.detach().sum(), torch.tensor(float(value.numel()))


def sequence_metrics(scores: Scores, found: Answers, *, kl: bool) -> Metrics:
    """Metrics that do not ask which answer is better."""
    metrics: Metrics = {}
    if kl:
        metrics["kl"] = mean(found.log_ratio_S)
    if scores.entropy_N is not None:
        metrics["entropy"] = mean(scores.entropy_N)
    return metrics


def pair_metrics(reward_S: Tensor, found: Answers, packed: Packed) -> Metrics:
    """Means over pairs of what the better and the worse answers have."""
    margin_P = (reward_S[packed.better_P] - reward_S[packed.worse_P]).detach()
    metrics = {
        "rewards/margin": mean(margin_P),
        "rewards/accuracy": (share_above(margin_P), mean(margin_P)[1]),
    }
    chosen, rejected = packed.better_P, packed.worse_P
    return metrics | kind_metrics(reward_S, found, packed, chosen=chosen, rejected=rejected)


def kind_metrics(
    reward_S: Tensor, found: Answers, packed: Packed, *, chosen: Tensor, rejected: Tensor
) -> Metrics:
    """Means over the answers that an index or a mask picks: reward, log-probability, number of targets."""
    length_S = packed.by_sample(torch.ones_like(packed.weight_N))
    values = {"rewards": reward_S, "logps": found.logp_S, "length": length_S}
    kinds = {"chosen": chosen, "rejected": rejected}
    return {
        f"{name}/{kind}": mean(value_S[picked])
        for name, value_S in values.items()
        for kind, picked in kinds.items()
    }


# --------------------------------------------------------------------------------------------------
# Losses on a scalar head: reward models of pairs, of scores, of steps.
#
#     bradley_terry   mean over pairs of -log s(r_w - r_l - margin_weight * m)       + centring * (r_w + r_l)^2
#                     Bradley-Terry as in InstructGPT (arXiv 2203.02155, eq. 1), the margin as in Llama 2 (2307.09288,
#                     eq. 2), the centring of 2312.09244. r: the head at a sample's last token
#     regression      mean over samples of (r - score)^2
#     process         mean over reads of -(y log s(r) + (1 - y) log s(-r)), y in [0, 1] the step's label and r the head
#                     at the step's end: a process reward model, arXiv 2305.20050
#
# Metrics are means over pairs (those of chosen and rejected), samples or reads; score/mean_square with score/mean
# gives the spread. An accuracy counts ties half.
#
# May import types, errors, torch and its neighbours in losses.


@dataclass(frozen=True)
class ScalarLoss(Loss):
    """What losses on a scalar head have in common."""

    @property
    def wants(self) -> Wants:
        return Wants(logp=False, scalar=True)


@dataclass(frozen=True)
class BradleyTerry(ScalarLoss):
    """The better of two answers has the higher score."""

    margin: float = 0.0
    """How much of the data's margin the difference is to exceed."""
    centring: float = 0.0
    """How strongly a pair's scores are drawn to a sum of 0, which differences leave free."""

    @property
    def units(self) -> Mapping[str, Unit]:
        units: dict[str, Unit] = {"bradley_terry": "pair"}
        return {**units, "centring": "pair"} if self.centring else units

    @property
    def needs_values(self) -> tuple[str, ...]:
        return ("preference", "margin") if self.margin else ("preference",)

    @property
    def best_by(self) -> tuple[str, ...]:
        return ("accuracy", "score/margin")

    def __call__(self, scores: Scores, packed: Packed) -> LossSum:
        score_S = score_of_samples(scores, packed)
        chosen_P = score_S.index_select(0, packed.better_P)
        rejected_P = score_S.index_select(0, packed.worse_P)
        gap_P = chosen_P - rejected_P
        wanted_P = gap_P
        if self.margin:
            margin_S = packed.values["margin"].to(score_S)
            margin_P = margin_S[packed.better_P] - margin_S[packed.worse_P]
            wanted_P = gap_P - self.margin * margin_P
        terms = {"bradley_terry": -logsigmoid(wanted_P).sum()}
        if self.centring:
            terms["centring"] = self.centring * ((chosen_P + rejected_P) ** 2).sum()
        metrics: Metrics = {
            "accuracy": (share_above(gap_P.detach()), mean(gap_P)[1]),
            "score/margin": mean(gap_P),
            "score/chosen": mean(chosen_P),
            "score/rejected": mean(rejected_P),
        }
        return LossSum(terms, metrics | spread(score_S))

    def predictions(self, scores: Scores, packed: Packed) -> Predictions:
        """That the answer with the higher score is the better one: s(|r_w - r_l|)."""
        score_S = score_of_samples(scores, packed)
        gap_P = score_S[packed.better_P] - score_S[packed.worse_P]
        return Predictions(gap_P.abs().sigmoid(), (gap_P.sign() + 1) / 2, 0.5)


@dataclass(frozen=True)
class Regression(ScalarLoss):
    """The head gives the data's score."""

    @property
    def units(self) -> Mapping[str, Unit]:
        return {"regression": "sequence"}

    @property
    def needs_values(self) -> tuple[str, ...]:
        return ("score",)

    def __call__(self, scores: Scores, packed: Packed) -> LossSum:
        score_S = score_of_samples(scores, packed)
        target_S = packed.values["score"].to(score_S)
        error_S = score_S - target_S
        metrics: Metrics = {"score/error": mean(error_S.abs()), "score/target": mean(target_S)}
        return LossSum({"regression": (error_S**2).sum()}, metrics | spread(score_S))


@dataclass(frozen=True)
class Process(ScalarLoss):
    """The head says at the end of each step whether it was right. Reads ``read_values["label"]``."""

    @property
    def units(self) -> Mapping[str, Unit]:
        return {"process": "read"}

    @property
    def best_by(self) -> tuple[str, ...]:
        return ("accuracy",)

    def predictions(self, scores: Scores, packed: Packed) -> Predictions:
        """That a step is right: s(r)."""
        return Predictions(_scalar(scores).sigmoid(), packed.read_values["label"], 0.0)

    def __call__(self, scores: Scores, packed: Packed) -> LossSum:
        score_R = _scalar(scores)
        label_R = packed.read_values["label"].to(score_R)
        total = binary_cross_entropy_with_logits(score_R, label_R, reduction="sum")
        side_R = (label_R - 0.5).sign() * score_R.detach()
        metrics: Metrics = {
            "accuracy": (share_above(side_R), mean(side_R)[1]),
            "label/mean": mean(label_R),
        }
        return LossSum({"process": total}, metrics | spread(score_R))


def score_of_samples(scores: Scores, packed: Packed) -> Tensor:
    """The head's value of each sample, [S], where each is read once."""
    score_R = _scalar(scores)
    assert packed.num_reads == packed.num_samples, (
        f"{packed.num_reads} reads of {packed.num_samples} samples: expected one each"
    )
    return score_R.new_zeros(packed.num_samples).index_add(0, packed.row_R, score_R)


def spread(score: Tensor) -> Metrics:
    """Mean and mean square of scores."""
    return {"score/mean": mean(score), "score/mean_square": mean(score**2)}


def _scalar(scores: Scores) -> Tensor:
    assert scores.scalar_R is not None, "the model was not asked for its scalar head"
    return scores.scalar_R
