"""The keys of losses. Imports no torch.

A section of a run, such as ``[dpo]``, is the base class of its loss: ``DpoLoss(DpoConfig, PairLoss)`` in preference.py
adds the maths to the keys and reads them by their names. A run holds the section; ``DpoLoss.of(section)`` is its loss.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from taut.config import NotNegative, Positive, configclass
from taut.conflicts import conflict

RouterLossKind = Literal["pooled", "per_layer"]
KlValue: TypeAlias = Literal["k1", "k2", "k3"]
KlGradient: TypeAlias = Literal["k2", "k3"]
CorrectionKind: TypeAlias = Literal["none", "truncated", "masked"]
CorrectionLevel: TypeAlias = Literal["token", "sequence", "geometric"]
Average: TypeAlias = Literal["token", "sequence", "constant"]
MislabeledShare: TypeAlias = Annotated[float, Field(ge=0, lt=0.5)]
"""Half of the pairs or more: the loss would turn all of them round."""

# -- pairs -----------------------------------------------------------------------------------------

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
"""The names of ``VARIANTS`` in preference.py, to which a test holds them."""


@configclass
class DpoConfig:
    """DPO and its family, on pairs."""

    beta: Positive = 0.1
    """Scale of the implicit reward, beta * log-ratio: a larger value keeps the policy closer to the
    reference. IPO's tau."""
    loss: DpoVariant | list[DpoVariant] = "sigmoid"
    """Loss of a pair, by the name of its paper (sigmoid is DPO, hinge is SLiC); for a list, the weighted sum (MPO)."""
    loss_weights: list[Positive] | None = None
    """One weight for each entry of loss; each is 1 if not set."""
    sft_weight: NotNegative = 0.0
    """Weight of the mean negative log-probability of the preferred answers' tokens (RPO, MPO)."""
    label_smoothing: MislabeledShare = 0.0
    """Assumed probability, below 0.5, that a pair is labeled the wrong way round: for sigmoid (cDPO), robust, exo (its
    epsilon), aot."""
    length_normalized: bool = False
    """Divide each answer's log-ratio by its number of tokens; ipo always does so."""
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    """Divergence from the reference that is penalized (f-DPO): reverse_kl (plain DPO), forward_kl, js or alpha."""
    alpha: Annotated[float, Field(gt=0, lt=1)] | None = None
    """For divergence=alpha: near 0 it is reverse_kl, near 1 forward_kl; 0.5 if not set."""
    margin: NotNegative = 0.0
    """Weight of the data's margin, which is subtracted from the difference of a pair's rewards (ODPO). 0: margins are
    not read."""
    discopop_tau: Annotated[float, Field(gt=0, le=1)] | None = None
    """For loss=discopop: temperature of the transition between its two branches; 0.05 if not set, as in the paper.
    Above 1 its exponential would grow where x is negative."""
    reference_free: bool = False
    """Compare the log-probabilities themselves, without a reference."""
    log_entropy: bool = False
    """Log the entropy of the policy on the answers' tokens, which costs one more pass over the logits."""

    rules: ClassVar[str] = """
        alpha needs divergence=alpha
        discopop_tau needs loss=discopop
        margin divergence reference_free=true excludes loss=nca|bco|sppo|apo_zero|apo_down|aot|aot_unpaired: it takes
            the two answers one by one, not their difference
        reference_free=true excludes divergence=forward_kl|js: there is no reference to diverge from
        label_smoothing needs loss=sigmoid|robust|exo|aot|aot_unpaired
        loss=exo needs label_smoothing: it is infinite without one; expected more than 0; set `label_smoothing`=0.001,
            as in the paper
    """

    def __post_init__(self) -> None:
        if not self.names or len(set(self.names)) < len(self.names):
            why = "the terms of a sum are named by their losses"
            raise conflict(self, "loss", why, "expected one or more, each once; name those")
        if self.loss_weights is not None and len(self.loss_weights) != len(self.names):
            why = f"{len(self.loss_weights)} weights for {len(self.names)} terms"
            raise conflict(self, "loss_weights loss", why, "expected one each; give as many")

    @property
    def names(self) -> list[DpoVariant]:
        """The losses whose sum it is."""
        return self.loss if isinstance(self.loss, list) else [self.loss]


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
    label_smoothing: MislabeledShare = 0.0
    """Assumed probability, below 0.5, that a pair is labeled the wrong way round."""
    sft_weight: NotNegative = 0.0
    """Weight of the mean negative log-probability of the preferred answers' tokens."""
    log_entropy: bool = False
    """Log the entropy of the policy on the answers' tokens, which costs one more pass over the logits."""


