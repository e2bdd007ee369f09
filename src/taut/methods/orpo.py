"""Odds ratio preference optimization (ORPO, arXiv 2403.07691): fine-tuning on preferred answers with an odds ratio
against the others, on pairs, without a reference. The formula is in losses/preference.py.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, ClassVar

from taut.config import configclass
from taut.losses.settings import OrpoConfig
from taut.methods.method import MethodName
from taut.methods.preference import PairMethod
from taut.train.settings import DefaultRates

if TYPE_CHECKING:
    from taut.losses.loss import Loss


@configclass
class Orpo(PairMethod):
    """A run of ``taut orpo``."""

    learning_rates: ClassVar[DefaultRates] = DefaultRates(
        5e-6, 5e-5, "alignment-handbook (zephyr-orpo); TRL: 1e-6"
    )

    method: MethodName = "orpo"
    orpo: OrpoConfig = field(default_factory=OrpoConfig)

    def loss(self) -> Loss:
        from taut.losses.preference import OrpoLoss

        return OrpoLoss.of(self.orpo)
