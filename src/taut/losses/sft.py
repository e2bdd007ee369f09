"""Supervised fine-tuning: weighted cross entropy of the listed targets.

    sum over targets of  -weight_N * logp_N          divided by the step's sum of weight_N

May import types, errors and torch only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from taut.types import LossSum, Packed, Scores


@dataclass(frozen=True)
class CrossEntropy:
    """-sum weight * logp, per token."""

    units: ClassVar[dict[str, Literal["token", "sequence"]]] = {"cross_entropy": "token"}
    needs: ClassVar[tuple[str, ...]] = ()

    def __call__(self, scores: Scores, packed: Packed) -> LossSum:
        weight_N = packed.weight_N.to(scores.logp_N)
        return LossSum(terms={"cross_entropy": -(weight_N * scores.logp_N).sum()})

    def linear_weights(self, packed: Packed) -> dict[str, Tensor]:
        return {"cross_entropy": -packed.weight_N}
