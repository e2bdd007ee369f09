"""Distillation on fixed data: the student learns the teacher's distribution at each target.

The section ``[distill]`` is shared with ``taut gkd`` (methods/teacher.py).
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, ClassVar

from taut.config import configclass
from taut.methods.method import MethodName, RunConfig
from taut.methods.settings import DistillConfig, require_another
from taut.train.settings import DefaultRates

if TYPE_CHECKING:
    from taut.losses.loss import Loss
    from taut.methods.aux_models import AuxModels


@configclass
class Distill(RunConfig):
    """A run of ``taut distill``."""

    learning_rates: ClassVar[DefaultRates] = DefaultRates(
        2e-5, 2e-4, "TRL; tinker-cookbook with LoRA: 1e-4 to 1e-3"
    )

    method: MethodName = "distill"
    distill: DistillConfig = field(default_factory=DistillConfig)

    rules: ClassVar[str] = """
        required distill.teacher distill.top_logprobs: there is nothing to learn from
        distill.top_logprobs needs distill.eval_top_logprobs where data.eval: the held-out data have no logprobs of the
            teacher; expected its file of them, made with taut teach; set it, or leave `data.eval` out
        distill.eval_top_logprobs needs data.eval
        data.streaming=true[is_stream] excludes distill.top_logprobs: the file has the teacher's logprobs of all rows
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        require_another(self, self.distill)

    def loss(self) -> Loss:
        from taut.losses.supervised import DistillLoss

        return DistillLoss.of(self.distill)

    def models(self) -> AuxModels:
        from taut.methods.aux_models import AuxModels

        return AuxModels(teacher=self.distill)
