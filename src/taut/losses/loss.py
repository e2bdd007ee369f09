"""The base class of losses: sums of terms over a micro-batch, and the units by which the loop divides them.

A loss returns the *sum* of each of its terms, its coefficient included. The loop divides by one denominator per term,
counted over all micro-batches and ranks before the first backward, of the unit that ``units`` names:

    token          the sum of ``weight_N``
    better_token   the same over the targets of preferred answers (``best_S``)
    sequence       the number of samples
    pair           the number of pairs
    read           the number of reads of a scalar head

A loss that needs a statistic of the whole step (a mean, an order) gathers tensors in a pass without gradient
(``observe``) and computes it from those of all micro-batches and ranks (``statistics``); it reads the result, a
constant, from ``packed.stats``. A statistic whose name ends in ``_S`` or ``_P`` has an entry for each sample or pair of
the step, of which each micro-batch gets its own.

A loss with keys of its own in a configuration inherits them from its section (settings.py), and ``Loss.of`` makes it of
the section of a run.

At the end are the small functions that several losses share. Losses import types, errors, config and torch only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

from taut.types import LossSum, Packed, Sample, Scores, Wants

Metrics: TypeAlias = dict[str, tuple[Tensor, Tensor]]
"""name -> (sum, count), detached."""
Unit: TypeAlias = Literal["token", "better_token", "sequence", "pair", "read"]


class Predictions(NamedTuple):
    """A model's predicted probabilities and the outcomes on held-out data, for its calibration."""

    probability: Tensor
    outcome: Tensor
    """1 where the prediction came true, 0 where not, 0.5 where it is undecided."""
    lowest: float
    """The smallest probability that can be predicted."""


@dataclass(frozen=True)
class Loss:
    """The base of all losses, with the defaults that fit most of them."""

    @classmethod
    def of(cls, section: Any) -> Self:
        """The loss with the settings of a section, which has a key or a property for each of the loss's fields."""
        return cls(**{field.name: getattr(section, field.name) for field in fields(cls)})

    @property
    def needs(self) -> tuple[str, ...]:
        """Streams of ``Packed`` that the loss reads."""
        return ()

    @property
    def needs_values(self) -> tuple[str, ...]:
        """Values of samples that the loss reads."""
        return ()

    @property
    def observes(self) -> bool:
        """Whether the loss needs statistics of the whole step."""
        return False

    @property
    def mismatched(self) -> bool:
        """Whether ``observe`` needs each prompt with another one's answer in place of the step's samples (KTO)."""
        return False

    @property
    def units(self) -> Mapping[str, Unit]:
        """Each term's denominator."""
        raise NotImplementedError

    @property
    def wants(self) -> Wants:
        """The scores that the loss needs from the model."""
        return Wants()

    @property
    def is_cost(self) -> bool:
        """Whether a larger value means a worse model. Not so for policy gradients: their value starts near 0 and
        changes sign.
        """
        return True

    @property
    def may_be_satisfied(self) -> bool:
        """Whether the loss and its gradient reach 0 at ordinary scores (a hinge)."""
        return False

    @property
    def best_by(self) -> tuple[str, ...]:
        """Metrics by which the best model can be chosen; larger is better."""
        return ()

    def __call__(self, scores: Scores, packed: Packed) -> LossSum:
        """The sums of the terms and the metrics."""
        raise NotImplementedError

    def token_values(self, scores: Scores, packed: Packed) -> Mapping[str, Tensor]:
        """Numbers of each target that the loss computes on its way, [N] by name, for the record of a run."""
        return {}

    def derived(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Numbers computed from a step's means."""
        return {}

    def predictions(self, scores: Scores, packed: Packed) -> Predictions | None:
        """Probabilities and outcomes on held-out data; None for a loss without probabilities."""
        return None

    def linear_weights(self, packed: Packed) -> dict[str, Tensor] | None:
        """d term / d logp_N [N] for each term where they are known before the forward; else None. With a divergence:
        d term / d (logp_N, divergence_N), [2, N], or d term / d divergence_N, [1, N].
        """
        return None

    def is_silent(self, sample: Sample) -> bool:
        """Whether every term of this sample is 0 with gradient 0, whatever the model's scores are. It is then counted
        in the denominators and not computed.
        """
        return False

    def observe(self, scores: Scores, packed: Packed) -> dict[str, Tensor]:
        """Tensors to gather from a micro-batch, without gradient; they are joined along their first axis."""
        return {}

    def statistics(self, observed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The statistics, from the tensors of all micro-batches and ranks."""
        return {}


def count_units(unit: Unit, packed: Packed) -> float:
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


def count_silent(unit: Unit, samples: Sequence[Sample]) -> float:
    """The share of samples that are not computed (``Loss.is_silent``)."""
    match unit:
        case "token":
            return float(sum(sample.weight_N.sum() for sample in samples))
        case "sequence":
            return float(len(samples))
        case _:
            raise AssertionError(f"no loss with terms by {unit} has silent samples")


# -- shared by several losses ----------------------------------------------------------------------

STEEPEST = 30.0
"""``relative_power`` continues along its tangent where it would grow faster than e to this: values and gradients stay
finite for any log-ratio, and float32 holds their squares."""


def relative_power(log_S: Tensor, power: float) -> Tensor:
    """(u^power - 1) / power for u = e^log_S; log_S itself at power 0. Along its tangent beyond ``STEEPEST``."""
    if power == 0:
        return log_S
    exponent = power * log_S
    held = exponent.clamp_max(STEEPEST)
    return (held.expm1() + held.exp() * (exponent - held)) / power


def mean(value: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, count) of a tensor's entries."""
    return value.detach().sum(), torch.tensor(float(value.numel()))


def accuracy(value: Tensor) -> tuple[Tensor, Tensor]:
    """(how many entries are above 0, count); ties count half, so that a constant model scores 0.5."""
    value = value.detach()
    return (value > 0).sum() + 0.5 * (value == 0).sum(), torch.tensor(float(value.numel()))
