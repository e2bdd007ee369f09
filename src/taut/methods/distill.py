"""Distillation on fixed data: the student learns the teacher's distribution at each target.

The section ``[distill]`` is shared with ``taut gkd`` (methods/teacher.py).
"""

from __future__ import annotations

from typing import ClassVar

from taut.config import configclass
from taut.losses.loss import Loss
from taut.methods.aux_models import AuxModels
from taut.methods.method import MethodName, RunConfig
from taut.methods.teacher import DistillConfig
from taut.train.optim import DefaultRates


@configclass
class Distill(RunConfig):
    """A run of ``taut distill``."""

    learning_rates: ClassVar[DefaultRates] = DefaultRates(
        2e-5, 2e-4, "TRL; tinker-cookbook with LoRA: 1e-4 to 1e-3"
    )

    method: MethodName = "distill"
    distill: DistillConfig = DistillConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.distill.require_teacher(self.model, has_eval=bool(self.data.eval))

    def loss(self) -> Loss:
        return self.distill.make_loss()

    def models(self) -> AuxModels:
        return AuxModels(teacher=self.distill)
