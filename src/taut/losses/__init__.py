"""The losses: frozen dataclasses of pure maths. A new loss is one small file and one line in ``LOSSES``.

A loss returns the *sum* of each of its terms over a micro-batch. The loop divides by one denominator per term,
counted over all micro-batches and ranks before the first backward from what ``unit`` says:

    token      the sum of ``weight_N``
    sequence   the number of samples

May import types, errors and torch only.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol

from torch import Tensor

from taut.losses.sft import CrossEntropy
from taut.types import LossSum, Packed, Scores

Unit = Literal["token", "sequence"]


class Loss(Protocol):
    """What the loop and the invariants know of a loss."""

    units: ClassVar[dict[str, Unit]]
    """Each term's denominator."""
    needs: ClassVar[tuple[str, ...]]
    """Streams of ``Packed`` it reads."""

    def __call__(self, scores: Scores, packed: Packed) -> LossSum:
        """The sums of the terms and the metrics."""

    def linear_weights(self, packed: Packed) -> dict[str, Tensor] | None:
        """d term / d logp_N [N] for each term where they are known before the forward; else None."""


LOSSES: dict[str, Loss] = {"cross_entropy": CrossEntropy()}
"""name -> an instance. Every entry is held to tests/invariants."""


def count(unit: Unit, packed: Packed) -> float:
    """A micro-batch's share of a term's denominator."""
    return float(packed.weight_N.sum()) if unit == "token" else float(packed.num_samples)
