"""What a method trains on of a judged rollout: the best answers, all of them, or pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

import numpy as np

from taut.errors import CheckFailed
from taut.losses.loss import Loss
from taut.rl.advantages import Credit, TrainSample
from taut.rl.rollout import Group, ModelScores, sample_of
from taut.rl.sampler import Trajectory
from taut.types import Sample


class BestCredit(Credit):
    """Rejection sampling: the best answers of each group with a sufficient reward; truncated ones only if kept."""

    needs_one = True

    def __init__(self, loss: Loss, keep: int, min_reward: float | None, *, drops_cut: bool) -> None:
        """``keep``: maximum number of answers per prompt."""
        super().__init__(loss)
        self.keep, self.min_reward, self.drops_cut = keep, min_reward, drops_cut
        self.good = max(self.good, min_reward or 0.0)

    def is_useful(self, group: Group) -> bool:
        return bool(self._best(group))

    def _best(self, group: Group) -> list[Trajectory]:
        """The answers that are learned."""
        good = [
            trajectory
            for trajectory in group.rewarded
            if not (self.drops_cut and trajectory.is_cut)
            and (self.min_reward is None or trajectory.reward >= self.min_reward)
        ]
        return sorted(good, key=lambda trajectory: -trajectory.reward)[: self.keep]

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
        """Return why no answer of a rollout can be learned."""
        candidates = [t for t in trajectories if not (self.drops_cut and t.is_cut)]
        if not candidates:
            return (
                f"all {len(trajectories)} completions of a rollout were cut, and best_of_n.overlong=drop leaves those "
                "out; expected some that end; raise rollout.max_new_tokens, or set best_of_n.overlong=keep"
            )
        best = max(trajectory.reward for trajectory in candidates)
        return (
            f"no answer of a rollout has a reward of best_of_n.min_reward={self.min_reward:g}; the best has "
            f"{best:g}; expected some; lower it, raise rollout.n, or take easier prompts"
        )


class AllCredit(Credit):
    """Keep every answer unchanged: the teacher judges each token, while the student trains or, with its likeliest
    tokens as streams, before.
    """

    def __init__(self, loss: Loss, num_listed: int = 0) -> None:
        super().__init__(loss)
        self.num_listed = num_listed

    def assign(
        self, groups: Sequence[Group], scores: ModelScores
    ) -> tuple[list[TrainSample], dict[str, float]]:
        def sample(trajectory: Trajectory) -> Sample:
            streams = {name: scores[trajectory.name][name] for name in self.loss.needs}
            return replace(sample_of(trajectory), streams=streams)

        pairs_of_groups = [[(t, sample(t)) for t in group.trajectories] for group in groups]
        return [TrainSample.of(pairs) for pairs in pairs_of_groups], {}


class PairCredit(Credit):
    """Preference pairs of the best and the worst answer of each group."""

    needs_one = True

    def assign(
        self, groups: Sequence[Group], scores: ModelScores
    ) -> tuple[list[TrainSample], dict[str, float]]:
        reward_of = attrgetter("reward")
        pairs = []
        for group in groups:
            best = max(group.trajectories, key=reward_of)
            worst = min(group.trajectories, key=reward_of)
            if best.reward > worst.reward:
                compared = [
                    (t, replace(sample_of(t), values={"preference": t.reward, "margin": t.reward}))
                    for t in (best, worst)
                ]
                pairs.append(TrainSample.of(compared, is_atom=True))
        if not pairs:
            raise CheckFailed(
                "in no group of a rollout is one answer better than another, so there is no pair to learn from; "
                "expected rewards that differ; set rollout.dynamic_sampling_rounds, or take easier or harder prompts"
            )
        return pairs, {"pairs": float(len(pairs))}
