"""Rollouts: which prompts are asked, what is judged, and groups without a signal asked anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.scripted_engines import FakeEngine

from taut.config import from_mapping
from taut.data.order import Order
from taut.data.rows.prompts import PromptRow
from taut.errors import ConfigError, UserCodeError
from taut.rewards.reward_set import RewardResult
from taut.rewards.verifier import RewardInput, Score
from taut.rl.dynamic_sampling import DynamicSampling, GroupChoice
from taut.rl.rollout import Rollout, RolloutRequest, distinct
from taut.rl.settings import RolloutConfig
from taut.rl.worker import RolloutWorker, seed_of
from taut.train.distributed import Ranks
from taut.types import FinishReason


@dataclass
class RewardSet:
    """Says what it is told of each answer."""

    worth: Callable[[RewardInput], float | None]
    asked: list[RewardInput] = field(default_factory=list)

    def grade(self, answers: Sequence[RewardInput]) -> list[RewardResult]:
        self.asked += answers
        values = [self.worth(one) for one in answers]
        return [RewardResult({"worth": Score(value)}, value) for value in values]

    def close(self) -> None:
        pass


def rows(count: int) -> list[PromptRow]:
    return [
        PromptRow(f"p:{i}", f"p:{i}", np.array([i + 1, 2]), "", (str(i),), "answer", {"i": i})
        for i in range(count)
    ]


def worker(
    say: Callable[[str, int], str],
    worth: Callable[[RewardInput], float | None],
    finish: Callable[[str], FinishReason] = lambda text: "stop",
    **keys: int,
) -> tuple[RolloutWorker, FakeEngine, RewardSet]:
    engine, reward_set = FakeEngine(say, finish), RewardSet(worth)
    ranks = Ranks(0, 1, torch.device("cpu"))
    config = RolloutConfig(**{"n": 2, **keys})
    made = RolloutWorker(config, rows(8), engine, reward_set, None, 3, ranks)  # type: ignore[arg-type]
    return made, engine, reward_set


def rolled_out(made: RolloutWorker, prompts: Sequence[int], **choice: Any) -> Rollout:
    """The first rollout of a run with this worker, on these prompts."""
    choice = {"rounds": made.config.dynamic_sampling_rounds, **choice}
    source = DynamicSampling(made, GroupChoice(**choice), len(made.prompts), made.seed)
    return source.take(RolloutRequest(0, Order((8,), (1.0,), 3, 2), prompts=prompts))


def test_each_prompt_has_its_group_and_rewards_are_told_of_the_answer() -> None:
    made, engine, reward_set = worker(
        lambda name, index: f"{name} {index}", lambda one: len(one.text)
    )
    rolled = rolled_out(made, [5, 1])
    assert [group.row.id for group in rolled.groups] == ["p:5", "p:1"]
    assert [[one.index for one in group.trajectories] for group in rolled.groups] == [
        [0, 1],
        [0, 1],
    ]
    assert [prompt.id for prompt in engine.asked] == ["p:5", "p:1"]
    first = reward_set.asked[0]
    assert (first.text, first.references, first.row) == ("p:5 0", ("5",), {"i": 5})
    assert (first.num_tokens, first.finish_reason) == (3, "stop")


def test_groups_without_a_signal_are_replaced_by_prompts_not_asked_yet() -> None:
    def worth(one: RewardInput) -> float:
        return float(one.row["i"] > 3) * int(one.text)

    made, engine, _ = worker(lambda name, index: str(index), worth, dynamic_sampling_rounds=5)
    rolled = rolled_out(made, [0, 1, 6])
    assert len(rolled.groups) == 3
    assert all(group.row.columns["i"] > 3 for group in rolled.groups)
    assert all(group.row.columns["i"] <= 3 for group in rolled.left_out)
    names = [prompt.id for prompt in engine.asked]
    assert len(set(names)) == len(names)
    again, engine_again, _ = worker(
        lambda name, index: str(index), worth, dynamic_sampling_rounds=5
    )
    rolled_out(again, [0, 1, 6])
    assert [prompt.id for prompt in engine_again.asked] == names


def test_where_no_group_has_a_signal_they_are_trained_on_as_they_are() -> None:
    made, _, _ = worker(lambda name, index: "a", lambda one: 1.0, dynamic_sampling_rounds=1)
    rolled = rolled_out(made, [0, 1])
    assert len(rolled.groups) == 4 and not rolled.left_out
    assert not any(group.has_signal for group in rolled.groups)


def test_where_something_must_be_learned_others_are_asked_until_it_can_be() -> None:
    def worth(one: RewardInput) -> float:
        return float(one.row["i"] == 7) * int(one.text)

    made, engine, _ = worker(lambda name, index: str(index), worth)
    rolled = rolled_out(made, [0], needs_one=True)
    assert [group.row.columns["i"] for group in rolled.groups] == [7]
    assert len(engine.asked) == 1 + len(rolled.left_out) <= 8
    useful, _, _ = worker(lambda name, index: str(index), lambda one: 1.0)
    found = rolled_out(useful, [0, 1], needs_one=True, is_useful=lambda group: True)
    assert len(found.groups) == 2 and not found.left_out


def test_what_the_engine_could_not_complete_is_judged_by_nobody() -> None:
    made, _, reward_set = worker(
        lambda name, index: "bad" if index else "good",
        lambda one: 1.0,
        lambda text: "error" if text == "bad" else "stop",
    )
    (group,) = rolled_out(made, [0]).groups
    assert [one.text for one in reward_set.asked] == ["good"]
    assert [(one.index, one.reward) for one in group.rewarded] == [(0, 1.0)]


def test_a_reward_that_does_not_apply_leaves_the_path_out() -> None:
    made, _, _ = worker(
        lambda name, index: str(index), lambda one: None if one.text == "1" else 0.5
    )
    (group,) = rolled_out(made, [0]).groups
    assert [one.index for one in group.rewarded] == [0]
    assert not group.has_signal


def test_a_prompt_asked_twice_has_two_names_and_another_phase_draws_anew() -> None:
    twice = distinct([*rows(2), *rows(1)])
    assert [row.id for row in twice] == ["p:0", "p:1", "p:0 again 1"]
    seeds = {seed_of(0, phase, number) for phase in range(5) for number in range(3)}
    assert len(seeds) == 15


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"engine": "server"}, "expected urls="),
        (
            {"urls": "http://127.0.0.1:1/v1"},
            "urls=.* with engine=local: .*; expected engine=server",
        ),
        ({"lag": 1}, "engine=server"),
        (
            {
                "engine": "server",
                "urls": "http://127.0.0.1:1/v1",
                "oversample": 1,
                "environment": {"name": "agent:true"},
            },
            "oversample=1 with environment.name=agent:true: .*; leave oversample or environment.name out",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(keys: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        from_mapping(RolloutConfig, keys)


def test_an_age_that_nothing_can_have_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"max_staleness=9: .*; expected replay_groups; set it, or leave max_staleness out",
    ):
        from_mapping(RolloutConfig, {"max_staleness": 9})
    assert from_mapping(RolloutConfig, {"max_staleness": 9, "replay_groups": 1}).replay_groups == 1


@pytest.mark.parametrize("is_writer", [True, False])
def test_what_stops_the_judging_stops_every_rank(is_writer: bool) -> None:
    """Only the writer judges; the others would wait for it for ever."""
    told: list[object] = [UserCodeError("the reward worth returned 'good'")]

    class Two(Ranks):
        def gather(self, value: object) -> list[object]:
            return [value, None] if is_writer else [*told, value]

        def from_writer(self, value: Any) -> Any:
            return self.gather(value)[0]

    def worth(one: RewardInput) -> float:
        raise UserCodeError("the reward worth returned 'good'")

    made, _, _ = worker(lambda name, index: str(index), worth)
    ranked = replace(made, ranks=Two(0 if is_writer else 1, 2, torch.device("cpu")))
    with pytest.raises(UserCodeError, match="the reward worth returned 'good'"):
        rolled_out(ranked, [1])
