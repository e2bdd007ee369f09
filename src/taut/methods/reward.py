"""Reward models: a scalar head on a language model. The formulas and their papers are in losses/reward.py, the head
is in models/{heads,reward_model}.py.

    bradley_terry   pairs of answers (data of the kind preference); one score at the end of each
    regression      answers with a score (scored); one score at the end
    process         answers in steps with a label each (stepwise); a score at the end of each step
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from taut.config import NotNegative, configclass
from taut.data.schema import Kind
from taut.errors import ConfigError
from taut.losses.loss import Loss
from taut.losses.reward import BradleyTerry, Process, Regression
from taut.methods.method import MethodName, RunConfig
from taut.models.reward_model import NewHead
from taut.train.optim import DefaultRates


@configclass
class RewardConfig:
    """A reward model."""

    loss: Literal["bradley_terry", "regression", "process"] = "bradley_terry"
    """bradley_terry: on pairs, the better answer gets the higher score; regression: on answers with a score; process:
    on answers whose steps are labelled."""
    margin: NotNegative = 0.0
    """Weight of the data's margin, which the difference of a pair's scores has to exceed. 0: margins are not read."""
    centering_coef: NotNegative = 0.0
    """Weight of the squared sum of a pair's scores, which keeps scores centred at 0; differences alone do not."""
    bias: bool = False
    """Whether the head has a bias. Transformers then loads the model with AutoModelForTokenClassification."""

    def __post_init__(self) -> None:
        if self.loss != "bradley_terry":
            for name in ("margin", "centering_coef"):
                if getattr(self, name):
                    raise ConfigError(
                        f"reward.{name}={getattr(self, name):g} would be ignored by reward.loss={self.loss}; "
                        "expected it with bradley_terry only; remove it"
                    )
        elif self.bias and not self.centering_coef:
            raise ConfigError(
                "reward.bias=true would never train: a bias cancels in differences of scores; expected a loss that "
                "sees the scores themselves; set reward.centering_coef, or remove it"
            )

    def make_loss(self) -> Loss:
        """The loss."""
        match self.loss:
            case "bradley_terry":
                return BradleyTerry(margin=self.margin, centring=self.centering_coef)
            case "regression":
                return Regression()
            case "process":
                return Process()


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
    reward: RewardConfig = RewardConfig()

    @property
    def allows_noise(self) -> bool:
        return False

    @property
    def row_kind(self) -> Kind:
        selected = f"reward.loss={self.reward.loss}"
        return next(kind for kind, setting in self.row_kinds.items() if setting == selected)

    def loss(self) -> Loss:
        return self.reward.make_loss()

    def new_head(self) -> NewHead:
        kind: Literal["process", "sequence"] = (
            "process" if self.reward.loss == "process" else "sequence"
        )
        return NewHead(kind, self.reward.bias, self.seed)
