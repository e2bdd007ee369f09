"""ms-swift beside taut: ``python beside_swift.py JOBS.json``, in its own environment.

A job's words are those of ``swift``. What GRPO samples is left in ``rollouts.jsonl``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from forks import run_all
from swift.pipelines import pretrain_main, rlhf_main, sft_main
from swift.rlhf_trainers import GRPOTrainer

MAINS = {"sft": sft_main, "pt": pretrain_main, "rlhf": rlhf_main}


def run(words: list[str]) -> None:
    MAINS[words[0]](words[1:])


def record_rollouts() -> None:
    """The batch of each step as a line: the ids of its prompts and completions, without pads."""
    original = GRPOTrainer.compute_loss

    def recorded(trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        [batch] = inputs if isinstance(inputs, list) else [inputs]
        rows: dict[str, list[list[int]]] = {"prompt": [], "completion": []}
        own = batch["model_inputs"]
        is_own = batch["grpo_batch"].completion_mask
        for ids, mask, is_sampled in zip(
            own["input_ids"], own["attention_mask"], is_own, strict=True
        ):
            whole, num_sampled = ids[mask.bool()].tolist(), int(is_sampled.sum())
            rows["prompt"].append(whole[:-num_sampled])
            rows["completion"].append(whole[-num_sampled:])
        with Path("rollouts.jsonl").open("a") as lines:
            lines.write(f"{json.dumps(rows)}\n")
        return original(trainer, model, inputs, *args, **kwargs)

    GRPOTrainer.compute_loss = recorded


torch.set_num_threads(1)
record_rollouts()
run_all(run)
