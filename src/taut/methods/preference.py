"""The common part of the methods on preferences, which compare answers to one prompt.

``PairMethod`` is the base of DPO, ORPO, SimPO and CPO. ``DpoConfig`` is the section ``[dpo]`` of ``taut dpo`` and
``taut online-dpo``. The formulas and their papers are in losses/preference.py.

Whether a reference is needed follows from the loss: ``"ref_logp_N" in loss.needs``. Values without a meaning are
refused by the loss itself, which names these keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from taut.config import NotNegative, Positive, configclass
from taut.data.schema import Kind
from taut.errors import ConfigError
from taut.losses.loss import Loss
from taut.losses.preference import Divergence, DpoVariant, Preference
from taut.methods.method import RunConfig


@configclass
class PairMethod(RunConfig):
    """A method whose rows are a prompt with better and worse answers."""

    row_kinds: ClassVar[Mapping[Kind, str]] = {"preference": ""}

    @property
    def allows_noise(self) -> bool:
        return False


def require_valid_loss(section: str, make_loss: Callable[[], Loss]) -> None:
    """Raise the ConfigError of ``make_loss``, if any, with the name of the section."""
    try:
        make_loss()
    except ConfigError as error:
        raise ConfigError(f"{section}: {error}") from error


@configclass
class DpoConfig:
    """DPO and its family, on pairs."""

    beta: Positive = 0.1
    """Scale of the implicit reward, beta * log-ratio: a larger value keeps the policy closer to the
    reference. IPO's tau."""
    loss: DpoVariant | list[DpoVariant] = "sigmoid"
    """The function of a pair: sigmoid is DPO, hinge SLiC, the others have their papers' names; of a list the weighted
    sum (MPO)."""
    loss_weights: list[Positive] | None = None
    """One weight for each of loss; 1 each if not set."""
    sft_weight: NotNegative = 0.0
    """Weight of the mean negative log-probability of the preferred answers' tokens (RPO, MPO)."""
    label_smoothing: NotNegative = 0.0
    """Assumed probability that a pair is labelled the wrong way round: for sigmoid (cDPO), robust, exo (its epsilon),
    aot."""
    length_normalised: bool = False
    """Divide each answer's log-ratio by its number of tokens; ipo always does so."""
    divergence: Divergence = "reverse_kl"
    """Divergence from the reference that is penalised (f-DPO): reverse_kl (plain DPO), forward_kl, js or alpha."""
    alpha: Annotated[float, Field(gt=0, lt=1)] | None = None
    """For divergence=alpha: near 0 it is reverse_kl, near 1 forward_kl; 0.5 if not set."""
    margin: NotNegative = 0.0
    """Weight of the data's margin, which is subtracted from the difference of a pair's rewards (ODPO). 0: margins are
    not read."""
    discopop_tau: Positive | None = None
    """For loss=discopop: temperature of the transition between its two branches; 0.05 if not set."""
    reference_free: bool = False
    """Compare the log-probabilities themselves, without a reference."""
    log_entropy: bool = False
    """Log the entropy of the policy on the answers' tokens, which costs one more pass over the logits."""

    def __post_init__(self) -> None:
        names = self._names
        if self.loss_weights is not None and len(self.loss_weights) != len(names):
            raise ConfigError(
                f"found {len(self.loss_weights)} dpo.loss_weights for dpo.loss={', '.join(names)}; expected one each; "
                "give as many"
            )
        if self.alpha is not None and self.divergence != "alpha":
            raise ConfigError(
                f"found dpo.alpha={self.alpha:g} with dpo.divergence={self.divergence}, which does not read it; "
                "expected dpo.divergence=alpha; set that, or leave dpo.alpha out"
            )
        if self.discopop_tau is not None and "discopop" not in names:
            raise ConfigError(
                f"found dpo.discopop_tau={self.discopop_tau:g} with dpo.loss={', '.join(names)}, "
                "which does not read it; expected dpo.loss=discopop; set that, or leave dpo.discopop_tau out"
            )
        require_valid_loss("dpo", self.make_loss)

    @property
    def _names(self) -> list[DpoVariant]:
        return self.loss if isinstance(self.loss, list) else [self.loss]

    def make_loss(self) -> Loss:
        """The loss. Raises ConfigError for what has no meaning."""
        weights = self.loss_weights or [1.0] * len(self._names)
        return Preference(
            beta=self.beta,
            terms=tuple(zip(self._names, weights, strict=True)),
            label_smoothing=self.label_smoothing,
            sft_weight=self.sft_weight,
            length_normalised=self.length_normalised,
            divergence=self.divergence,
            alpha=0.5 if self.alpha is None else self.alpha,
            margin=self.margin,
            tau=0.05 if self.discopop_tau is None else self.discopop_tau,
            reference_free=self.reference_free,
            entropy=self.log_entropy,
        )
