"""SimPO (arXiv 2405.14734) and AlphaPO: log-probabilities per token with a target margin, on pairs, without a
reference. The formula is in losses/preference.py.
"""

from __future__ import annotations

from typing import ClassVar

from taut.config import NotNegative, Positive, configclass
from taut.losses.loss import Loss
from taut.losses.preference import simpo
from taut.methods.method import MethodName
from taut.methods.preference import PairMethod, require_valid_loss
from taut.train.optim import DefaultRates


@configclass
class SimpoConfig:
    """SimPO and AlphaPO: log-probabilities per token with a target margin, on pairs, without a reference."""

    beta: Positive = 2.0
    """Scale of the implicit reward, beta * mean log-probability of a token; the paper's values begin at
    2."""
    gamma: NotNegative = 1.0
    """Target margin between the rewards of a pair; the paper tries 0.3 to 1.6."""
    alpha: float = 0.0
    """Shape of the reward (AlphaPO): (1 - p^-alpha) / alpha. 0: log p, as in SimPO."""
    label_smoothing: NotNegative = 0.0
    """Assumed probability that a pair is labelled the wrong way round."""
    sft_weight: NotNegative = 0.0
    """Weight of the mean negative log-probability of the preferred answers' tokens."""
    log_entropy: bool = False
    """Log the entropy of the policy on the answers' tokens, which costs one more pass over the logits."""

    def __post_init__(self) -> None:
        require_valid_loss("simpo", self.make_loss)

    def make_loss(self) -> Loss:
        """The loss. Raises ConfigError for what has no meaning."""
        return simpo(
            self.beta,
            self.gamma,
            alpha=self.alpha,
            label_smoothing=self.label_smoothing,
            sft_weight=self.sft_weight,
            entropy=self.log_entropy,
        )


@configclass
class Simpo(PairMethod):
    """A run of ``taut simpo``."""

    learning_rates: ClassVar[DefaultRates] = DefaultRates(
        1e-6, 1e-5, "its authors: 3e-7 to 1e-6, and 1e-5 breaks the model"
    )

    method: MethodName = "simpo"
    simpo: SimpoConfig = SimpoConfig()

    def loss(self) -> Loss:
        return self.simpo.make_loss()
