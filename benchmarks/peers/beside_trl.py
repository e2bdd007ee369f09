"""TRL beside taut: ``python beside_trl.py JOBS.json``, in TRL's own environment.

``sft``, ``dpo``, ``kto``, ``reward`` and ``grpo`` are TRL's own programs. Those of ORPO, CPO and GKD are not installed
with it; here they are the few lines that its examples have. What GRPO samples is left in ``rollouts.jsonl``.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from forks import run_all
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

EXAMPLES = {
    "orpo": (ORPOConfig, ORPOTrainer),
    "cpo": (CPOConfig, CPOTrainer),
    "gkd": (GKDConfig, GKDTrainer),
}


def run(words: list[str]) -> None:
    method, *options = words
    sys.argv = [f"{method}.py", *options]
    if method in EXAMPLES:
        run_example(*EXAMPLES[method])
        return
    program: Any = import_module(f"trl.scripts.{method}")
    program.main(*program.make_parser().parse_args_and_config(fail_with_unknown_args=False)[:4])


def run_example(config_class: Any, trainer_class: Any) -> None:
    parser = TrlParser((ScriptArguments, config_class, ModelConfig))
    script, training, model = parser.parse_args_and_config()
    names: dict[str, Any] = {"model": model.model_name_or_path}
    if trainer_class is GKDTrainer:
        names["teacher_model"] = training.teacher_model_name_or_path
    else:
        names["model"] = AutoModelForCausalLM.from_pretrained(model.model_name_or_path)
    trainer = trainer_class(
        **names,
        args=training,
        train_dataset=load_dataset(script.dataset_name)[script.dataset_train_split],
        processing_class=AutoTokenizer.from_pretrained(model.model_name_or_path),
        peft_config=get_peft_config(model),
    )
    trainer.train()


def record_rollouts() -> None:
    """Each phase as a line: the ids of its prompts and completions, without pads."""
    original = GRPOTrainer._generate_and_score_completions

    def recorded(trainer: GRPOTrainer, inputs: Any) -> Any:
        batch = original(trainer, inputs)
        rows = {
            part: [
                ids[mask.bool()].tolist()
                for ids, mask in zip(batch[f"{part}_ids"], batch[f"{part}_mask"], strict=True)
            ]
            for part in ("prompt", "completion")
        }
        with Path("rollouts.jsonl").open("a") as lines:
            lines.write(f"{json.dumps(rows)}\n")
        return batch

    GRPOTrainer._generate_and_score_completions = recorded


torch.set_num_threads(1)
record_rollouts()
run_all(run)
