"""Direct preference optimisation (DPO, arXiv 2305.18290) and its family, on pairs, against a reference.

The section ``[dpo]`` is shared with ``taut online-dpo`` (methods/preference.py); the formulas are in
losses/preference.py.
"""

from __future__ import annotations

from typing import ClassVar

from taut.config import configclass
from taut.errors import ConfigError
from taut.losses.loss import Loss
from taut.methods.aux_models import AuxModels
from taut.methods.method import MethodName
from taut.methods.preference import DpoConfig, PairMethod
from taut.methods.reference import STREAM, ReferenceConfig
from taut.train.optim import DefaultRates


@configclass
class Dpo(PairMethod):
    """A run of ``taut dpo``."""

    learning_rates: ClassVar[DefaultRates] = DefaultRates(
        1e-6, 1e-5, "TRL; with adapters TRL and tinker-cookbook; Tulu 3 and zephyr (7B, 8B): 5e-7"
    )

    method: MethodName = "dpo"
    dpo: DpoConfig = DpoConfig()
    reference: ReferenceConfig = ReferenceConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dpo.reference_free and self.reference != ReferenceConfig():
            raise ConfigError(
                "dpo.reference_free=true and settings of reference contradict each other: there is none; keep one"
            )

    def loss(self) -> Loss:
        return self.dpo.make_loss()

    def models(self) -> AuxModels:
        return AuxModels(self.reference if STREAM in self.loss().needs else None)
