"""No false alarm on the real model: every check, the full part included, on the demo's own data and on a LoRA run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from taut.checks.examine import examine
from taut.checks.session import Session
from taut.config import from_mapping
from taut.data.store.cache import default_directory
from taut.methods.method import RunConfig
from taut.train import distributed
from taut_tools.demo import fetch
from taut_tools.demo.story import build_data

pytestmark = pytest.mark.real

WAYS: dict[str, dict[str, Any]] = {
    "full, bfloat16": {"dtype": "bfloat16"},
    "full, float32, checkpointed": {"dtype": "float32", "activation_checkpointing": True},
    "lora": {"lora.rank": 8, "dtype": "bfloat16"},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_real_model_and_sound_data_raise_no_alarm(way: str, real_model: Path) -> None:
    data = build_data(fetch.read_reading(default_directory()), default_directory(), None)
    paths = {"model": str(real_model), "data.train": str(data.train), "data.eval": str(data.eval)}
    keys = {**paths, "device": "cpu", "data.too_long": "truncate", **WAYS[way]}
    found = examine(Session(from_mapping(RunConfig, keys), distributed.start("cpu")), "full")
    assert not found.failures, "\n".join(f"{one.name}: {one.finding}" for one in found.failures)
