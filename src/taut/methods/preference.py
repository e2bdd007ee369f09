"""What a user says of preference optimisation, and the loss it makes. Wiring, no maths: the formulas and their papers
are in losses/{margins,preference,unpaired,reference_free}.py.

Whether a reference is needed is the loss's to say: ``"ref_logp_N" in loss.needs``. Where it comes from is
methods/reference.py's. Values without a meaning are refused by the loss itself, in the words of these keys.

May import losses, config and errors. run.py names these sections.
"""

from __future__ import annotations

from typing import Annotated, Literal, Protocol, TypeAlias

from pydantic import Field

from taut.config import configclass
from taut.errors import ConfigError
from taut.losses.loss import Loss
from taut.losses.preference import (
    CpoVariant,
    Divergence,
    Orpo,
    Preference,
    Unpaired,
    UnpairedVariant,
    cpo,
    simpo,
)

DpoVariant: TypeAlias = Literal[
    "sigmoid",
    "ipo",
    "hinge",
    "robust",
    "exo",
    "discopop",
    "nca",
    "bco",
    "sppo",
    "apo_zero",
    "apo_down",
    "aot",
    "aot_unpaired",
]
"""The names of losses.margins.VARIANTS; a test holds them to it."""
Positive: TypeAlias = Annotated[float, Field(gt=0)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0)]


class _MakesLoss(Protocol):
    def make_loss(self) -> Loss: ...


def _require_meant(section: str, config: _MakesLoss) -> None:
    """Refuse what the loss refuses, and say in which section it was found."""
    try:
        config.make_loss()
    except ConfigError as error:
        raise ConfigError(f"{section}: {error}") from error


@configclass
class DpoConfig:
    """DPO and its family, on pairs."""

    beta: Positive = 0.1
    """How much a nat of log-ratio counts: larger keeps the policy closer to the reference. IPO's tau."""
    loss: DpoVariant | list[DpoVariant] = "sigmoid"
    """sigmoid (DPO), ipo, hinge (SLiC), robust, exo, discopop, nca, bco, sppo, apo_zero, apo_down, aot, aot_unpaired;
    of a list the weighted sum (MPO)."""
    loss_weights: list[Positive] | None = None
    """A weight for each of loss; 1 each where not given."""
    sft_weight: NotNegative = 0.0
    """Weight of the mean negative log-probability of the preferred answers' tokens (RPO, MPO)."""
    label_smoothing: NotNegative = 0.0
    """How often a pair is thought to be the wrong way round: sigmoid (cDPO), robust, exo (its epsilon), aot."""
    length_normalised: bool = False
    """Divide each answer's log-ratio by its number of tokens; ipo always does."""
    divergence: Divergence = "reverse_kl"
    """What ties the policy to the reference (f-DPO): reverse_kl (plain DPO), forward_kl, js or alpha."""
    alpha: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Of divergence=alpha: near 0 it is reverse_kl, near 1 forward_kl; 0.5 where not given."""
    margin: NotNegative = 0.0
    """How much of the data's margin is taken off a pair's difference of rewards (ODPO); 0: margins are not read."""
    discopop_tau: Positive | None = None
    """Of loss=discopop: how sharply it goes from one branch to the other; 0.05 where not given."""
    reference_free: bool = False
    """Compare log-probabilities themselves; no reference is read."""
    entropy: bool = False
    """Report the entropy of the policy on the answers' tokens, which costs a pass over the logits."""

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
        _require_meant("dpo", self)

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
            entropy=self.entropy,
        )


@configclass
class KtoConfig:
    """KTO and its neighbours, on answers that are good or bad by themselves."""

    beta: Positive = 0.1
    """How much a nat of log-ratio counts: larger keeps the policy closer to the reference."""
    loss: UnpairedVariant = "kto"
    """kto, bco or apo_zero (which takes no reference point)."""
    desirable_weight: Positive = 1.0
    """Weight of answers labelled good."""
    undesirable_weight: Positive = 1.0
    """Weight of the others. The paper advises 1 to 4/3 for weight times number of the good over that of the others."""
    entropy: bool = False
    """Report the entropy of the policy on the answers' tokens, which costs a pass over the logits."""

    def make_loss(self) -> Loss:
        """The loss."""
        return Unpaired(
            variant=self.loss,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
            entropy=self.entropy,
        )


@configclass
class OrpoConfig:
    """ORPO: fine-tuning on preferred answers with an odds ratio against the others, on pairs, without a reference."""

    beta: Positive = 0.1
    """Weight of the odds ratio beside the fine-tuning term: the paper's lambda."""
    entropy: bool = False
    """Report the entropy of the policy on the answers' tokens, which costs a pass over the logits."""

    def make_loss(self) -> Loss:
        """The loss."""
        return Orpo(beta=self.beta, entropy=self.entropy)


@configclass
class SimpoConfig:
    """SimPO and AlphaPO: log-probabilities per token with a target margin, on pairs, without a reference."""

    beta: Positive = 2.0
    """How much a nat per token counts; the paper's values begin at 2."""
    gamma: NotNegative = 1.0
    """The difference of rewards aimed at; the paper tries 0.3 to 1.6."""
    alpha: float = 0.0
    """AlphaPO's shape of the reward: (1 - p^-alpha) / alpha; 0: log p, which is SimPO."""
    label_smoothing: NotNegative = 0.0
    """How often a pair is thought to be the wrong way round."""
    sft_weight: NotNegative = 0.0
    """Weight of the mean negative log-probability of the preferred answers' tokens."""
    entropy: bool = False
    """Report the entropy of the policy on the answers' tokens, which costs a pass over the logits."""

    def __post_init__(self) -> None:
        _require_meant("simpo", self)

    def make_loss(self) -> Loss:
        """The loss. Raises ConfigError for what has no meaning."""
        return simpo(
            self.beta,
            self.gamma,
            alpha=self.alpha,
            label_smoothing=self.label_smoothing,
            sft_weight=self.sft_weight,
            entropy=self.entropy,
        )


@configclass
class CpoConfig:
    """CPO: DPO with a uniform reference and fine-tuning on preferred answers, on pairs."""

    beta: Positive = 0.1
    """How much a nat of log-probability counts."""
    loss: CpoVariant = "sigmoid"
    """sigmoid, hinge, or ipo (on log-probabilities per token)."""
    sft_weight: NotNegative = 1.0
    """Weight of the mean negative log-probability of the preferred answers' tokens."""
    label_smoothing: NotNegative = 0.0
    """How often a pair is thought to be the wrong way round: loss=sigmoid only."""
    entropy: bool = False
    """Report the entropy of the policy on the answers' tokens, which costs a pass over the logits."""

    def __post_init__(self) -> None:
        _require_meant("cpo", self)

    def make_loss(self) -> Loss:
        """The loss. Raises ConfigError for what has no meaning."""
        return cpo(
            self.beta,
            self.loss,
            label_smoothing=self.label_smoothing,
            sft_weight=self.sft_weight,
            entropy=self.entropy,
        )
