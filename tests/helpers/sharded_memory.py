"""What a rank of two takes, measured and predicted: ``python -m tests.helpers.sharded_memory DIRECTORY`` under
torchrun's variables.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.helpers.chat_runs import QUIET, chats, save_model, write_rows

from taut.config import from_mapping
from taut.methods.method import RunConfig
from taut.plan.memory import measure, predict
from taut.plan.models import Kernels
from taut.plan.workload import workload
from taut.run.inputs import load_inputs
from taut.run.setup import build
from taut.train import distributed

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("llama", {"dtype": "float32"}),
    "bfloat16": ("llama", {"dtype": "bfloat16"}),
    "checkpointing": ("llama", {"dtype": "bfloat16", "activation_checkpointing": True}),
    "lora": ("llama", {"dtype": "bfloat16", "lora.rank": 8}),
    "experts": ("qwen3_moe", {"dtype": "bfloat16"}),
    "tied": ("qwen2", {"dtype": "bfloat16"}),
}
SHAPE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6}
EXPERTS = {"moe_intermediate_size": 128, "num_experts": 8}


def prepare(place: Path) -> None:
    """The models, large enough for weights to count."""
    for name in {name for name, _ in CASES.values()}:
        shape = SHAPE | (EXPERTS if name == "qwen3_moe" else {})
        save_model(place / name, name, **shape)
    write_rows(place / "train.jsonl", chats(24))


def main(place: Path) -> None:
    ranks = distributed.start("cpu")
    found = {}
    for case, (name, keys) in CASES.items():
        fixed = {"model": str(place / name), "data.train": str(place / "train.jsonl"), "steps": 2}
        run = from_mapping(RunConfig, {**QUIET, **fixed, "check": "off", **keys})
        inputs = load_inputs(run, ranks)
        built = build(run, inputs, run.plan(inputs.train), ranks)
        packed = workload(run, inputs, ranks.size).largest
        loaded = built.models.loaded
        kernels = Kernels(loaded.dtype.dtype, loaded.attention.implementation)
        measured = measure(built, packed, is_first=True).bytes
        told = predict(run, inputs.config, kernels, packed, is_first=True, num_ranks=ranks.size)
        found[case] = measured, sum(told.footprint.parts.values()), told.footprint.parts
    if ranks.is_writer:
        (place / "found.json").write_text(json.dumps(found))
    distributed.stop(ranks)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
