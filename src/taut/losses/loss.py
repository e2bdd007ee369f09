"""What a loss is: sums of terms over a micro-batch, and what they are divided by.

A loss returns the *sum* of each of its terms, its coefficient included. The loop divides by one denominator per term,
counted over all micro-batches and ranks before the first backward from what ``units`` says:

    token          the sum of ``weight_N``
    better_token   the same over the targets of preferred answers (``best_S``)
    sequence       the number of samples
    pair           the number of pairs
    read           the number of reads of a scalar head

A loss that needs something of the whole step (a mean, an order) says what is to be gathered (``observe``) and what is
made of it (``statistics``); a pass without gradient gathers it, and it is there as ``packed.stats``, constants. A
statistic whose name ends in ``_S`` or ``_P`` has an entry for each sample or pair of the step, and each micro-batch is
given its own.

May import types, errors and torch only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

from taut.types import LossSum, Packed, Scores, Wants

Unit: TypeAlias = Literal["token", "better_token", "sequence", "pair", "read"]


class Predictions(NamedTuple):
    """What a model foretells, and what it came to: how far its probabilities can be believed."""

    probability: Tensor
    outcome: Tensor
    """1 where it came true, 0 where not, 0.5 where neither can be said."""
    lowest: float
    """The least probability there can be."""


@dataclass(frozen=True)
class Loss:
    """The base of all losses: what most of them need not say."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Streams of ``Packed`` it reads."""
        return ()

    @property
    def needs_values(self) -> tuple[str, ...]:
        """Values of samples it reads."""
        return ()

    @property
    def observes(self) -> bool:
        """Whether it needs statistics of the whole step."""
        return False

    @property
    def units(self) -> Mapping[str, Unit]:
        """Each term's denominator."""
        raise NotImplementedError

    @property
    def wants(self) -> Wants:
        """What the model is asked for."""
        return Wants()

    @property
    def is_cost(self) -> bool:
        """Whether a larger value means a worse model. That of policy gradients does not: it starts near 0 and changes
        sign.
        """
        return True

    @property
    def may_be_satisfied(self) -> bool:
        """Whether it reaches 0, and its gradient with it, at scores that are nothing unusual (a hinge)."""
        return False

    @property
    def best_by(self) -> tuple[str, ...]:
        """Metrics by which the best model may be chosen; the larger, the better."""
        return ()

    def __call__(self, scores: Scores, packed: Packed) -> LossSum:
        """The sums of the terms and the metrics."""
        raise NotImplementedError

    def derived(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Numbers that are made of a step's means."""
        return {}

    def predictions(self, scores: Scores, packed: Packed) -> Predictions | None:
        """What held-out data show of the model's probabilities; None: it gives none."""
        return None

    def linear_weights(self, packed: Packed) -> dict[str, Tensor] | None:
        """d term / d logp_N [N] for each term where they are known before the forward; else None. Where a divergence is
        wanted: d term / d (logp_N, divergence_N), [2, N].
        """
        return None

    def observe(self, scores: Scores, packed: Packed) -> dict[str, Tensor]:
        """What is gathered of a micro-batch, without gradient: tensors that are joined along their first axis."""
        return {}

    def statistics(self, observed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is made of it, all micro-batches and ranks together."""
        return {}


def count(unit: Unit, packed: Packed) -> float:
    """A micro-batch's share of a term's denominator."""
    match unit:
        case "token":
            return float(packed.weight_N.sum())
        case "better_token":
            return float(packed.weight_N[packed.best_S[packed.row_N]].sum())
        case "sequence":
            return float(packed.num_samples)
        case "pair":
            return float(packed.num_pairs)
        case "read":
            return float(packed.num_reads)
