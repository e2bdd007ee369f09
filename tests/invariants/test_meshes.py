"""Every mesh is one process: each architecture and method, all weights and adapters, sharded over two ranks and over
two replicas of two. The runs are whole ones, of two steps in float64, with their gradient norms and last weights; and
in bfloat16, where one process computes under autocast and a mesh by its weights.

    make test-parallel
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.chat_runs import column, largest_difference, save_model, weights
from tests.helpers.judged_runs import keys_of as judged_keys
from tests.helpers.online_runs import keys_of as online_keys
from tests.helpers.online_runs import train
from tests.helpers.picture_runs import keys_of as picture_keys
from tests.helpers.tiny_models import EIGHT
from tests.helpers.vision_models import tiny_vlm
from tests.invariants.test_ranks import LIMIT, by_ranks

pytestmark = pytest.mark.parallel

MESHES: dict[str, tuple[int, int]] = {"2": (2, 1), "2 x 2": (4, 2)}
"""name -> ranks, replicas."""
METHODS: dict[str, dict[str, Any]] = {
    "sft": {},
    "dpo": {},
    "grpo": {"grpo.loss": "gspo", "rollout.minibatches": 2, "grpo.kl_coef": 0.1},
    "ppo": {"critic.kind": "own"},
}
ADAPTERS: dict[str, dict[str, Any]] = {"full": {}, "lora": {"lora.rank": 4}}
VISION = "llava_onevision"
CASES = [f"{method}, {trained}" for method in METHODS for trained in ADAPTERS]
NARROW = [f"bfloat16, {trained}" for trained in ADAPTERS]
ROUNDING = {"loss": 5e-3, "grad_norm": 0.1}
"""Relative, in bfloat16: between one process and a mesh the residual stream is rounded, too."""


def keys_of(name: str, method: str, model: Path, place: Path) -> dict[str, Any]:
    """Keys of a run of two steps."""
    if name == VISION and method in ("grpo", "ppo"):
        sampled = {"rollout.n": 4, "rollout.max_new_tokens": 8, "rollout.stop": ["e", "a"]}
        return picture_keys(method, model, place) | sampled
    if name == VISION:
        return picture_keys(method, model, place)
    if method in ("grpo", "ppo"):
        return online_keys(method, model, place)
    keys = judged_keys("dpo", model, place)
    if method == "sft":  # the better answers
        keys |= {"method": "sft", "data.columns.completion": "chosen"}
    return keys | {"batch.tokens_per_microbatch": 90}


@pytest.fixture(scope="module", params=[*EIGHT, VISION])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs of an architecture: by one process, and by the ranks of each mesh."""
    name = request.param
    place: Path = tmp_path_factory.mktemp(name)
    if name == VISION:
        model = tiny_vlm(name, place / "model")
    else:
        model = save_model(place / "model", name, dtype=torch.float64)
    todo: dict[str, list[dict[str, Any]]] = {mesh: [] for mesh in MESHES}
    for method, given in {**METHODS, "bfloat16": {"dtype": "bfloat16"}}.items():
        for trained, lora in ADAPTERS.items():
            fixed = {"steps": 2, "contract.prompts": 0, "check": "off"}
            learns_by = method if method in METHODS else "sft"
            keys = keys_of(name, learns_by, model, place / "data") | given | lora | fixed
            case = f"{method}, {trained}"
            train(keys | {"out": str(place / "one" / case)})
            for mesh, (_, replicas) in MESHES.items():
                out = str(place / mesh / case)
                todo[mesh].append(keys | {"out": out, "parallel.replicas": replicas})
    for mesh, runs in todo.items():
        by_ranks(place, runs, MESHES[mesh][0])
    return place


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", CASES)
def test_a_mesh_equals_one_process(case: str, mesh: str, place: Path) -> None:
    one, many = place / "one" / case, place / mesh / case
    for field in ("loss", "grad_norm"):
        assert column(many, field) == pytest.approx(column(one, field), rel=LIMIT, abs=LIMIT)
    assert min(column(one, "grad_norm")) > 1e-3, "AdamW would make updates of rounding"
    assert column(many, "sample_ids") == column(one, "sample_ids")
    folder = "adapter" if "lora" in case else "model"
    assert largest_difference(weights(many / folder), weights(one / folder)) < LIMIT


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", NARROW)
def test_in_bfloat16_a_mesh_is_one_process_but_for_rounding(
    case: str, mesh: str, place: Path
) -> None:
    one, many = place / "one" / case, place / mesh / case
    for field, limit in ROUNDING.items():
        assert column(many, field) == pytest.approx(column(one, field), rel=limit)
    assert column(many, "loss") != column(one, "loss"), "bfloat16 is not in use"
