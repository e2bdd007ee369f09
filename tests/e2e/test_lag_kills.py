"""Killed (SIGKILL) and resumed with ``rollout.lag``, where groups are always in flight: no prompt is lost, and none is
trained on twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.chat_runs import column, events, save_model
from tests.helpers.kill_points import Point
from tests.helpers.killed_runs import kill, resume
from tests.helpers.online_runs import keys_of
from tests.helpers.sampling_server import SamplingServer
from transformers import AutoModelForCausalLM

from taut.io import tables

STEPS = 6
"""With two prompts each: 12 of 13."""


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[dict[str, Any]]:
    model = save_model(tmp_path / "model", "llama")
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with SamplingServer(model=loaded) as server:
        yield {
            **keys_of("grpo", model, tmp_path),
            "dtype": "float32",
            "steps": STEPS,
            "batch.samples_per_step": 2,
            "rollout.engine": "server",
            "rollout.urls": server.url,
            "rollout.server.concurrency": 8,
            "rollout.lag": 2,
            "checkpoint.every": 1,
            "checkpoint.background": False,
        }


def trained_on(out: Path) -> list[str]:
    """The prompts of the rollouts that were trained on."""
    last = {event["step"]: event["draws"] for event in events(out, "rollout")}
    rows: dict[int, dict[str, None]] = {}
    for batch in tables.read_tables(out / "rollouts", ["step", "prompt_id"]):
        for row in batch.to_pylist():
            rows.setdefault(row["step"], {})[row["prompt_id"]] = None
    assert sorted(rows) == sorted(last) == list(range(1, STEPS + 1))
    assert sorted(draw for draws in last.values() for draw in draws) == list(range(2 * STEPS))
    return [prompt for prompts in rows.values() for prompt in prompts]


def opened(out: Path) -> list[list[int]]:
    """The draws that were open at the last checkpoint."""
    latest = (out / "checkpoints" / "latest").read_text().strip()
    meta = json.loads((out / "checkpoints" / latest / "meta.json").read_text())
    (state,) = [
        m["draws"] for m in meta["memories"].values() if isinstance(m, dict) and "draws" in m
    ]
    assert all(number < state["next"] for number, _ in state["open"])
    return list(state["open"])


def test_killed_twice_and_resumed_each_prompt_is_trained_on_once(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    kill(out, keys, Point("update", 3))
    assert len(opened(out)) == 4  # two rollouts are in flight while the third is trained on
    kill(out, keys, Point("update", 2))
    resume(out, keys)
    assert [event["from_step"] for event in events(out, "resume")] == [0, 2, 3]
    prompts = trained_on(out)
    assert len(prompts) == len(set(prompts)) == 2 * STEPS
    assert all(event["staleness_max"] <= 2 for event in events(out, "rollout"))
    assert column(out, "step") == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_two_ranks_get_the_same_groups(keys: dict[str, Any], tmp_path: Path) -> None:
    """The writer feeds; the other rank dies, and both go on."""
    out = tmp_path / "out"
    kill(out, keys, Point("update", 3, rank=1), num_ranks=2)
    resume(out, keys, num_ranks=2)
    prompts = trained_on(out)
    assert len(prompts) == len(set(prompts)) == 2 * STEPS
    assert max(column(out, "engine/difference")[:1]) < 1e-5
