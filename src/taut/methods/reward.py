"""Reward models: a scalar head on a language model. The formulas and their papers are in losses/reward.py, the head
is in models/{heads,reward_model}.py.

    bradley_terry   pairs of answers (data of the kind preference); one score at the end of each
    regression      answers with a score (scored); one score at the end
    process         answers in steps with a label each (stepwise); a score at the end of each step
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, ClassVar, Literal

from taut.config import configclass
from taut.data.settings import Kind
from taut.losses.settings import RewardConfig
from taut.methods.method import MethodName, RunConfig
from taut.models.settings import NewHead
from taut.train.settings import DefaultRates

if TYPE_CHECKING:
    from taut.losses.loss import Loss


@configclass
class Reward(RunConfig):
    """A run of ``taut reward``."""

    learning_rates: ClassVar[DefaultRates] = DefaultRates(
        1e-5, 1e-4, "OpenRLHF: 9e-6; Tulu 3 (8B): 3e-6; tinker-cookbook with LoRA: 3e-4"
    )
    row_kinds: ClassVar[Mapping[Kind, str]] = {
        "preference": "reward.loss=bradley_terry",
        "scored": "reward.loss=regression",
        "stepwise": "reward.loss=process",
    }

    method: MethodName = "reward"
    reward: RewardConfig = field(default_factory=RewardConfig)

    @property
    def allows_noise(self) -> bool:
        return False

    @property
    def row_kind(self) -> Kind:
        selected = f"reward.loss={self.reward.loss}"
        return next(kind for kind, setting in self.row_kinds.items() if setting == selected)

    def loss(self) -> Loss:
        from taut.losses.reward import BradleyTerry, Process, Regression

        match self.reward.loss:
            case "bradley_terry":
                return BradleyTerry.of(self.reward)
            case "regression":
                return Regression()
            case "process":
                return Process()

    def new_head(self) -> NewHead:
        kind: Literal["process", "sequence"] = (
            "process" if self.reward.loss == "process" else "sequence"
        )
        return NewHead(kind, self.reward.bias, self.seed)
