"""Losses on fixed data: cross entropy of the listed targets, and the divergence from a teacher at each target.

    cross entropy   sum over targets of  -weight_N * logp_N
    distillation    T^2 sum weight_N * divergence_N  +  c sum weight_N * -logp_N

All sums are divided by the step's sum of weight_N; c is ``sft_weight``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from taut.config import configclass
from taut.losses.loss import Loss, Unit
from taut.losses.settings import DivergenceConfig
from taut.types import TOP_IDS, TOP_LOGP, Divergence, LossSum, Packed, Scores, Wants


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """-sum weight * logp, per token."""

    units: ClassVar[Mapping[str, Unit]] = {"cross_entropy": "token"}

    def __call__(self, scores: Scores, packed: Packed) -> LossSum:
        weight_N = packed.weight_N.to(scores.logp_N)
        return LossSum(terms={"cross_entropy": -(weight_N * scores.logp_N).sum()})

    def linear_weights(self, packed: Packed) -> dict[str, Tensor]:
        # d term / d logp_N, known in advance: the head forms its gradient chunk by chunk in the forward
        return {"cross_entropy": -packed.weight_N}


@configclass
class DistillLoss(DivergenceConfig, Loss):
    """The divergence from a teacher, per token, and cross entropy where it has a weight.

    The divergences are defined and evaluated inside the head's chunks, in models/teacher.py. Their gradient shrinks as
    1 / T^2 when the temperature T rises, and the factor T^2 undoes that (Hinton et al., arXiv 1503.02531); the metric
    ``divergence`` is without it. The log-probabilities are at T = 1.

    Both terms are linear in the head's outputs, with weights known in advance: d term / d (logp_N, divergence_N),
    [2, N], or d term / d divergence_N, [1, N], without cross entropy. There is no other way to their gradient:
    ``Scores.divergence_N`` and ``logp_N`` are numbers without one.
    """

    is_listed: bool = False
    """The teacher is a list of its likeliest tokens at each target."""

    @property
    def needs(self) -> tuple[str, ...]:
        return (TOP_IDS, TOP_LOGP) if self.is_listed else ()

    @property
    def units(self) -> Mapping[str, Unit]:
        units: dict[str, Unit] = {"divergence": "token"}
        return units | ({"cross_entropy": "token"} if self.sft_weight else {})

    @property
    def wants(self) -> Wants:
        beta = 0.5 if self.beta is None else self.beta
        tail = self.tail or "bucket"
        return Wants(divergence=Divergence(self.divergence, beta, self.temperature, tail))

    def __call__(self, scores: Scores, packed: Packed) -> LossSum:
        assert scores.divergence_N is not None, "the loss needs the divergence"
        # the terms
        weight_N = packed.weight_N.to(scores.logp_N)
        divergence = (weight_N * scores.divergence_N).sum()
        cross_entropy = -(weight_N * scores.logp_N).sum()
        terms = {"divergence": self.temperature**2 * divergence}
        if self.sft_weight:
            terms["cross_entropy"] = self.sft_weight * cross_entropy
        # the metrics, without the factors
        count = weight_N.sum()
        values = {"divergence": divergence, "cross_entropy": cross_entropy}
        return LossSum(terms, {name: (value.detach(), count) for name, value in values.items()})

    def linear_weights(self, packed: Packed) -> dict[str, Tensor]:
        weight_N, none_N = packed.weight_N, torch.zeros_like(packed.weight_N)
        # d term / d logp_N and d term / d divergence_N; without cross entropy the latter alone
        scaled_N = self.temperature**2 * weight_N
        if not self.sft_weight:
            return {"divergence": scaled_N[None]}
        return {
            "divergence": torch.stack([none_N, scaled_N]),
            "cross_entropy": torch.stack([-self.sft_weight * weight_N, none_N]),
        }
