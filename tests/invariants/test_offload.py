"""Offloaded weights give the numbers of whole ones, on one rank and on two: whole runs, of two steps in float64.

Where there is no GPU, shards and what is gathered of them are both in the host's memory, under FSDP's policy of
offloading all the same; that each tensor is on the right one of two devices is shown without contents.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.helpers.chat_runs import column, largest_difference, save_model, weights
from tests.helpers.online_runs import train
from tests.invariants.test_meshes import keys_of
from tests.invariants.test_ranks import LIMIT, by_ranks

from taut.train import distributed

FIXED = {"steps": 2, "contract.prompts": 0, "checkpoint.every": 1}
OFFLOADED = {"parallel.cpu_offload": True, "activation_checkpointing": "selective"}
CASES: dict[str, dict[str, Any]] = {
    "full": {"optim.state": "int8"},
    "lora": {"lora.rank": 4},
}


def require_same(one: Path, other: Path, folder: str) -> None:
    for field in ("loss", "grad_norm"):
        assert column(other, field) == pytest.approx(column(one, field), rel=LIMIT, abs=LIMIT)
    assert largest_difference(weights(other / folder), weights(one / folder)) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_offloaded_weights_train_as_whole_ones(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick checks run before each: ``run.in_force`` is among them."""
    monkeypatch.setattr(distributed, "require_offloadable", lambda device: None)
    model = save_model(tmp_path / "model", "llama", dtype=torch.float64)
    keys = keys_of("llama", "sft", model, tmp_path / "data") | FIXED | CASES[case]
    train(keys | {"out": str(tmp_path / "whole")})
    train(keys | OFFLOADED | {"out": str(tmp_path / "offloaded")})
    assert not dist.is_initialized()
    folder = "adapter" if case == "lora" else "model"
    require_same(tmp_path / "whole", tmp_path / "offloaded", folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "trained"),
    [
        (["float32", "none", "true", "int8"], ["cpu"]),
        (["bfloat16", "lora", "offload", "float32"], ["cpu", "gpu"]),  # adapters stay on the device
    ],
)
def test_every_tensor_is_on_its_device(words: list[str], trained: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.two_devices", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("norm") == trained[-1:]
    assert found == {
        "loss": ["gpu"],
        "gradients": trained,
        "moments": trained,
        "scores": ["gpu"],
        "saved": ["cpu"],
    }


@pytest.mark.parallel
def test_two_ranks_with_offloaded_shards_are_one_process(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama", dtype=torch.float64)
    todo = []
    for case, given in CASES.items():
        keys = keys_of("llama", "sft", model, tmp_path / "data") | FIXED | given
        train(keys | {"out": str(tmp_path / "one" / case)})
        todo.append(keys | OFFLOADED | {"out": str(tmp_path / "two" / case)})
    by_ranks(tmp_path, todo)
    for case in CASES:
        folder = "adapter" if case == "lora" else "model"
        require_same(tmp_path / "one" / case, tmp_path / "two" / case, folder)
