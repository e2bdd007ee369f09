"""Runs against a server with ``rollout.lag=0``, as they were when a rollout was judged after its last trajectory: which
prompts each rollout has, in which order, what was sampled, what it was worth, and what was learned.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from tests.helpers.chat_runs import column, events, save_model
from tests.helpers.online_runs import TWICE, keys_of, train
from tests.helpers.sampling_server import SamplingServer
from tests.helpers.slow_cases import slow_except
from transformers import AutoModelForCausalLM

from taut.io import tables

RECORDED = Path(__file__).with_name("server_rollouts.json")
COLUMNS = ("step", "group", "prompt_id", "index", "is_kept", "ids_T", "reward", "version_N")
RUNS: dict[str, dict[str, Any]] = {
    "single": {
        "steps": 6,
        "rollout.minibatches": 2,
        "rollout.dynamic_sampling_rounds": 2,
        "rewards": [{"name": "length_target", "options": {"target": 2, "width": 1}}],
    },
    "turns": {"steps": 3, "rollout.environment.max_tokens": 60, "batch.samples_per_step": 5},
}


@pytest.mark.parametrize("name", slow_except(["single"], RUNS))
def test_a_run_is_as_it_was(name: str, tmp_path: Path) -> None:
    """To the bit on one machine; others draw the weights with other last bits."""
    model = save_model(tmp_path / "model", "llama", dtype=torch.float64)
    environment = tmp_path / "twice.py"
    environment.write_text(TWICE)
    with SamplingServer(model=AutoModelForCausalLM.from_pretrained(model)) as server:
        keys = {
            "rollout.engine": "server",
            "rollout.urls": server.url,
            "rollout.n": 3,
            "optim.learning_rate": 2e-3,
            **RUNS[name],
        }
        if name == "turns":
            keys |= {"rollout.environment.name": f"{environment}:Twice"}
        out = train(keys_of("grpo", model, tmp_path, **keys)).out
    rollouts = [
        {key: e.get(key) for key in ("step", "reward", "left_out", "groups_with_signal")}
        for e in events(out, "rollout")
    ]
    batches = list(tables.read_tables(out / "rollouts", COLUMNS))
    rows = pa.Table.from_batches(batches).to_pylist()
    learned = {key: column(out, key) for key in ("loss", "grad_norm", "engine/difference")}
    found = {"rollouts": rollouts, "rows": [list(row.values()) for row in rows], "steps": learned}
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if name not in recorded:
        RECORDED.write_text(json.dumps({**recorded, name: found}) + "\n")
        pytest.fail(f"{RECORDED.name} had no {name} and has it now; look at it and commit it")
    expected = recorded[name]
    assert found["rows"] == expected["rows"]
    assert found["rollouts"] == expected["rollouts"]
    for key in ("loss", "grad_norm"):
        assert found["steps"][key] == pytest.approx(expected["steps"][key], rel=1e-6), key
