"""Rejection sampling (RAFT, arXiv 2304.06767): the best of several answers to a prompt, learned as they are. Which
answers those are is in rl/advantages.py.
"""

from __future__ import annotations

from typing import ClassVar

from taut.config import configclass
from taut.errors import ConfigError
from taut.methods.method import MethodName
from taut.methods.online import OnlineMethod
from taut.rl.advantages import Best, BestOfNConfig
from taut.train.optim import DefaultRates


@configclass
class BestOfN(OnlineMethod):
    """A run of ``taut best-of-n``."""

    learning_rates: ClassVar[DefaultRates] = DefaultRates(
        2e-5, 2e-4, "as taut sft, whose loss it is"
    )

    method: MethodName = "best_of_n"
    best_of_n: BestOfNConfig = BestOfNConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best_of_n.keep > self.rollout.n:
            raise ConfigError(
                f"best_of_n.keep={self.best_of_n.keep} and rollout.n={self.rollout.n}; expected to keep at most as "
                "many as there are; raise rollout.n"
            )
        config = self.best_of_n
        if self.rollout.refills and config.at_least is None and config.overlong == "keep":
            raise ConfigError(
                f"rollout.refills={self.rollout.refills} replaces prompts without an answer that may be learned, and "
                "with best_of_n.overlong=keep and no best_of_n.at_least every answer may; set that, or take "
                "rollout.refills out"
            )

    def make_credit(self) -> Best:
        return Best(self.loss(), self.best_of_n)
