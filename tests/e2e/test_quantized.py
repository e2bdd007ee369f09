"""Whole runs on a quantized base: preferences with the adapter off as the reference, generation in this process, and
saving, which a fault leaves undone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.chat_runs import (
    QUIET,
    column,
    events,
    largest_difference,
    save_model,
    sft,
    weights,
)
from tests.helpers.online_runs import keys_of
from tests.helpers.online_runs import train as run_online
from tests.unit.models.quantized.test_quantized_layers import digest

from taut.checks.examine import examine
from taut.checks.session import Session
from taut.config import from_mapping
from taut.errors import CheckFailed, ConfigError
from taut.evals.contract import SavedModelTest
from taut.methods.method import RunConfig
from taut.models.attention_backends import PREFIX
from taut.models.quantized import frozen_storage
from taut.plan.models import Kernels, planned_model
from taut.run import save
from taut.run.inputs import load_inputs
from taut.run.setup import build
from taut.train import distributed
from taut.train.trainer import train_step

pytest.importorskip("bitsandbytes")
SMALL: dict[str, Any] = {"lora.rank": 4, "quantize": "nf4", "dtype": "float32"}


@pytest.mark.slow
def test_grpo_generates_scores_and_learns_on_a_quantized_base(tmp_path: Path) -> None:
    """Its reference is the same model without the adapter."""
    model = save_model(tmp_path / "model", dtype=torch.bfloat16)
    keys = keys_of(
        "grpo", model, tmp_path / "run", **SMALL, **{"check": "quick", "grpo.kl_coef": 0.1}
    )
    out = run_online(keys).out
    failed = [event["name"] for event in events(out, "check") if event["outcome"] == "failed"]
    assert not failed
    assert len(column(out, "loss")) == 3


def test_a_fault_while_saving_leaves_the_former_model(
    train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_model(tmp_path / "base", "llama", dtype=torch.bfloat16)
    keys: dict[str, Any] = {key.replace(".", "__"): value for key, value in SMALL.items()}
    keys |= {
        "check": "off",
        "checkpoint__every": 1,
        "contract__prompts": 0,
        "optim__learning_rate": 1e-2,
    }
    out = sft(base, train, tmp_path / "out", steps=2, **keys).out
    former = weights(out / "model")

    def fails(*_: object, **__: object) -> None:
        raise CheckFailed("planted")

    monkeypatch.setattr(save, "require_sound", fails)
    monkeypatch.setattr(SavedModelTest, "run", fails)
    with pytest.raises(CheckFailed, match="planted"):
        sft(base, train, out, steps=3, resume=True, **keys)
    assert largest_difference(weights(out / "model"), former) == 0


def test_float64_is_refused(train: Path, tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "llama")
    with pytest.raises(ConfigError, match="dtype=float64 with a quantized base"):
        sft(base, train, tmp_path / "out", steps=1, lora__rank=4, quantize="int8", dtype="float64")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["nf4", "int8"])
def test_checks_around_training_change_no_stored_byte(
    how: str, train: Path, tmp_path: Path
) -> None:
    """And there are as many of them as the plan says."""
    base = save_model(tmp_path / "base", "llama", dtype=torch.bfloat16)
    fixed = {"model": str(base), "data.train": str(train), "steps": 4}
    run = from_mapping(RunConfig, {**QUIET, **fixed, **SMALL, "quantize": how})
    ranks = distributed.start("cpu")
    inputs = load_inputs(run, ranks)
    built = build(run, inputs, run.plan(inputs.train), ranks, emit=lambda kind, **fields: None)
    before = digest(built.scorer)
    assert not examine(Session.of(built), "full").failures
    assert digest(built.scorer) == before
    for step in (1, 2):
        train_step(built.trainer, step)
    assert digest(built.scorer) == before
    failures = {answered.name for answered in examine(Session.of(built), "full").failures}
    assert failures == {"loss.adapter_start"}, "only the adapter is no longer as it began"
    assert digest(built.scorer) == before
    planned = planned_model(run, inputs.config, Kernels(torch.float32, PREFIX + "reference"))
    assert frozen_storage.stored_bytes(planned) == frozen_storage.stored_bytes(built.scorer)
