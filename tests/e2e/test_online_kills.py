"""Killed (SIGKILL) and resumed where rollouts are in flight: bit for bit, with buffers, controllers and critics."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.helpers.chat_runs import events
from tests.helpers.kill_points import Operation, Point
from tests.helpers.killed_runs import kill, resume, whole
from tests.helpers.online_runs import keys_of, save_models
from tests.helpers.run_directories import Left, left, require_equal
from tests.helpers.slow_cases import slow_except

COMMON = {"dtype": "float32", "checkpoint__background": False, "log__tokens__every": 2}
KINDS: dict[str, dict[str, Any]] = {
    "grpo": {
        "steps": 6,  # rollouts before steps 1 and 5
        "rollout.minibatches": 2,
        "rollout.epochs": 2,
        "rollout.replay_groups": 2,
        "rollout.dynamic_sampling_rounds": 1,
        "grpo.kl_coef": 0.1,
        "grpo.kl_in": "reward",
        "grpo.kl_target": 0.01,
        "grpo.entropy_target": 20.0,
        "shaping.scale": "running",
        "checkpoint.every": 2,
        "checkpoint.keep": 9,
        "optim.schedule": "cosine",
        "rollout.n": 3,
        "batch.samples_per_step": 2,
        "rewards": [{"name": "length_target", "options": {"target": 2, "width": 1}}],
    },
    "ppo": {
        "steps": 4,  # before 1 and 3
        "critic.kind": "own",
        "critic.model": "beside",
        "ppo.kl_coef": 0.1,
        "checkpoint.every": 1,
        "rollout.n": 1,
        "dtype": "float64",
    },
    "online_dpo": {"steps": 4, "rollout.replay_groups": 3, "checkpoint.every": 2, "lora.rank": 4},
}


class Whole(NamedTuple):
    """An uninterrupted run."""

    keys: dict[str, Any]
    operations: list[Operation]
    left: Left
    told: list[dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", params=slow_except(["grpo"], KINDS))
def run(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Whole:
    place = tmp_path_factory.mktemp(request.param)
    keys = keys_of(request.param, model, place, **COMMON) | KINDS[request.param]
    if "critic.model" in keys:
        keys["critic.model"] = str(model.with_name("beside"))
    out = place / "whole"
    operations = whole(out, keys)
    return Whole(keys, operations, left(out), told_of(out))


def told_of(out: Path) -> list[dict[str, Any]]:
    """What is told of each rollout, and what each checkpoint remembers."""
    rollouts = [
        {name: value for name, value in event.items() if name != "time" and "seconds" not in name}
        for event in events(out, "rollout")
    ]
    kept = sorted((out / "checkpoints").glob("step-*/meta.json"))
    return [*rollouts, *(json.loads(path.read_text())["memories"] for path in kept)]


def within(operations: list[Operation], kind: str, step: int, share: float) -> Point:
    """``share`` of the way through the operations of a kind that precede the update of a step and follow the one
    before.
    """
    updates = [at for at, one in enumerate(operations) if one.kind == "update"]
    first, last = list(pairwise([-1, *updates]))[step - 1]
    numbers, count = [], 0
    for at, one in enumerate(operations[:last]):
        count += one.kind == kind
        if one.kind == kind and at > first:
            numbers.append(count)
    return Point(kind, numbers[round(share * (len(numbers) - 1))])


POINTS = {
    "grpo": [("backward", 4, 1.0), ("forward", 5, 0.5)],
    "ppo": [("backward", 4, 0.0)],
    "online_dpo": [("forward", 4, 0.3)],
}


def test_killed_and_resumed_equals_uninterrupted(run: Whole, tmp_path: Path) -> None:
    """In the middle of generation, and in the middle of what a rollout is trained on."""
    for number, at in enumerate(POINTS[run.keys["method"]]):
        out = tmp_path / f"{number}"
        kill(out, run.keys, within(run.operations, *at))
        resume(out, run.keys)
        require_equal(out, run.left)
        assert told_of(out) == run.told
        assert 0 < events(out, "resume")[-1]["from_step"] < at[1]


def test_the_run_has_what_is_to_be_kept(run: Whole) -> None:
    """The kills above are of runs in which each buffer and controller moves."""
    memories = [one["online"] for one in run.told if "online" in one]
    rollouts = [one for one in run.told if "samples" in one]
    if run.keys["method"] == "grpo":
        assert [m["phase"] is None for m in memories] == [False, True, False]
        assert len({m["credit"]["coef"] for m in memories}) == 2
        learned = [r["completions"] - 3 * r["left_out"] for r in rollouts]
        assert memories[-1]["credit"]["scale"][0] == sum(learned)
        assert any(r["left_out"] for r in rollouts)
        assert max(r["num_replayed"] for r in rollouts) == 2
    if run.keys["method"] == "online_dpo":
        assert [r["num_replayed"] for r in rollouts] == [0, 3, 3, 3]
    if run.keys["method"] == "ppo":
        assert any("critic" in name for name in run.left.tensors)
