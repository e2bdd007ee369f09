"""GRPO on the small real model: in this process, and against a real vLLM that gets each update, lagging or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import column, events, write_rows
from tests.real.vllm import needs_vllm

import taut

pytestmark = [pytest.mark.real, pytest.mark.slow]

ASKED = ("Name a color.", "What is 2 and 3?", "Say hello.", "Which day follows Monday?")
COMMON: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "steps": 2,
    "batch.samples_per_step": 2,
    "rollout.n": 4,
    "rollout.max_new_tokens": 32,
    "rewards": [{"name": "length_target", "options": {"target": 16}}, "stop"],
    "optim.learning_rate": 1e-5,
    "optim.schedule": "constant",
    "log.console": False,
    "check": "off",
    "stop_check.prompts": 0,
    "contract.prompts": 0,
    "checkpoint.every": 0,
}


def trained(model: Path, place: Path, **keys: Any) -> Path:
    """Where a run has been."""
    rows = [{"messages": [{"role": "user", "content": text}]} for text in ASKED]
    data = str(write_rows(place / "asked.jsonl", rows))
    dotted = {key.replace("__", "."): value for key, value in keys.items()}
    fixed = {"model": str(model), "data.train": data, "out": str(place / "out")}
    return taut.grpo(**{**COMMON, **fixed, **dotted}).out


def test_in_this_process(real_model: Path, tmp_path: Path) -> None:
    out = trained(real_model, tmp_path, steps=3, grpo__kl_coef=0.01)
    assert max(column(out, "engine/difference")) < 1e-4
    assert max(column(out, "engine/largest")) < 1e-3
    assert column(out, "kl")[0] == pytest.approx(0.0, abs=1e-6) and column(out, "kl")[-1] > 0
    rollouts = events(out, "rollout")
    assert all(0 < e["reward/stop"] <= 1 and e["errors"] == 0 for e in rollouts)
    assert sum(e["groups_with_signal"] for e in rollouts) >= 3
    assert max(column(out, "grad_norm")) > 0.1


@needs_vllm
@pytest.mark.parametrize(
    "given",
    [
        {"lora__rank": 8, "lora__train_token_rows": "never", "optim__learning_rate": 1e-3},
        {},  # changes the base under adapters
        {"rollout__lag": 1, "steps": 3},
    ],
    ids=["adapter", "full", "lag"],
)
def test_against_a_server(
    given: dict[str, Any], pushed_to: str, real_model: Path, tmp_path: Path
) -> None:
    engine = {"rollout__engine": "server", "rollout__urls": pushed_to}
    out = trained(real_model, tmp_path, **engine, **given)
    rollouts, apart = events(out, "rollout"), column(out, "engine/difference")
    lag = given.get("rollout__lag", 0)
    assert all(e["staleness_max"] <= lag for e in rollouts)
    assert max(apart[:1] if lag else apart) < 1e-3
    assert max(e["push_change"] for e in rollouts[1:]) > 1e-3
    assert max(e["push_error"] for e in rollouts) < 1e-2
    assert all(e["errors"] == 0 for e in rollouts)
    assert max(column(out, "engine/effective")) <= 1 + 1e-6