@configclass
class CpoConfig:
    """CPO: DPO with a uniform reference and fine-tuning on preferred answers, on pairs."""

    beta: Positive = 0.1
    """Scale of the implicit reward, beta * log-probability."""
    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """sigmoid, hinge, or ipo (on log-probabilities per token)."""
    sft_weight: NotNegative = 1.0
    """Weight of the mean negative log-probability of the preferred answers' tokens."""
    label_smoothing: MislabeledShare = 0.0
    """Assumed probability, below 0.5, that a pair is labeled the wrong way round."""
    log_entropy: bool = False
    """Log the entropy of the policy on the answers' tokens, which costs one more pass over the logits."""

    rules: ClassVar[str] = "label_smoothing needs loss=sigmoid"


@configclass
class OrpoConfig:
    """ORPO: fine-tuning on preferred answers with an odds ratio against the others, on pairs, without a reference."""

    beta: Positive = 0.1
    """Weight of the odds-ratio term relative to the fine-tuning term: the paper's lambda."""
    log_entropy: bool = False
    """Log the entropy of the policy on the answers' tokens, which costs one more pass over the logits."""


# -- single answers --------------------------------------------------------------------------------


@configclass
class KtoConfig:
    """KTO and its variants, on single answers labeled good or bad."""

    beta: Positive = 0.1
    """Scale of the implicit reward, beta * log-ratio: a larger value keeps the policy closer to the
    reference."""
    loss: Literal["kto", "bco", "apo_zero"] = "kto"
    """kto, bco or apo_zero (which has no reference point)."""
    desirable_weight: Positive = 1.0
    """Weight of answers labeled good."""
    undesirable_weight: Positive = 1.0
    """Weight of answers labeled bad. The paper recommends a ratio of 1 to 4/3 between weight times number of good
    answers and weight times number of bad answers."""
    log_entropy: bool = False
    """Log the entropy of the policy on the answers' tokens, which costs one more pass over the logits."""


# -- reward models ---------------------------------------------------------------------------------


@configclass
class RewardConfig:
    """A reward model."""

    loss: Literal["bradley_terry", "regression", "process"] = "bradley_terry"
    """bradley_terry: on pairs, the better answer gets the higher score; regression: on answers with a score; process:
    on answers whose steps are labeled."""
    margin: NotNegative = 0.0
    """Weight of the data's margin, which the difference of a pair's scores has to exceed. 0: margins are not read."""
    centering_coef: NotNegative = 0.0
    """Weight of the squared sum of a pair's scores, which keeps scores centered at 0; differences alone do not."""
    bias: bool = False
    """Whether the head has a bias. Transformers then loads the model with AutoModelForTokenClassification."""

    rules: ClassVar[str] = """
        margin centering_coef needs loss=bradley_terry: only differences of scores have one
        bias=true needs centering_coef where loss=bradley_terry: it cancels in differences of scores, and never trains
    """


# -- a teacher -------------------------------------------------------------------------------------


@configclass
class DivergenceConfig:
    """The divergence from a teacher, and the cross entropy beside it."""

    divergence: Literal["forward", "reverse", "js"] = "forward"
    """forward: KL(teacher || student), mode-covering; reverse: KL(student || teacher), mode-seeking; js: the
    generalized Jensen-Shannon divergence."""
    beta: Annotated[float, Field(gt=0, lt=1)] | None = None
    """For divergence=js: the teacher's share of the mixture. Near 0 it acts as forward, near 1 as reverse; 0.5 if not
    set."""
    temperature: Positive = 1.0
    """Divisor of both models' logits; the term is multiplied by its square, which keeps the scale of gradients."""
    tail: Literal["bucket", "renormalize"] | None = None
    """For a list of likeliest tokens: treatment of tokens that are not listed. bucket (if not set): one more outcome
    for all of them together; renormalize: ignored, and the listed probabilities are normalized to 1."""
    sft_weight: NotNegative = 0.0
    """Weight of the cross-entropy on the data's own tokens, added to the divergence."""

    rules: ClassVar[str] = """
        beta needs divergence=js
        tail=renormalize needs divergence=forward: where the teacher has nothing, another divergence is infinite
    """
