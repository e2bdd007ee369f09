"""Online DPO (arXiv 2402.04792): the best and the worst of several answers to a prompt are a preference pair.

The section ``[dpo]`` is shared with ``taut dpo`` (losses/settings.py).
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from taut.config import configclass
from taut.losses.settings import DpoConfig
from taut.methods.method import MethodName
from taut.methods.online import OnlineMethod
from taut.methods.settings import STREAM, ReferenceConfig
from taut.rl.settings import RolloutConfig
from taut.train.settings import DefaultRates

if TYPE_CHECKING:
    from taut.losses.loss import Loss
    from taut.methods.aux_models import AuxModels
    from taut.rl.credits import PairCredit


@configclass
class PairsRollout(RolloutConfig):
    """Sampling of completions, and the number of steps that train on a rollout."""

    n: Annotated[int, Field(ge=2)] = 2
    """Completions per prompt; the best and the worst form a pair."""


@configclass
class OnlineDpo(OnlineMethod):
    """A run of ``taut online-dpo``."""

    learning_rates: ClassVar[DefaultRates] = DefaultRates(5e-7, 5e-6, "TRL; open-instruct: 8e-7")

    method: MethodName = "online_dpo"
    rollout: PairsRollout = field(default_factory=PairsRollout)
    dpo: DpoConfig = field(default_factory=DpoConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)

    rules: ClassVar[str] = """
        reference.file unread: a file has no logprobs of completions that are yet to be generated
        reference excludes dpo.reference_free=true: nothing is compared with it
    """

    def loss(self) -> Loss:
        from taut.losses.preference import DpoLoss

        return DpoLoss.of(self.dpo)

    def models(self) -> AuxModels:
        from taut.methods.aux_models import AuxModels

        return AuxModels(self.reference if STREAM in self.loss().needs else None)

    def make_credit(self) -> PairCredit:
        from taut.rl.credits import PairCredit

        return PairCredit(self.loss())
