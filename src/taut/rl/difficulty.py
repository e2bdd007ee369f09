"""Difficulty filtering: prompts that teach nothing are asked less often. ``rollout.difficulty_filter``.

    record     the mean reward of a prompt's last group (its pass rate, where a reward is 0 or 1), and whether the
               group's rewards differed. If not, all answers were right or all wrong: nothing was learned
    choose     when the turn of such a prompt comes, another is asked in its place with probability
               ``difficulty_filter``: one whose last group's rewards differed, or that was never asked

The choice is a pure function of the seed, the draw and the records, which are state of the checkpoint. A prompt that is
passed over keeps its record, so it is asked again sooner or later: with probability 1 - ``difficulty_filter`` at each
of its turns.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Annotated, NamedTuple, TypeAlias

import numpy as np
from pydantic import BeforeValidator, Field

from taut.data.rows.prompts import PromptRow
from taut.rl.advantages import TrainSample, as_tuple
from taut.rl.rollout import Rollout, RolloutRequest, RolloutState, WrappedSource

TRIES = 100
"""Number of prompts that may take the place of another; if none of them teaches, that one is asked after all."""


class Record(NamedTuple):
    """The worth of a prompt's last group."""

    reward: float
    """The mean of its rewards."""
    has_signal: bool
    """Whether its rewards differed."""


KeptRecord: TypeAlias = Annotated[
    tuple[Annotated[int, Field(ge=0)], float, bool], BeforeValidator(as_tuple)
]
"""A record in a checkpoint: (index of the prompt, its fields)."""


@dataclass(eq=False)
class DifficultyFilter(WrappedSource):
    """Chooses prompts of the inner source's rollouts, and records what their groups were worth."""

    probability: float
    seed: int
    prompts: Sequence[PromptRow]
    state: RolloutState

    def take(self, request: RolloutRequest) -> Rollout:
        return self.inner.take(replace(request, choose=self.choose))

    def choose(self, draw: int, index: int, taken: Collection[int]) -> int:
        """Return the index of the prompt to ask where ``index`` has its turn. ``taken``: the prompts that are asked at
        the same time.
        """
        if self._teaches(index):
            return index
        random = np.random.default_rng([self.seed, draw, 4])
        if random.random() >= self.probability:
            return index
        for other in random.integers(0, len(self.prompts), TRIES).tolist():
            if other not in taken and self._teaches(other):
                return int(other)
        return index

    def commit(self, rollout: Rollout, samples: Sequence[TrainSample]) -> None:
        self.inner.commit(rollout, samples)
        new = {}
        for group in rollout.all_groups:
            rewards = [trajectory.reward for trajectory in group.rewarded]
            if len(rewards) > 1:  # a group with fewer says nothing
                new[self._index_of[group.row.place]] = Record(fmean(rewards), group.has_signal)
        self.state.difficulty = {**self.state.difficulty, **new}

    def _teaches(self, index: int) -> bool:
        record = self.state.difficulty.get(index)
        return record is None or record.has_signal

    @cached_property
    def _index_of(self) -> dict[str, int]:
        return {row.place: index for index, row in enumerate(self.prompts)}
