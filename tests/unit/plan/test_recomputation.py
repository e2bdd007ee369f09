"""A run that leaves activation_checkpointing open decides it by its memory, writes it down, and goes on with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.chat_runs import QUIET, chats, column, events, save_model, write_rows

from taut.checks.session import Session
from taut.commands.train import train
from taut.config import from_mapping
from taut.methods.sft import Sft
from taut.plan import memory_options
from taut.plan.memory_options import decide_recomputation, recomputation
from taut.run.inputs import load_inputs
from taut.train import distributed

KEY = "activation_checkpointing"


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    model, data = save_model(tmp_path / "model"), write_rows(tmp_path / "train.jsonl", chats(8))
    fixed = {"model": str(model), "data.train": str(data), "contract.prompts": 0, "steps": 2}
    return {**QUIET, **fixed, "checkpoint.every": 1}


def decided(out: Path) -> tuple[Any, list[str]]:
    """The value in force, and those of the decisions about it."""
    resolved = json.loads((out / "resolved.json").read_text())
    values = [value for name, value, _ in map(fields_of, resolved["decisions"]) if name == KEY]
    return resolved["config"][KEY], values


def fields_of(decision: dict[str, str]) -> tuple[str, str, str]:
    return decision["name"], decision["value"], decision["reason"]


def test_a_run_recomputes_where_it_would_not_fit_with_the_same_losses(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy = tmp_path / "roomy"
    train(from_mapping(Sft, {**keys, "out": str(roomy)}))
    assert decided(roomy) == (False, ["false"])
    monkeypatch.setattr(memory_options, "device_memory", lambda _: 2**20)
    tight = tmp_path / "tight"
    train(from_mapping(Sft, {**keys, "out": str(tight), "steps": 1}))
    assert decided(tight) == (True, ["true"])
    forced = tmp_path / "forced"
    train(from_mapping(Sft, {**keys, "out": str(forced), KEY: False}))
    assert decided(forced) == (False, [])
    # what a resumed run decided before is in force, whatever memory there is now
    monkeypatch.undo()
    train(from_mapping(Sft, {**keys, "out": str(tight), "resume": True}))
    assert decided(tight) == (True, ["true"])
    assert not [one for one in events(tight, "warning") if one["name"] == "exactness"]
    for out in (tight, forced):
        assert column(out, "loss") == column(roomy, "loss")


def test_the_decision_is_of_a_full_micro_batch_and_checks_make_it_too(
    keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: half of the memory on a CPU, 90% of a GPU's."""
    ranks = distributed.start("cpu")
    run = from_mapping(Sft, keys)
    inputs = load_inputs(run, ranks)
    for size, how in ((2**20, True), (2**34, False)):
        monkeypatch.setattr(memory_options, "device_memory", lambda _, size=size: size)
        changed, (decision,) = decide_recomputation(run, inputs, ranks)
        assert (changed.activation_checkpointing, decision.name) == (how, KEY)
        session = Session(run, ranks)
        assert decision in session.inputs.decisions
        assert session.run.activation_checkpointing is how
    for device, most in (("cpu", 500), ("cuda", 900)):
        at = [recomputation(most + more, 1000, torch.device(device)).value for more in (0, 1)]
        assert at == ["false", "true"]
