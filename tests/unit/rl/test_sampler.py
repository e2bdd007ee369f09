"""Episodes: the sampled ids and nothing else are targets; what fails is kept apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.helpers.scripted_engines import FakeEngine

from taut.data.rows.prompts import PromptRow
from taut.errors import DataError
from taut.inference.settings import Sampling
from taut.rewards.reward_set import RewardResult
from taut.rewards.verifier import Score
from taut.rl.sampler import sample_trajectories
from taut.rl.worker import add_environment_rewards, reward_input_of


def row(name: str, ids: list[int]) -> PromptRow:
    messages = ({"role": "user", "content": name},)
    return PromptRow(name, name, np.array(ids), messages, ("5",), "answer", {"answer": "5"})


def test_episodes_in_the_order_of_rows_and_samples() -> None:
    engine = FakeEngine(lambda name, index: f"{name} says {index}")
    found = sample_trajectories(engine, [row("a", [7, 8]), row("b", [9])], Sampling(n=2))
    assert [(e.row.id, e.index, e.text) for e in found] == [
        ("a", 0, "a says 0"),
        ("a", 1, "a says 1"),
        ("b", 0, "b says 0"),
        ("b", 1, "b says 1"),
    ]
    assert found[0].ids_T.tolist() == [7, 8, 1, 2, 3, 4]
    assert found[0].sampled_at_N.tolist() == [2, 3, 4, 5]
    assert found[2].sampled_at_N.tolist() == [1, 2, 3, 4]
    assert found[0].messages == ({"role": "assistant", "content": "a says 0"},)
    assert {e.finish_reason for e in found} == {"stop"}


def test_what_was_cut_or_failed_says_so() -> None:
    reasons = {"long": "length", "bad": "error", "fine": "stop"}
    engine = FakeEngine(lambda name, index: name, finish=lambda text: reasons[text])
    found = sample_trajectories(engine, [row(name, [1]) for name in reasons], Sampling())
    assert [(e.finish_reason, e.error) for e in found] == [
        ("length", None),
        ("error", "the server went away"),
        ("stop", None),
    ]


def test_rewards_are_told_what_was_asked_and_the_path_up_to_its_last_turn() -> None:
    (found,) = sample_trajectories(
        FakeEngine(lambda name, index: "Paris"), [row("a", [1])], Sampling()
    )
    assert reward_input_of(found).prompt == found.row.prompt
    asked: tuple[dict[str, Any], ...] = ({"role": "user", "content": "What did reset say?"},)
    turn = {"role": "assistant", "content": "Paris"}
    told = {"role": "user", "content": "Right."}
    for messages in [(turn,), (turn, told), (turn, told, turn, told, told), ()]:
        path = reward_input_of(replace(found, first_messages=asked, messages=messages))
        assert path.prompt == asked
        assert path.messages == messages[: 3 if len(messages) > 2 else 1]


@pytest.mark.parametrize("name", ["numeric", "kept"])
def test_an_environments_reward_has_a_name_of_its_own(name: str) -> None:
    (found,) = sample_trajectories(
        FakeEngine(lambda name, index: "Paris"), [row("a", [1])], Sampling()
    )
    said = RewardResult({"numeric": Score(0.0)}, 0.0)
    assert add_environment_rewards(said, replace(found, rewards={"own": 1.0})).total == 1.0
    with pytest.raises(DataError, match=f"a: the environment gives the reward '{name}'"):
        add_environment_rewards(said, replace(found, rewards={name: 1.0}))
