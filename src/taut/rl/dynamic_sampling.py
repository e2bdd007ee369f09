"""Dynamic sampling: groups from which nothing can be learned are replaced by other prompts (DAPO, arXiv 2503.14476).

``rollout.dynamic_sampling_rounds`` sets how often. The replacements are a function of the seed, the rollout and the
round, so that a restart needs no memory of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import numpy as np

from taut.rl.rollout import Group, Rollout, RolloutRequest, WrappedSource

TRIES = 8
"""Rounds of a rollout that needs a useful group."""


@dataclass(frozen=True)
class GroupChoice:
    """Which groups of a rollout are kept, and how many others are tried in place of the rest."""

    is_useful: Callable[[Group], bool] = lambda group: group.has_signal
    """Whether anything can be learned from a group."""
    rounds: int = 0
    """Rounds in which groups that are not useful are replaced."""
    needs_one: bool = False
    """Whether a rollout without a useful group cannot be trained on: then other prompts are tried whatever ``rounds``
    is."""

    @property
    def num_tries(self) -> int:
        """Maximum number of rounds after the first; 0: all groups are kept."""
        return max(self.rounds, TRIES if self.needs_one else 0)

    def keeps(self, group: Group) -> bool:
        """Whether a group is kept."""
        return not self.num_tries or self.is_useful(group)


@dataclass(eq=False)
class DynamicSampling(WrappedSource):
    """Takes rollouts of the inner source, one each round, until enough groups are kept."""

    choice: GroupChoice
    num_prompts: int
    """Prompts of the data."""
    seed: int

    def take(self, request: RolloutRequest) -> Rollout:
        request, prompts = request.resolved()
        num_wanted, seen = len(prompts), set[int]()
        rounds: list[Rollout] = []
        groups: list[Group] = []
        left_out: list[Group] = []
        for number in range(self.choice.num_tries + 1):
            rounds.append(self.inner.take(request))
            seen.update(rounds[-1].prompts)
            for group in rounds[-1].groups:
                (groups if self.choice.keeps(group) else left_out).append(group)
            num_missing = num_wanted - len(groups)
            if num_missing <= 0 or (number >= self.choice.rounds and groups):
                break
            # Ask prompts that this rollout has not asked yet.
            random = np.random.default_rng([self.seed, request.number, number, 1])
            prompts = other_prompts(random, self.num_prompts, seen)[:num_missing]
            if not prompts:
                break
            request = replace(request, prompts=prompts, num_replaced=0, round=number + 1)
        if not groups:  # a step has to have something
            groups, left_out = left_out, []
        return replace(
            rounds[0],
            groups=groups,
            left_out=left_out,
            seconds_generating=sum(one.seconds_generating for one in rounds),
            seconds_judging=sum(one.seconds_judging for one in rounds),
            lost=(sum(one.lost[0] for one in rounds), max(one.lost[1] for one in rounds)),
        )


def other_prompts(
    random: np.random.Generator, num_prompts: int, seen: Collection[int]
) -> list[int]:
    """Return the indices of the prompts that are not in ``seen``, shuffled."""
    return [index for index in random.permutation(num_prompts).tolist() if index not in seen]
