"""Ranks that compute each layer together are one process: its losses, gradient norms and last weights, in float64.

make test-parallel      every architecture and method, on two pairs of ranks and on replicas of pairs
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.chat_runs import column, events, largest_difference, save_model, weights
from tests.helpers.online_runs import train
from tests.helpers.tiny_models import CARRIED
from tests.helpers.vision_models import tiny_vlm
from tests.invariants.test_meshes import ADAPTERS, METHODS, VISION, keys_of
from tests.invariants.test_ranks import LIMIT, by_ranks

from taut.config import from_mapping
from taut.errors import ConfigError
from taut.methods.method import RunConfig

MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "a pair": (2, {"parallel.tensor": 2}),
    "two pairs": (4, {"parallel.tensor": 2}),
    "two replicas of a pair": (4, {"parallel.tensor": 2, "parallel.replicas": 2}),
}
"""name -> ranks, keys."""
FIXED = {"steps": 2, "contract.prompts": 0, "check": "off"}


def runs_of(name: str, place: Path) -> dict[str, dict[str, Any]]:
    """Keys of the runs of an architecture, by method and what trains."""
    if name == VISION:
        model = tiny_vlm(name, place / "model", num_key_value_heads=2)
    else:
        model = save_model(place / "model", name, dtype=torch.float64)
    runs = {}
    for method, given in METHODS.items():
        for trained, lora in ADAPTERS.items():
            keys = keys_of(name, method, model, place / "data") | given | lora | FIXED
            runs[f"{method}, {trained}"] = keys
    return runs


def require_same(many: Path, one: Path, case: str) -> None:
    for field in ("loss", "grad_norm"):
        assert column(many, field) == pytest.approx(column(one, field), rel=LIMIT, abs=LIMIT)
    assert column(many, "sample_ids") == column(one, "sample_ids")
    folder = "adapter" if "lora" in case else "model"
    assert largest_difference(weights(many / folder), weights(one / folder)) < LIMIT


@pytest.mark.parallel
@pytest.mark.parametrize("name", [*CARRIED, VISION])
def test_ranks_that_compute_together_equal_one_process(name: str, tmp_path: Path) -> None:
    todo: dict[str, list[dict[str, Any]]] = {mesh: [] for mesh in MESHES}
    for case, keys in runs_of(name, tmp_path).items():
        train(keys | {"out": str(tmp_path / "one" / case)})
        for mesh, (_, divided) in MESHES.items():
            if mesh == "two pairs" or "sft" in case:
                todo[mesh].append(keys | {"out": str(tmp_path / mesh / case)} | divided)
    for mesh, runs in todo.items():
        by_ranks(tmp_path, runs, MESHES[mesh][0])
        for run in runs:
            out = Path(run["out"])
            require_same(out, tmp_path / "one" / out.name, out.name)


@pytest.mark.parametrize("mesh", ["a pair", pytest.param("two pairs", marks=pytest.mark.parallel)])
def test_a_checked_run_equals_one_process_and_goes_on_in_it(mesh: str, tmp_path: Path) -> None:
    """With checks, held-out loss, a norm inside the heads, experts, and what is saved compared."""
    todo, (num_ranks, divided) = [], MESHES[mesh]
    for name, trained in (("qwen3_moe", "full"), ("qwen3", "lora")):
        model = save_model(tmp_path / name, name, dtype=torch.float64)
        keys = keys_of(name, "sft", model, tmp_path / "data") | ADAPTERS[trained]
        keys |= {"steps": 2, "contract.prompts": 1, "checkpoint.every": 1}
        train(keys | {"out": str(tmp_path / "one" / trained)})
        todo.append(keys | {"out": str(tmp_path / "pairs" / trained)} | divided)
    by_ranks(tmp_path, todo, num_ranks)
    for keys, trained in zip(todo, ("full", "lora"), strict=True):
        pairs, one = tmp_path / "pairs" / trained, tmp_path / "one" / trained
        require_same(pairs, one, trained)
        failed = [event["name"] for event in events(pairs, "check") if event["outcome"] == "failed"]
        assert not failed
        shutil.rmtree(pairs / "checkpoints" / "step-000002")
        shutil.rmtree(pairs / "model")  # as if it had been killed before its end
        train(keys | {"parallel.tensor": 1, "resume": True})
        assert events(pairs, "resume")[0]["from_step"] == 1
        require_same(pairs, one, trained)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"quantize": "nf4", "lora.rank": 4}, "quantize=nf4"),
        ({"frozen_dtype": "checkpoint", "lora.rank": 4}, "frozen_dtype=checkpoint"),
        ({"optim.name": "muon"}, "optim.name=muon"),
        ({"optim.state": "int8"}, "optim.state=int8"),
        ({"parallel.cpu_offload": True}, "parallel.cpu_offload=true"),
        ({"compile": True}, "compile=true"),
        ({"lora.rank": 4, "lora.dora": True}, "lora.dora=true"),
        ({"lora.rank": 4, "lora.dropout": 0.1}, "lora.dropout"),
    ],
)
def test_what_needs_whole_layers_is_refused(keys: dict[str, Any], named: str) -> None:
    fixed = {"model": "m", "data.train": "x", "parallel.tensor": 2}
    with pytest.raises(
        ConfigError,
        match=f"parallel.tensor=2 with {named}.*: .*; expected one of the two; leave parallel.tensor",
    ):
        from_mapping(RunConfig, fixed | keys)
