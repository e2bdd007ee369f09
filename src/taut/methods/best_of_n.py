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
from taut.rl.advantages import Credit, TrainSample
from taut.rl.rollout import Group, ModelScores, sample_of
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
        return bool(self._best(group))

    def _best(self, group: Group) -> list[Trajectory]:
        """The answers that are learned."""
        least, keeps_cut = self.config.min_reward, self.config.overlong == "keep"
        good = [
            trajectory
            for trajectory in group.rewarded
            if (keeps_cut or not trajectory.is_cut)
            and (least is None or trajectory.reward >= least)
        ]
        return sorted(good, key=lambda trajectory: -trajectory.reward)[: self.config.keep]

    def assign(
        self, groups: Sequence[Group], scores: ModelScores
    ) -> tuple[list[TrainSample], dict[str, float]]:
        chosen = [best for group in groups if (best := self._best(group))]
        if not chosen:
            raise CheckFailed(
                self._why_nothing([t for group in groups for t in group.trajectories])
            )
        rewards = [trajectory.reward for best in chosen for trajectory in best]
        metrics = {"kept": float(len(rewards)), "reward_kept": float(np.mean(rewards))}
        return [TrainSample.of([(t, sample_of(t)) for t in best]) for best in chosen], metrics

    def _why_nothing(self, trajectories: Sequence[Trajectory]) -> str:
        """Why no answer of a rollout can be learned."""
        drops_cut = self.config.overlong == "drop"
        candidates = [t for t in trajectories if not (drops_cut and t.is_cut)]
        if not candidates:
            return (
                f"all {len(trajectories)} completions of a rollout were cut, and best_of_n.overlong=drop leaves those "
                "out; expected some that end; raise rollout.max_new_tokens, or set best_of_n.overlong=keep"
            )
        best = max(trajectory.reward for trajectory in candidates)
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
