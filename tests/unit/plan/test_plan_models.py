"""Memory of runs with several models, and with pictures: predicted part by part, to what live tensors take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers import judged_runs, online_runs, picture_runs
from tests.helpers.chat_runs import write_rows
from tests.helpers.vision_models import FAMILIES, tiny_vlm

from taut.plan.allocations import PARTS
from taut.plan.memory import measured_parts, predict
from taut.plan.models import Kernels
from taut.plan.workload import workload
from taut.run.setup import Built

SLOW: list[tuple[str, str, dict[str, Any]]] = [
    *((name, "sft", {}) for name in FAMILIES if name != "qwen2_5_vl"),
    ("qwen3_vl", "sft", {"lora__rank": 2}),
    ("llava_onevision", "dpo", {"lora__rank": 2, "freeze": ["projector"]}),
    ("gemma3", "sft", {"activation_checkpointing": True, "dtype": "float32"}),
    ("qwen3_vl_moe", "sft", {"dtype": "float32"}),
    ("internvl", "reward", {}),
    ("qwen2_vl", "ppo", {}),
]


def compare(built: Built, *, is_first: bool = True) -> dict[str, int]:
    """The parts that are measured, once they are seen to be those that are predicted."""
    run, inputs, loaded = built.run, built.inputs, built.models.loaded
    packed = workload(run, inputs, 1).largest
    kernels = Kernels(loaded.dtype.dtype, loaded.attention.implementation)
    found = predict(run, inputs.config, kernels, packed, is_first=is_first).footprint.parts
    true = measured_parts(built, packed, is_first=is_first)
    small = 8192 + sum(buffer.nbytes for buffer in built.scorer.buffers())
    for part in PARTS:
        assert abs(found[part] - true[part]) <= max(small, 0.02 * true[part]), (part, found, true)
    return true


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        ("ppo", {"critic__kind": "own"}),
        pytest.param("ppo", {"critic__kind": "shared", "lora__rank": 2}, marks=pytest.mark.slow),
        ("ppo", {"critic__model": "beside", "critic__lora_rank": 2, "lora__rank": 2}),
        pytest.param(
            "ppo", {"activation_checkpointing": True, "ppo__kl_coef": 0.1}, marks=pytest.mark.slow
        ),
        pytest.param("gkd", {}, marks=pytest.mark.slow),
        ("gkd", {"lora__rank": 2, "distill__divergence": "js"}),
    ],
)
def test_critics_and_teachers(method: str, keys: dict[str, Any], tmp_path: Path) -> None:
    model = online_runs.save_models(tmp_path)
    if "critic__model" in keys:
        keys = keys | {"critic__model": str(tmp_path / "beside")}
    built, _ = online_runs.make(online_runs.keys_of(method, model, tmp_path / "run", **keys))
    true = compare(built)
    assert (true["critic"] > 0) == (method == "ppo")
    assert (true["teacher"] > 0) == (method == "gkd")


OTHER = {"teacher": "beside"}


@pytest.mark.parametrize(
    ("method", "keys", "copies"),
    [
        pytest.param("grpo", {"distill__teacher": "beside"}, 1, marks=pytest.mark.slow),
        ("grpo", {"distill__teachers": {"a": OTHER, "b": OTHER}}, 2),
        ("grpo", {"distill__privileged": "answer", "grpo__kl_coef": 0.1}, 1),
        ("grpo", {"distill__privileged": "answer", "distill__weights": "now"}, 0),
        pytest.param(
            *("gkd", {"distill__teachers": {"a": OTHER}, "lora__rank": 2}, 1),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_teachers_that_score_completions(
    method: str, keys: dict[str, Any], copies: int, tmp_path: Path
) -> None:
    """Each takes what its weights take, or a copy of what trains."""
    model = online_runs.save_models(tmp_path)
    rows = [{**row, "teacher": "a"} for row in online_runs.questions(13)]
    keys = json.loads(json.dumps(keys).replace("beside", str(tmp_path / "beside")))
    given = {"data__train": str(write_rows(tmp_path / "rows.jsonl", rows)), **keys}
    if method == "gkd":
        given["distill__teacher"] = None
    built, _ = online_runs.make(online_runs.keys_of(method, model, tmp_path / "run", **given))
    true = compare(built)
    named = built.scorer.model.named_parameters()
    base = sum(p.nbytes for name, p in named if "lora" not in name)
    assert true["teacher"] == pytest.approx(copies * base, rel=0.05)
    assert (true["reference"] > 0) == ("grpo__kl_coef" in keys)


@pytest.mark.parametrize(
    ("name", "method", "keys"),
    [
        ("qwen2_5_vl", "sft", {}),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_pictures(name: str, method: str, keys: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_vlm(name, tmp_path / "model")
    compare(judged_runs.make(picture_runs.keys_of(method, model, tmp_path / "data", **keys)))
