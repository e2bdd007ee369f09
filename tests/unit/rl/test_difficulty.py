"""Prompts whose last group taught nothing are asked less often."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from tests.unit.rl.test_online_method import online
from tests.unit.rl.test_rollout_groups import rows

from taut.rewards.reward_set import RewardResult
from taut.rl.difficulty import DifficultyFilter, Record
from taut.rl.online import made_up_trajectory
from taut.rl.rollout import Group, Rollout, RolloutSource, RolloutState

COUNT = 8


def known(*silent: int, probability: float = 0.75) -> DifficultyFilter:
    """All prompts were asked; these taught nothing."""
    records = {index: Record(1.0, index not in silent) for index in range(COUNT)}
    return DifficultyFilter(
        RolloutSource(), probability, 3, rows(COUNT), RolloutState(difficulty=records)
    )


def group(index: int, *rewards: float | None) -> Group:
    answers = [
        made_up_trajectory(rows(COUNT)[index], number, np.array([5]), 0.0)
        for number, _ in enumerate(rewards)
    ]
    return Group(
        tuple(
            replace(answer, reward_result=RewardResult({}, reward))
            for answer, reward in zip(answers, rewards, strict=True)
        )
    )


def test_a_prompt_that_teaches_is_asked_at_its_turn() -> None:
    difficulty = known(2, 3)
    assert [difficulty.choose(place, 4, [4]) for place in range(50)] == [4] * 50
    new = DifficultyFilter(RolloutSource(), 0.75, 3, rows(COUNT), RolloutState())
    assert [new.choose(place, 4, [4]) for place in range(50)] == [4] * 50


def test_another_is_asked_with_the_given_probability() -> None:
    """400 turns at 0.75: 300, give or take 4 standard deviations of 8.7."""
    difficulty = known(2, 3)
    chosen = [difficulty.choose(place, 2, [2, 5]) for place in range(400)]
    assert abs(sum(index != 2 for index in chosen) - 300) < 35
    assert set(chosen) == {
        0,
        1,
        2,
        4,
        6,
        7,
    }  # neither what is asked already nor what teaches nothing
    assert chosen == [known(2, 3).choose(place, 2, [2, 5]) for place in range(400)]
    never = known(2, 3, probability=0.0)
    assert {never.choose(place, 2, [2]) for place in range(50)} == {2}


def test_where_nothing_teaches_the_prompt_is_asked_after_all() -> None:
    difficulty = known(*range(COUNT))
    assert {difficulty.choose(place, 2, [2]) for place in range(20)} == {2}


def test_the_last_group_counts() -> None:
    difficulty = DifficultyFilter(RolloutSource(), 0.5, 3, rows(COUNT), RolloutState())
    again = replace(group(4, 1.0, 1.0).trajectories[0].row, id="p:4 again 1")
    second = group(4, 1.0, 0.0)
    second = Group(tuple(replace(t, row=again) for t in second.trajectories))
    difficulty.commit(Rollout([group(1, 0.0, 0.0, 0.0), group(4, 1.0, 1.0), second]), [])
    assert difficulty.state.difficulty == {1: Record(0.0, False), 4: Record(0.5, True)}
    assert [it.has_signal for it in difficulty.state.difficulty.values()].count(False) == 1
    difficulty.commit(Rollout([group(1, 0.0, 1.0, None)]), [])
    assert difficulty.state.difficulty[1] == Record(0.5, True)


@pytest.mark.parametrize("rewards", [(None, None), (1.0, None)])
def test_a_group_with_fewer_than_two_rewards_says_nothing(
    rewards: tuple[float | None, ...],
) -> None:
    difficulty = DifficultyFilter(RolloutSource(), 0.5, 3, rows(COUNT), RolloutState())
    difficulty.commit(Rollout([group(1, *rewards)]), [])
    assert difficulty.state.difficulty == {}


def test_without_the_filter_nothing_is_noted() -> None:
    filtered, plain = online(difficulty_filter=0.5, n=2), online(n=2)
    for method in (filtered, plain):
        cast(Any, method.prompts).prompt_rows = rows(COUNT)
        method.prepare(1)
    assert len(filtered.remember()["difficulty"]) == 2
    assert plain.remember()["difficulty"] == []
