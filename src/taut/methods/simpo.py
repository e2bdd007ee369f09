"""SimPO (arXiv 2405.14734) and AlphaPO: log-probabilities per token with a target margin, on pairs, without a
reference. The formula is in losses/preference.py.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, ClassVar

from taut.config import configclass
from taut.losses.settings import SimpoConfig
from taut.methods.method import MethodName
from taut.methods.preference import PairMethod
from taut.train.settings import DefaultRates

if TYPE_CHECKING:
    from taut.losses.loss import Loss


@configclass
class Simpo(PairMethod):
    """A run of ``taut simpo``."""

    learning_rates: ClassVar[DefaultRates] = DefaultRates(
        1e-6, 1e-5, "its authors: 3e-7 to 1e-6, and 1e-5 breaks the model"
    )

    method: MethodName = "simpo"
    simpo: SimpoConfig = field(default_factory=SimpoConfig)

    def loss(self) -> Loss:
        from taut.losses.preference import SimpoLoss

        return SimpoLoss.of(self.simpo)
