"""What is told of a rollout."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.helpers.scripted_engines import FakeEngine
from tests.unit.rl.test_advantages import trajectory

from taut.losses.supervised import CrossEntropy
from taut.rewards.reward_set import RewardResult
from taut.rewards.verifier import Score
from taut.rl.advantages import TrainSample
from taut.rl.credits import AllCredit
from taut.rl.monitors import best_and_worst, logged, push_event, rollout_event
from taut.rl.rollout import Group, Rollout, sample_of
from taut.rl.settings import EnvironmentConfig, RolloutConfig
from taut.types import Tree
from taut.vision.content import ImageRef


def group(name: str, *rewards: float | None) -> Group:
    trajectories = [
        trajectory(name, i, i + 1, "length" if i == 2 else "stop") for i in range(len(rewards))
    ]
    reward_results = [
        RewardResult({"r": Score(r), "other": Score()}, r)
        if r is not None
        else RewardResult({"r": Score(error="late")}, None)
        for r in rewards
    ]
    return Group(
        tuple(
            replace(t, reward_result=v) for t, v in zip(trajectories, reward_results, strict=True)
        )
    )


def rolled() -> Rollout:
    kept = (group("a", 1.0, 0.0, 0.5), group("b", 0.25, None))
    return Rollout(kept, (group("c", 0.0, 0.0),), 2.0, 0.5)


def event(
    found: Rollout,
    version: int = 6,
    config: RolloutConfig | None = None,
    *,
    is_judged: bool = True,
) -> dict[str, Any]:
    samples, metrics = AllCredit(CrossEntropy()).assign(found.rewarded, {})
    how = config or RolloutConfig()
    return rollout_event(found, samples, metrics, version, how, is_judged=is_judged)


def test_everything_that_was_generated_counts() -> None:
    told = event(rolled())
    assert told["reward"] == told["reward/r"] == pytest.approx(1.75 / 6)
    assert "reward/other" not in told
    assert (told["groups"], told["left_out"], told["completions"]) == (3, 1, 7)
    assert (told["errors"], told["first_error"]) == (1, "b#1: late")
    assert told["without_reward"] == 0
    assert told["stopped"] == pytest.approx(6 / 7)
    assert (told["tokens_max"], told["tokens_mean"]) == (3, pytest.approx(12 / 7))
    assert (told["staleness_mean"], told["staleness_max"]) == (2, 2)
    assert (told["seconds_generating"], told["seconds_judging"]) == (2.0, 0.5)
    assert [one["id"] for one in told["samples"]] == ["a#0 of rollout 1", "a#1 of rollout 1"]
    assert "turns_mean" not in told


def test_paths_that_no_reward_applies_to_are_counted() -> None:
    found = rolled()
    one = Group((replace(trajectory("d", 0, 2), reward_result=RewardResult({"r": Score()}, None)),))
    found = replace(found, left_out=(*found.left_out, one))
    told = event(found)
    assert (told["without_reward"], told["errors"], told["completions"]) == (1, 1, 8)
    assert told["rewarded"] == 6


def test_a_roll_out_without_a_reward_or_without_a_completion_has_no_means() -> None:
    told = event(Rollout((group("a", None, None),)))
    assert (told["rewarded"], told["completions"], told["stopped"]) == (0, 2, 1.0)
    assert "reward" not in told and told["samples"] == []
    lost = replace(trajectory("a", 0, 0), finish_reason="error", error="gone")
    told = event(Rollout((Group((lost,)),)))
    assert (told["rewarded"], told["errors"]) == (0, 1) and "stopped" not in told


def test_what_nobody_judges_has_no_reward() -> None:
    told = event(rolled(), 4, is_judged=False)
    assert not [name for name in told if name.startswith("reward")]
    assert "groups_with_signal" not in told


def test_turns_and_calls_of_an_environment() -> None:
    one = replace(trajectory("a", 0, 2), num_turns=3, num_calls=2, num_malformed_calls=1)
    found = Rollout((Group((replace(one, reward_result=RewardResult({}, 1.0)),)),))
    config = RolloutConfig(environment=EnvironmentConfig(name="own.py:Own"))
    told = event(found, 4, config)
    assert (told["turns_mean"], told["calls"], told["malformed_calls"]) == (3, 2, 1)


def test_the_best_and_the_worst_of_the_group_that_differs_most_are_logged() -> None:
    groups = [group("a", 0.5, 0.4), group("b", 0.1, 0.9, 0.3), group("c", 1.0)]
    best, worst = best_and_worst(Rollout(groups))
    assert (best.row.id, best.reward, worst.reward) == ("b", 0.9, 0.1)
    (only,) = best_and_worst(Rollout(groups[2:]))
    assert only.reward == 1.0


def test_a_path_is_shown_token_by_token() -> None:
    (path,) = group("a", 1.0).trajectories
    path = replace(path, rollout=2)
    unknown = replace(path, logp_N=np.array([math.nan]))
    sample = replace(sample_of(path), streams={"advantage_N": np.array([0.123456])})
    told = logged(unknown, [TrainSample(4, Tree((sample,)))])
    assert told["ids"] == [10] and math.isnan(told["logp"][0])
    assert told["advantage"] == [0.1235]
    assert told["rewards"] == {"r": 1.0, "other": None}
    assert (told["version"], told["finish_reason"]) == (4, "stop")
    assert logged(path, [])["advantage"] is None


def test_an_engine_in_this_process_is_pushed_nothing() -> None:
    assert push_event(FakeEngine(lambda name, index: "")) == {}


def test_a_path_with_pictures_can_be_told() -> None:
    picture = {"type": "image", "image": ImageRef("bytes", b"12")}
    said = {"role": "user", "content": [picture, {"type": "text", "text": "Look."}]}
    path = rolled().groups[0].trajectories[0]
    told = logged(replace(path, messages=(said,), num_turns=2), [])
    assert json.loads(json.dumps(told["messages"])) == [
        {"role": "user", "content": "[picture of 2 bytes]Look."}
    ]
