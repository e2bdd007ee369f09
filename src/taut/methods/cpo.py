"""Contrastive preference optimization (CPO, arXiv 2401.08417): DPO with a uniform reference and fine-tuning on
preferred answers, on pairs. The formula is in losses/preference.py.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, ClassVar

from taut.config import configclass
from taut.losses.settings import CpoConfig
from taut.methods.method import MethodName
from taut.methods.preference import PairMethod
from taut.train.settings import DefaultRates

if TYPE_CHECKING:
    from taut.losses.loss import Loss


@configclass
class Cpo(PairMethod):
    """A run of ``taut cpo``."""

    learning_rates: ClassVar[DefaultRates] = DefaultRates(1e-6, 1e-5, "TRL")

    method: MethodName = "cpo"
    cpo: CpoConfig = field(default_factory=CpoConfig)

    def loss(self) -> Loss:
        from taut.losses.preference import CpoLoss

        return CpoLoss.of(self.cpo)
