"""A quantized base on every mesh is that of one process: the same codes, of which a rank holds its part, and the same
losses and adapters in float32. A checkpoint of two ranks goes on in one.

    make test-parallel
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.chat_runs import column, events, largest_difference, save_model, weights
from tests.helpers.forked_processes import run
from tests.helpers.online_runs import train
from tests.invariants.test_meshes import MESHES, keys_of
from tests.invariants.test_ranks import by_ranks

from taut.models import architecture
from taut.models.attention_backends import PREFIX
from taut.models.load import load_model
from taut.models.quantized.frozen_storage import Storage
from taut.models.quantized.quantized_storage import names_of_rows

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.parallel

LIMIT, ADAPTER_LIMIT, BF16_LIMIT = 1e-6, 1e-5, 0.02
"""Of losses and gradient norms in float32; of adapters, since AdamW divides by gradients, small ones too; and of losses
in bfloat16, where shards compute without autocast."""
RUNS: dict[str, dict[str, Any]] = {
    "sft, nf4": {"quantize": "nf4", "checkpoint.every": 1, "check": "quick"},
    "sft, int8": {"quantize": "int8", "activation_checkpointing": True},
    "dpo, nf4": {"quantize": "nf4"},
    "sft, nf4, bfloat16": {"quantize": "nf4", "dtype": "bfloat16"},
    "sft, narrow experts": {"frozen_dtype": "checkpoint", "check": "quick"},
    "sft, nf4, experts": {"quantize": "nf4", "activation_checkpointing": True, "check": "quick"},
    "grpo, nf4": {"quantize": "nf4", "grpo.kl_coef": 0.1, "save.merged": False},
}
LOAD = """\
import hashlib, json, sys, torch
from pathlib import Path
from tests.helpers.tiny_samples import nested_family
from taut.data.packing import ALONE, pack
from taut.models.quantized.frozen_storage import Storage
from taut.models.load import load_model
from taut.models.lora.adapters import LoraConfig, apply_lora
from taut.models.quantized.quantized_storage import names_of_rows
from taut.models.scorer import Scorer
from taut.train import distributed
from bitsandbytes import functional

numbers = []

def counting(quantize):
    def count(weight, *args, **kwargs):
        numbers.append(weight.numel())
        return quantize(weight, *args, **kwargs)
    return count

functional.quantize_4bit = counting(functional.quantize_4bit)
functional.int8_vectorwise_quant = counting(functional.int8_vectorwise_quant)
ranks = distributed.start("cpu", ParallelConfig(replicas=int(sys.argv[4])))
share = ranks.mesh.size(ranks.mesh.ndim - 1)
model = load_model(sys.argv[1], dtype=torch.float32, device=ranks.device, attention="taut_reference",
                   storage=Storage(torch.bfloat16, torch.bfloat16, sys.argv[2]),
                   shard=distributed.layer_sharding(ranks, torch.float32))
