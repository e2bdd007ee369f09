"""No predicted second is below what products, memory and links allow, whatever the model and the machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.configurations import save_configuration

from taut.commands.plan import Planned, plan
from taut.commands.settings import Plan
from taut.config import from_mapping
from taut.plan.rates import GPUS

TOKENS = 4096
CASES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("0.5B", "RTX4090", 1, {}),
    ("0.5B", "L4", 2, {"optim.state": "int8"}),
    ("8B", "RTX4090", 1, {"lora.rank": 16, "quantize": "nf4", "activation_checkpointing": True}),
    ("8B", "H100", 8, {"activation_checkpointing": True}),
    ("8B", "H100", 4, {"lora.rank": 16, "parallel.replicas": 2}),
    ("70B", "A100-80GB", 32, {"activation_checkpointing": True, "parallel.replicas": 4}),
]


def planned(name: str, gpu: str, gpus: int, place: Path, **keys: Any) -> Planned:
    model = save_configuration(name, place)
    fixed: dict[str, Any] = {
        "model": str(model),
        "gpu": gpu,
        "gpus": gpus,
        "batch.tokens_per_microbatch": TOKENS,
    }
    fixed |= {"data.max_length": TOKENS, "alternatives": False}
    return plan(from_mapping(Plan, {**fixed, **keys}))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "gpu", "gpus", "keys"), CASES)
def test_a_step_takes_no_less(
    name: str, gpu: str, gpus: int, keys: dict[str, Any], tmp_path: Path
) -> None:
    found = planned(name, gpu, gpus, tmp_path, **keys)
    sheet, seconds = GPUS[gpu], found.ways[0].seconds
    assert seconds is not None
    works = [work for step in found.work.steps for work in step]
    tokens, count = sum(work.tokens for work in works), len(works)
    number, is_full = found.num_parameters, "lora.rank" not in keys
    products = (6 if is_full else 4) * 0.9 * number * tokens  # an embedding is looked up
    assert seconds.total >= products / (sheet.tflops * 1e12)
    read = 2 * number * (2 if "quantize" not in keys else 0.5) * count
    assert seconds.total >= read / (sheet.gb_per_second * 1e9)
    shards = gpus // keys.get("parallel.replicas", 1)
    sent = 2 * 2 * number * (shards - 1) / shards * count
    assert seconds.total >= sent / (sheet.link_gb_per_second * 1e9)
    if is_full:
        updated = (12 + (4 if "optim.state" in keys else 16)) * number / shards
        assert seconds.total >= updated / (sheet.gb_per_second * 1e9)
