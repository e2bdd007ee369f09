"""Two gloo ranks are one process where what is trained on is generated: rollouts, scores, critics, buffers.

All runs of two ranks are made one after another in one process group.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import column, events, largest_difference, weights
from tests.helpers.online_runs import TWICE, keys_of, save_models, train
from tests.invariants.test_ranks import LIMIT, by_ranks

pytestmark = pytest.mark.slow

UNEVEN = {"batch.tokens_per_microbatch": 90, "steps": 3}
"""The ranks have different numbers of micro-batches."""

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": (
        "grpo",
        {
            **UNEVEN,
            "rollout.minibatches": 2,
            "rollout.replay_groups": 1,
            "rollout.dynamic_sampling_rounds": 1,
            "grpo.kl_coef": 0.1,
            "grpo.kl_in": "reward",
            "shaping.scale": "running",
            "lora.rank": 4,
            "optim.learning_rate": 1e-2,
        },
    ),
    "a critic of its own": (
        "ppo",
        {**UNEVEN, "critic.kind": "own", "critic.model": "beside", "checkpoint.every": 2},
    ),
    "tokens whitened over the rollout": (
        "grpo",
        {
            **UNEVEN,
            "steps": 2,
            "rollout.minibatches": 2,
            "grpo.advantage": "reinforce_pp",
            "grpo.kl_coef": 0.1,
            "grpo.kl_in": "reward",
        },
    ),
    "a rank without": ("grpo", {"steps": 2, "batch.samples_per_step": 1, "grpo.kl_coef": 0.1}),
    "online_dpo": ("online_dpo", UNEVEN),
    "gkd": ("gkd", {**UNEVEN, "steps": 2}),
    "an environment": ("grpo", {"steps": 1, "rollout.environment.name": "twice.py:Twice"}),
    "recorded turns": (
        "grpo",
        {
            "steps": 1,
            "rollout.environment.name": "twice.py:Twice",
            "rollout.replay_from": "one/an environment",
        },
    ),
}
SAME = ("reward", "stopped", "tokens_mean", "groups", "left_out", "num_replayed", "completions")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every run by one process, and then by two ranks."""
    place = tmp_path_factory.mktemp("online")
    model, todo = save_models(place), []
    (place / "twice.py").write_text(TWICE)
    for name, (method, given) in RUNS.items():
        for number in ("one", "two"):
            keys = {**keys_of(method, model, place / "data"), **given}
            keys |= {"out": str(place / number / name)}
            if "critic.model" in keys:
                keys["critic.model"] = str(place / "beside")
            if "rollout.environment.name" in keys:
                keys["rollout.environment.name"] = str(place / given["rollout.environment.name"])
            if "rollout.replay_from" in keys:
                keys["rollout.replay_from"] = str(place / given["rollout.replay_from"])
            if number == "one":
                train(keys)
            else:
                todo.append(keys)
    by_ranks(place, todo)
    return place


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_equal_one_process(name: str, place: Path) -> None:
    one, two = place / "one" / name, place / "two" / name
    assert events(two, "start")[0]["num_ranks"] == 2
    for found, wanted in zip(events(two, "rollout"), events(one, "rollout"), strict=True):
        told = {key: wanted[key] for key in SAME if key in wanted}
        assert told
        assert {key: found[key] for key in told} == pytest.approx(told, rel=LIMIT)
        assert [s["ids"] for s in found["samples"]] == [s["ids"] for s in wanted["samples"]]
    for field in ("sample_ids", "num_targets", "num_tokens_unshared"):
        assert column(two, field) == column(one, field)
    for found, wanted in zip(events(two, "step"), events(one, "step"), strict=True):
        told = {k: v for k, v in wanted.items() if "/" in k or k in ("loss", "grad_norm", "ratio")}
        if wanted["step"] == 1:  # margins are 0 to rounding, and on either side of it
            told.pop("rewards/accuracy", None)
        assert told
        assert {key: found[key] for key in told} == pytest.approx(told, rel=1e-8, abs=LIMIT)
    folder = "adapter" if "lora.rank" in RUNS[name][1] else "model"
    assert largest_difference(weights(two / folder), weights(one / folder)) < LIMIT


def test_what_was_recorded_on_one_rank_is_trained_on_by_two(place: Path) -> None:
    sampled, replayed = place / "one" / "an environment", place / "two" / "recorded turns"
    assert events(replayed, "rollout")[0]["seconds_generating"] == 0.0
    assert events(replayed, "rollout")[0]["samples"] == events(sampled, "rollout")[0]["samples"]
    assert largest_difference(weights(replayed / "model"), weights(sampled / "model")) < LIMIT


def test_the_critic_of_two_ranks_is_that_of_one(place: Path) -> None:
    folders = [place / number / "a critic of its own" / "critic" for number in ("one", "two")]
    assert largest_difference(*map(weights, folders)) < LIMIT
