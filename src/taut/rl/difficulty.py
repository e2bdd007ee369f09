"""Difficulty filtering: prompts that teach nothing are asked less often. ``rollout.difficulty_filter``.

    record     the mean reward of a prompt's last group (its pass rate, where a reward is 0 or 1), and whether the
               group's rewards differed. If not, all answers were right or all wrong: nothing was learned
    choose     when the turn of such a prompt comes, another is asked in its place with probability
               ``difficulty_filter``: one whose last group's rewards differed, or that was never asked

The choice is a pure function of the seed, the place in the order of prompts and the records, which are state of the
checkpoint. A prompt that is passed over keeps its record, so it is asked again sooner or later: with probability
1 - ``difficulty_filter`` at each of its turns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Annotated, NamedTuple, TypeAlias

import numpy as np
from pydantic import BeforeValidator, Field

from taut.data.prompts import PromptRow
from taut.rl.advantages import as_tuple
from taut.rl.rollout import Group

TRIES = 100
"""Prompts that are looked at for one to ask in the place of another; then it is asked after all."""


class Record(NamedTuple):
    """What a prompt's last group says of it."""

    reward: float
    """The mean of its rewards."""
    has_signal: bool
    """Whether they differed."""


KeptRecord: TypeAlias = Annotated[
    tuple[Annotated[int, Field(ge=0)], float, bool], BeforeValidator(as_tuple)
]
"""A record in a checkpoint: (index of the prompt, its fields)."""


@dataclass(eq=False)
class Difficulty:
    """The records of a run's prompts."""

    probability: float
    seed: int
    prompts: Sequence[PromptRow]
    records: dict[int, Record] = field(default_factory=dict)
    """By the index of the prompt."""

    def choose(self, place: int, index: int, taken: Collection[int]) -> int:
        """The index of the prompt to ask where ``index`` has its turn. ``place``: in the order of prompts. ``taken``:
        the prompts that are asked at the same time.
        """
        if not self.probability or self._teaches(index):
            return index
        random = np.random.default_rng([self.seed, place, 4])
        if random.random() >= self.probability:
            return index
        for other in random.integers(0, len(self.prompts), TRIES).tolist():
            if other not in taken and self._teaches(other):
                return int(other)
        return index

    def record(self, groups: Iterable[Group]) -> None:
        """Note what these groups were worth. One with fewer than two rewards says nothing."""
        if not self.probability:
            return
        for group in groups:
            rewards = [trajectory.reward for trajectory in group.rewarded]
            if len(rewards) > 1:
                record = Record(fmean(rewards), group.has_signal)
                self.records[self._index_of[group.row.place]] = record

    @property
    def num_silent(self) -> int:
        """Prompts whose last group taught nothing."""
        return sum(not record.has_signal for record in self.records.values())

    def _teaches(self, index: int) -> bool:
        record = self.records.get(index)
        return record is None or record.has_signal

    @cached_property
    def _index_of(self) -> dict[str, int]:
        return {row.place: index for index, row in enumerate(self.prompts)}
