"""Answers of the data in rollouts: some prompts keep the answer of their row, and the policy answers the others (GKD's
lambda, arXiv 2306.13649).

Which prompts these are is a function of the seed and of their draws. So a rollout has as many whatever is in flight:
with rollout.lag, too, the data's answers join the rollout of their draws, and the policy is asked the other draws, in
their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from taut.data.rows.prompts import PromptRow, PromptSet
from taut.inference.engine import Engine
from taut.inference.vllm import ServerEngine
from taut.rewards.reward_set import RewardResult
from taut.rl.rollout import Group, Rollout, RolloutRequest, WrappedSource, distinct
from taut.rl.sampler import Trajectory

FROM_DATA = -1
"""Index of a trajectory that is the data's answer; completions have 0 and more."""


@dataclass(eq=False)
class DataAnswers(WrappedSource):
    """Asks the inner source for a part of the prompts, and adds the data's answers to the others."""

    engine: Engine
    prompts: PromptSet
    policy_share: float
    """Share of the prompts that the policy answers."""
    seed: int

    def take(self, request: RolloutRequest) -> Rollout:
        number, size = request.number, request.order.samples_per_step

        def is_asked(draw: int) -> bool:
            of_rollout, place = divmod(draw, size)
            return are_asked(self.policy_share, self.seed, of_rollout, size)[place]

        # The policy is asked its part.
        if any(map(is_asked, range(number * size, (number + 1) * size))):
            rollout = self.inner.take(replace(request, is_asked=is_asked))
        else:  # a server that got the weights is asked nothing
            rollout = Rollout([])
            if isinstance(self.engine, ServerEngine):
                self.engine.rest()

        # The data answer the rest.
        planned = enumerate(request.order.step(number + 1), number * size)
        kept = [index for draw, index in planned if not is_asked(draw)]
        rows = distinct([self.prompts.prompt_rows[index] for index in kept])
        return replace(rollout, from_data=[self._answer(row, number) for row in rows])

    def _answer(self, row: PromptRow, number: int) -> Group:
        """Return the data's answer as a trajectory of its own."""
        sample = self.prompts.answers[row.place]
        size = sample.num_targets
        trajectory = Trajectory(
            row=row,
            index=FROM_DATA,
            ids_T=sample.ids_T,
            sampled_at_N=sample.target_at_N,
            logp_N=np.full(size, np.nan),
            version_N=np.zeros(size, dtype=np.int64),
            finish_reason="stop",
            text="",
            media=sample.media,
            rollout=number,
            reward_result=RewardResult({}, 0.0),
        )
        return Group((trajectory,))


@lru_cache(maxsize=64)  # it is asked for each draw
def are_asked(share: float, seed: int, number: int, num_prompts: int) -> Sequence[bool]:
    """Return whether the policy answers each prompt of a rollout."""
    drawn = np.random.default_rng([seed, number, 4]).random(num_prompts)
    return [bool(value < share) for value in drawn]
