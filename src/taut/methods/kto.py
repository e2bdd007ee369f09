"""Kahneman-Tversky optimization (KTO, arXiv 2402.01306) and its variants: single answers labeled good or bad, against
a reference. The formulas are in losses/preference.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, ClassVar

from taut.config import configclass
from taut.data.settings import Kind
from taut.losses.settings import KtoConfig
from taut.methods.method import MethodName, RunConfig
from taut.methods.settings import ReferenceConfig
from taut.train.settings import DefaultRates

if TYPE_CHECKING:
    from taut.losses.loss import Loss
    from taut.methods.aux_models import AuxModels


@configclass
class Kto(RunConfig):
    """A run of ``taut kto``."""

    learning_rates: ClassVar[DefaultRates] = DefaultRates(
        1e-6, 1e-5, "TRL, which advises 5e-7 to 5e-6"
    )
    row_kinds: ClassVar[Mapping[Kind, str]] = {"unpaired": ""}

    method: MethodName = "kto"
    kto: KtoConfig = field(default_factory=KtoConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)

    @property
    def allows_noise(self) -> bool:
        return False

    rules: ClassVar[str] = """
        batch.samples_per_step=1 excludes kto.loss!=apo_zero: its reference point is taken over the samples of a step;
            expected 2 or more; raise `batch.samples_per_step`, or set `kto.loss`=apo_zero
        reference.file excludes kto.loss=kto: its reference point is taken over prompts with each other's answers, which
            differ from step to step and are in no file
        data.streaming=true[is_stream] excludes reference.file: the file has the logprobs of all rows
    """

    def loss(self) -> Loss:
        from taut.losses.preference import KtoLoss

        return KtoLoss.of(self.kto)

    def models(self) -> AuxModels:
        from taut.methods.aux_models import AuxModels

        return AuxModels(self.reference)
