"""Contrastive preference optimisation (CPO, arXiv 2401.08417): DPO with a uniform reference and fine-tuning on
preferred answers, on pairs. The formula is in losses/preference.py.
"""

from __future__ import annotations

from typing import ClassVar

from taut.config import NotNegative, Positive, configclass
from taut.losses.loss import Loss
from taut.losses.preference import CpoVariant, cpo
from taut.methods.method import MethodName
from taut.methods.preference import PairMethod, require_valid_loss
from taut.train.optim import DefaultRates


@configclass
class CpoConfig:
    """CPO: DPO with a uniform reference and fine-tuning on preferred answers, on pairs."""

    beta: Positive = 0.1
    """Scale of the implicit reward, beta * log-probability."""
    loss: CpoVariant = "sigmoid"
    """sigmoid, hinge, or ipo (on log-probabilities per token)."""
    sft_weight: NotNegative = 1.0
    """Weight of the mean negative log-probability of the preferred answers' tokens."""
    label_smoothing: NotNegative = 0.0
    """Assumed probability that a pair is labelled the wrong way round; for loss=sigmoid only."""
    log_entropy: bool = False
    """Log the entropy of the policy on the answers' tokens, which costs one more pass over the logits."""

    def __post_init__(self) -> None:
        require_valid_loss("cpo", self.make_loss)

    def make_loss(self) -> Loss:
        """The loss. Raises ConfigError for what has no meaning."""
        return cpo(
            self.beta,
            self.loss,
            label_smoothing=self.label_smoothing,
            sft_weight=self.sft_weight,
            entropy=self.log_entropy,
        )


@configclass
class Cpo(PairMethod):
    """A run of ``taut cpo``."""

    learning_rates: ClassVar[DefaultRates] = DefaultRates(1e-6, 1e-5, "TRL")

    method: MethodName = "cpo"
    cpo: CpoConfig = CpoConfig()

    def loss(self) -> Loss:
        return self.cpo.make_loss()
