"""Rejection sampling (RAFT, arXiv 2304.06767): fine-tuning on the best of several answers to a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from taut.config import configclass
from taut.errors import CheckFailed, ConfigError
from taut.losses import Loss
from taut.methods.method import MethodName
from taut.methods.online import OnlineMethod
from taut.rl.advantages import Credit, Credited, by_group, credited
from taut.rl.rollout import Group, Said, sample_of
from taut.rl.sampler import Trajectory
from taut.train.optim import DefaultRates


@configclass
class BestOfNConfig:
    """The choice of answers to train on."""

    keep: Annotated[int, Field(ge=1)] = 1
    """Number of answers to keep per prompt, the best first."""
    min_reward: float | None = None
    """Minimum reward of an answer; None: any."""
    overlong: Literal["drop", "keep"] = "drop"
    """drop: leave out truncated completions. keep: they are candidates like the others; where one is chosen, the model
    learns not to stop."""


class Best(Credit):
    """Rejection sampling: the best answers of each group with a sufficient reward; truncated ones only if kept."""

    needs_one = True

    def __init__(self, loss: Loss, config: BestOfNConfig) -> None:
        super().__init__(loss)
        self.config = config
        self.good = max(self.good, config.min_reward or 0.0)

    def is_useful(self, group: Group) -> bool:
        return any(
            score.total is not None and self._may_be_learned(trajectory, score.total)
            for trajectory, score in group.judged
        )

    def _may_be_learned(self, trajectory: Trajectory, reward: float) -> bool:
        is_whole = trajectory.finish_reason != "length" or self.config.overlong == "keep"
        return is_whole and (self.config.min_reward is None or reward >= self.config.min_reward)

    def trees(self, paths: Sequence[Trajectory], said: Said) -> Credited:
        made = []
        for group in by_group(paths).values():
            good = [path for path in group if self._may_be_learned(path, path.reward)]
            best = sorted(good, key=lambda path: -path.reward)[: self.config.keep]
            made += [(path, sample_of(path, path.name, has_reads=False)) for path in best]
        if not made:
            raise CheckFailed(self._nothing(paths))
        kept = float(np.mean([path.reward for path, _ in made]))
        return credited(made, {"kept": float(len(made)), "reward_kept": kept}, {})

    def _nothing(self, paths: Sequence[Trajectory]) -> str:
        """The error where a rollout has no answer to train on."""
        whole = [path for path in paths if not path.is_cut]
        if not whole and self.config.overlong == "drop":
            return (
                f"all {len(paths)} completions of a rollout were cut, and best_of_n.overlong=drop leaves those out; "
                "expected some that end; raise rollout.max_new_tokens, or set best_of_n.overlong=keep"
            )
        best = max(path.reward for path in (whole if self.config.overlong == "drop" else paths))
        return (
            f"no answer of a rollout has a reward of best_of_n.min_reward={self.config.min_reward:g}; the best has "
            f"{best:g}; expected some; lower it, raise rollout.n, or take easier prompts"
        )


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
        if (
            self.rollout.dynamic_sampling_rounds
            and config.min_reward is None
            and config.overlong == "keep"
        ):
            raise ConfigError(
                f"rollout.dynamic_sampling_rounds={self.rollout.dynamic_sampling_rounds} replaces prompts without "
                "an answer that may be learned, and with best_of_n.overlong=keep and no best_of_n.min_reward every "
                "answer may; set that, or take rollout.dynamic_sampling_rounds out"
            )

    def make_credit(self) -> Best:
        return Best(self.loss(), self.best_of_n)
