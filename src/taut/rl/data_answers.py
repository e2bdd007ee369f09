"""Prompts of a rollout that keep the answers of the data, next to those that the policy answers (GKD's lambda, arXiv
2306.13649).

Which prompts those are is a function of the seed and of their place in the order of prompts. So a rollout has as many
whatever is in flight: with rollout.lag, too, their answers join the rollout whose place in the order is theirs, and the
policy is asked for the others alone, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from taut.data.prompts import PromptRow, PromptSet
from taut.rewards.panel import Verdict
from taut.rl.rollout import Group, distinct
from taut.rl.sampler import Trajectory

FROM_DATA = -1
"""The index of a trajectory that is the data's answer: no completion of the row has it."""


@dataclass(frozen=True, eq=False)
class DataAnswers:
    """The data's answers to some of the prompts."""

    prompts: PromptSet
    lmbda: float
    """The share of the others."""
    seed: int

    def are_own(self, phase: int, num_prompts: int) -> list[bool]:
        """Whether the policy answers each prompt of a phase."""
        drawn = np.random.default_rng([self.seed, phase, 4]).random(num_prompts)
        return [bool(number < self.lmbda) for number in drawn]

    def groups(self, phase: int, indices: Sequence[int]) -> list[Group]:
        """The answers to the prompts of a phase, ``indices``, that the policy does not answer."""
        are_own = self.are_own(phase, len(indices))
        kept = [index for index, is_own in zip(indices, are_own, strict=True) if not is_own]
        rows = distinct([self.prompts.prompt_rows[index] for index in kept])
        return [self._answer(row, phase) for row in rows]

    def _answer(self, row: PromptRow, phase: int) -> Group:
        """The data's answer as a trajectory of its own number."""
        sample, size = self.prompts.answers[row.place], self.prompts.answers[row.place].num_targets
        nothing_N = np.full(size, np.nan)
        ids_T, at_N = sample.ids_T, sample.target_at_N
        return Group(
            (
                Trajectory(
                    row=row,
                    index=FROM_DATA,
                    ids_T=ids_T,
                    sampled_at_N=at_N,
                    logp_N=nothing_N,
                    version_N=np.zeros(size, dtype=np.int64),
                    finish_reason="stop",
                    text="",
                    media=sample.media,
                    rollout=phase,
                    verdict=Verdict({}, 0.0),
                ),
            )
        )