quantized = sum(numbers)
rows = [(name, model.get_parameter(name)) for name in names_of_rows(model)]
held = {name: row._local_tensor.untyped_storage().nbytes() for name, row in rows}
shares = {name: -(-row.shape[0] // share) * row[0].numel() for name, row in rows}

def digest():
    found = hashlib.sha256()
    for name in names_of_rows(model):
        row = model.get_parameter(name)
        found.update(distributed.whole_of(row, distributed.local(row)).detach().numpy().tobytes())
    return found.hexdigest()

read = digest()
scorer = Scorer(apply_lora(model, LoraConfig(rank=2)))
distributed.shard(scorer, ranks, torch.float32)
trained = [p for p in scorer.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=0.01)
for _ in range(2):
    (-scorer(pack(nested_family(97), ALONE)).logp_N.mean()).backward()
    optimizer.step()
distributed.reshard(scorer)
found = {"held": held, "shares": shares, "read": read, "trained": digest(), "quantized": quantized}
Path(sys.argv[3], str(ranks.rank)).write_text(json.dumps(found))
distributed.stop(ranks)
"""
"""A program that loads a quantized model and trains it for two steps; each rank writes what it holds, and the digests
of all codes before and after."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs by one process, and by the ranks of each mesh."""
    place = tmp_path_factory.mktemp("quantized")
    models = {
        name: save_model(place / name, name, dtype=torch.bfloat16)
        for name in ("qwen2", "qwen3_moe")
    }
    todo: dict[str, list[dict[str, Any]]] = {mesh: [] for mesh in MESHES}
    for name, given in RUNS.items():
        fixed = {"steps": 2, "contract.prompts": 0, "check": "off", "lora.rank": 4}
        fixed["dtype"] = "float32"
        architecture = "qwen3_moe" if "experts" in name else "qwen2"
        model, method = models[architecture], name.split(",")[0]
        keys = keys_of(architecture, method, model, place / "data") | fixed | given
        train(keys | {"out": str(place / "one" / name)})
        for mesh, (_, replicas) in MESHES.items():
            todo[mesh].append(
                keys | {"out": str(place / mesh / name), "parallel.replicas": replicas}
            )
    for mesh, runs in todo.items():
        by_ranks(place, runs, MESHES[mesh][0])
    return place


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", RUNS)
def test_a_mesh_equals_one_process(name: str, mesh: str, place: Path) -> None:
    one, many = place / "one" / name, place / mesh / name
    limit = BF16_LIMIT if "bfloat16" in name else LIMIT
    for field in ("loss", "grad_norm"):
        assert column(many, field) == pytest.approx(column(one, field), rel=limit, abs=limit)
    if limit > LIMIT:
        return
    assert largest_difference(weights(many / "adapter"), weights(one / "adapter")) < ADAPTER_LIMIT
    failed = [event["name"] for event in events(many, "check") if event["outcome"] == "failed"]
    assert not failed


def test_a_checkpoint_of_two_ranks_goes_on_in_one_process(place: Path) -> None:
    name = "sft, nf4"
    one, two = place / "one" / name, place / "2" / name
    shutil.rmtree(two / "checkpoints" / "step-000002")
    shutil.rmtree(two / "model")  # as if it had been killed before its end
    keys = keys_of("qwen2", "sft", place / "qwen2", place / "data") | RUNS[name]
    keys |= {"steps": 2, "contract.prompts": 0, "lora.rank": 4, "dtype": "float32"}
    train(keys | {"out": str(two), "resume": True})
    assert events(two, "resume")[0]["from_step"] == 1
    assert column(two, "loss") == pytest.approx(column(one, "loss"), rel=LIMIT)
    assert largest_difference(weights(two / "adapter"), weights(one / "adapter")) < ADAPTER_LIMIT


ROWS = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
EXPERTS = {**ROWS, "moe_intermediate_size": 64}
BASES: dict[str, tuple[str, dict[str, int]]] = {
    "whole blocks in rows": ("qwen2", ROWS),
    "blocks across rows": ("qwen2", {}),
    "experts": ("qwen3_moe", EXPERTS),
    "uneven experts": ("qwen3_moe", {**EXPERTS, "num_experts": 3}),
    "a rank without experts": (
        "qwen3_moe",
        {**EXPERTS, "num_experts": 1, "num_experts_per_tok": 1},
    ),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *((kind, "nf4") for kind in BASES),
        *((kind, "int8") for kind in ("whole blocks in rows", "experts")),
    ],
)
def test_each_rank_holds_its_part_of_the_same_codes(
    kind: str, mesh: str, how: Any, tmp_path: Path
) -> None:
    name, sizes = BASES[kind]
    base = save_model(tmp_path / "base", name, dtype=torch.bfloat16, **sizes)
    whole = load_model(
        str(base),
        dtype=torch.float32,
        device=torch.device("cpu"),
        attention=PREFIX + "reference",
        storage=Storage(torch.bfloat16, torch.bfloat16, how),
    )
    expected, names = hashlib.sha256(), names_of_rows(whole)
    for row in names:
        expected.update(whole.get_parameter(row).detach().numpy().tobytes())
    (tmp_path / "program.py").write_text(LOAD)
    num_ranks, replicas = MESHES[mesh]
    words = (tmp_path / "program.py", base, how, tmp_path, str(replicas))
    done = run(*words, num_ranks=num_ranks)
    assert done.returncode == 0, done.stderr
    every = sum(architecture.linear_sizes(whole)[row] for row in names)
    for rank in range(num_ranks):
        found = json.loads((tmp_path / str(rank)).read_text())
        assert found["read"] == found["trained"] == expected.hexdigest()
        assert found["held"].keys() == set(names)
        assert all(held <= found["shares"][row] for row, held in found["held"].items())
        if kind == "blocks across rows" and how == "nf4":
            assert found["quantized"] == every
        elif kind in ("whole blocks in rows", "experts"):
            assert found["quantized"] == every * replicas // num_ranks


def test_a_weight_with_other_rows_ends_all_ranks(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "qwen2", dtype=torch.bfloat16, **ROWS)
    settings = json.loads((base / "config.json").read_text())
    settings["num_key_value_heads"] = 4  # of 2
    (base / "config.json").write_text(json.dumps(settings))
    (tmp_path / "program.py").write_text(LOAD)
    done = run(tmp_path / "program.py", base, "nf4", tmp_path, "1", num_ranks=2)
    assert done.returncode != 0
    expected = "found 16 rows as this rank's part of a weight of [64, 64]; expected 32, as config.json says"
    assert expected in done.stderr
