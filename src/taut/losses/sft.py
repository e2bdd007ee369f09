"""Supervised fine-tuning: weighted cross entropy of the listed targets.

    sum over targets of  -weight_N * logp_N          divided by the step's sum of weight_N

May import types, errors and torch only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from taut.losses.loss import Loss, Unit
from taut.types import LossSum, Packed, Scores


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """-sum weight * logp, per token."""

    @property
    def units(self) -> Mapping[str, Unit]:
        return {"cross_entropy": "token"}

    def __call__(self, scores: Scores, packed: Packed) -> LossSum:
        weight_N = packed.weight_N.to(scores.logp_N)
        return LossSum(terms={"cross_entropy": -(weight_N * scores.logp_N).sum()})

    def linear_weights(self, packed: Packed) -> dict[str, Tensor]:
        return {"cross_entropy": -packed.weight_N}
