"""Direct preference optimization (DPO, arXiv 2305.18290) and its family, on pairs, against a reference.

The section ``[dpo]`` is shared with ``taut online-dpo``; it is in losses/settings.py, the formulas are in
losses/preference.py.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, ClassVar

from taut.config import configclass
from taut.losses.settings import DpoConfig
from taut.methods.method import MethodName
from taut.methods.preference import PairMethod
from taut.methods.settings import STREAM, ReferenceConfig
from taut.train.settings import DefaultRates

if TYPE_CHECKING:
    from taut.losses.loss import Loss
    from taut.methods.aux_models import AuxModels


@configclass
class Dpo(PairMethod):
    """A run of ``taut dpo``."""

    learning_rates: ClassVar[DefaultRates] = DefaultRates(
        1e-6, 1e-5, "TRL; with adapters TRL and tinker-cookbook; Tulu 3 and zephyr (7B, 8B): 5e-7"
    )

    method: MethodName = "dpo"
    dpo: DpoConfig = field(default_factory=DpoConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)

    rules: ClassVar[str] = """
        reference excludes dpo.reference_free=true: there is none
        data.streaming=true[is_stream] excludes reference.file: the file has the logprobs of all rows
    """

    def loss(self) -> Loss:
        from taut.losses.preference import DpoLoss

        return DpoLoss.of(self.dpo)

    def models(self) -> AuxModels:
        from taut.methods.aux_models import AuxModels

        return AuxModels(self.reference if STREAM in self.loss().needs else None)
