"""Kahneman-Tversky optimisation (KTO, arXiv 2402.01306) and its variants: single answers labelled good or bad, against
a reference. The formulas are in losses/preference.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from taut.config import Positive, configclass
from taut.data.schema import Kind
from taut.errors import ConfigError
from taut.losses.preference import Unpaired, UnpairedVariant
from taut.methods.aux_models import AuxModels
from taut.methods.method import MethodName, RunConfig
from taut.methods.reference import ReferenceConfig
from taut.train.optim import DefaultRates


@configclass
class KtoConfig:
    """KTO and its variants, on single answers labelled good or bad."""

    beta: Positive = 0.1
    """Scale of the implicit reward, beta * log-ratio: a larger value keeps the policy closer to the
    reference."""
    loss: UnpairedVariant = "kto"
    """kto, bco or apo_zero (which has no reference point)."""
    desirable_weight: Positive = 1.0
    """Weight of answers labelled good."""
    undesirable_weight: Positive = 1.0
    """Weight of answers labelled bad. The paper recommends a ratio of 1 to 4/3 between (weight times number of good
    answers) and the same product of bad ones."""
    log_entropy: bool = False
    """Log the entropy of the policy on the answers' tokens, which costs one more pass over the logits."""

    def make_loss(self) -> Unpaired:
        """The loss."""
        return Unpaired(
            variant=self.loss,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
            entropy=self.log_entropy,
        )


@configclass
class Kto(RunConfig):
    """A run of ``taut kto``."""

    learning_rates: ClassVar[DefaultRates] = DefaultRates(
        1e-6, 1e-5, "TRL, which advises 5e-7 to 5e-6"
    )
    row_kinds: ClassVar[Mapping[Kind, str]] = {"unpaired": ""}

    method: MethodName = "kto"
    kto: KtoConfig = KtoConfig()
    reference: ReferenceConfig = ReferenceConfig()

    @property
    def allows_noise(self) -> bool:
        return False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch.samples_per_step < 2 and self.loss().observes:
            raise ConfigError(
                f"batch.samples_per_step=1 with kto.loss={self.kto.loss}: its reference point is taken over the "
                "samples of a step; expected 2 or more; raise it, or set kto.loss=apo_zero"
            )
        if self.loss().mismatched and self.reference.file is not None:
            raise ConfigError(
                f"reference.file={self.reference.file} and kto.loss={self.kto.loss} contradict each other: its "
                "reference point is taken over prompts with each other's answers, which differ from step to step and "
                "are in no file; take reference.file out, or set kto.loss=bco"
            )

    def loss(self) -> Unpaired:
        return self.kto.make_loss()

    def models(self) -> AuxModels:
        return AuxModels(self.reference)
