"""Odds ratio preference optimisation (ORPO, arXiv 2403.07691): fine-tuning on preferred answers with an odds ratio
against the others, on pairs, without a reference. The formula is in losses/preference.py.
"""

from __future__ import annotations

from typing import ClassVar

from taut.config import Positive, configclass
from taut.losses.loss import Loss
from taut.losses.preference import Orpo as OrpoLoss
from taut.methods.method import MethodName
from taut.methods.preference import PairMethod
from taut.train.optim import DefaultRates


@configclass
class OrpoConfig:
    """ORPO: fine-tuning on preferred answers with an odds ratio against the others, on pairs, without a reference."""

    beta: Positive = 0.1
    """Weight of the odds-ratio term relative to the fine-tuning term: the paper's lambda."""
    log_entropy: bool = False
    """Log the entropy of the policy on the answers' tokens, which costs one more pass over the logits."""

    def make_loss(self) -> Loss:
        """The loss."""
        return OrpoLoss(beta=self.beta, entropy=self.log_entropy)


@configclass
class Orpo(PairMethod):
    """A run of ``taut orpo``."""

    learning_rates: ClassVar[DefaultRates] = DefaultRates(
        5e-6, 5e-5, "alignment-handbook (zephyr-orpo); TRL: 1e-6"
    )

    method: MethodName = "orpo"
    orpo: OrpoConfig = OrpoConfig()

    def loss(self) -> Loss:
        return self.orpo.make_loss()
