"""Memory of methods on answers that are judged: predicted part by part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.checks.faults.judged import compared, labeled
from tests.checks.planting import Place

from taut.plan.allocations import PARTS
from taut.plan.memory import measured_parts, predict
from taut.plan.models import Kernels
from taut.plan.workload import workload


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        pytest.param("dpo", {"dtype": "bfloat16"}, marks=pytest.mark.slow),
        ("dpo", {"lora__rank": 4, "dpo__log_entropy": True}),
        pytest.param("dpo", {"reference__update_every": 3}, marks=pytest.mark.slow),
        ("dpo", {"reference__model": "llama"}),
        ("kto", {"dtype": "float32"}),
        ("simpo", {}),
        ("reward", {"dtype": "float32"}),
    ],
)
def test_bytes_are_those_of_the_live_tensors(
    method: str, keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path, monkeypatch)
    if "reference__model" in keys:
        keys = {"reference__model": str(place.model("llama", num_hidden_layers=3))}
    rows = labeled() if method == "kto" else compared()
    session = place.session(data=place.data(rows), method=method, **keys)
    run, built = session.run, session.built
    packed = workload(run, session.inputs, 1).largest
    if method != "kto":
        assert packed.num_pairs == 6
    kernels = Kernels(session.dtype, session.loaded.attention.implementation)
    found = predict(run, session.inputs.config, kernels, packed, is_first=True).footprint.parts
    true = measured_parts(built, packed, is_first=True)
    small = 8192 + sum(buffer.nbytes for buffer in built.scorer.model.buffers())
    for part in PARTS:
        assert abs(found[part] - true[part]) <= max(small, 0.02 * true[part]), part
    assert (true["reference"] > 0) == (method in ("dpo", "kto"))
    assert (true["logits"] > 0) == (method != "reward")


def test_rows_are_kept_whole_where_micro_batches_are_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path, monkeypatch)
    session = place.session(data=place.data(compared()), method="simpo", batch__samples_per_step=2)
    work = workload(session.run, session.inputs, 1)
    assert work.fullest.num_tokens >= work.largest.num_tokens
    packed = work.supply.filled(4 * work.largest.num_tokens)
    assert packed.num_samples == 2 * packed.num_pairs
    assert packed.num_tokens <= 4 * work.largest.num_tokens
    assert work.supply.filled(5).num_tokens == 5
