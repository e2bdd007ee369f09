"""What losses of whole answers share: sums over an answer's targets, the term on good answers, the metrics.

A target's weight counts: log pi(y|x) is the sum of weight_N * logp_N over the answer's targets, and its length the sum
of the weights, which are 1 unless the data say otherwise.

The metric ``kl`` is the mean over all answers of log pi(y|x) - log ref(y|x), one number an answer. The answers are
the data's, not the policy's own: it says how far the policy has moved on them, and can be negative.

May import types, errors, torch and losses.loss. The other losses import it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from taut.types import Packed, Scores

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
