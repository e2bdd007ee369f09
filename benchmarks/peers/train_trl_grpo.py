"""One run of TRL's GRPOTrainer: ``python train_trl_grpo.py JOB.json``, in TRL's own environment.

Modes, which differ in how a step's completions are cut for training and in whether activations are computed again:

    defaults       8 completions at a time (the library's default batch), activation checkpointing (TRL's default)
    accumulated    8 completions at a time
    pairs          16 completions at a time
    batch          the step as one batch

TRL's defaults stay as they are except for what must be equal for all: dtype, order of the prompts, learning rate, the
length of a completion, nothing saved. No token ends a completion, so that all have the same length. Several turns are
one completion of as many tokens, those of the messages between them included.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from phases import Phases, peak_mb
from reward import share_of_row
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

Job = dict[str, Any]
AT_A_TIME = {"defaults": 8, "accumulated": 8, "pairs": 16}


class Recorder(TrainerCallback):
    """The time of each step and of its phases, and the memory."""

    def __init__(self) -> None:
        self.import_mb = peak_mb()
        self.phases = Phases()

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.phases.begin()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.phases.end_step()


def rewards(
    completions: list[list[dict[str, str]]], is_silent: list[bool], **kwargs: Any
) -> list[float]:
    return [
        share_of_row(completion[0]["content"], {"is_silent": silent})
        for completion, silent in zip(completions, is_silent, strict=True)
    ]


def make_trainer(job: Job, recorder: Recorder) -> GRPOTrainer:
    size = job["prompts_per_step"] * job["group"]
    at_a_time = min(size, AT_A_TIME.get(job["mode"], size))
    assert size % at_a_time == 0, f"{size} completions do not come in batches of {at_a_time}"
    config = GRPOConfig(
        output_dir=job["scratch"],
        max_steps=job["num_steps"],
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        bf16=job["dtype"] == "bfloat16",
        shuffle_dataset=False,
        num_generations=job["group"],
        max_completion_length=job["tokens_after"],
        generation_kwargs={"eos_token_id": None},
        per_device_train_batch_size=at_a_time,
        gradient_accumulation_steps=size // at_a_time,
        gradient_checkpointing=job["mode"] == "defaults",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **job["trl"],
    )
    prompts = [json.loads(line) for line in Path(job["data"]).read_text().splitlines()]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            job["model"], dtype=torch.float32, attn_implementation="sdpa"
        ),
        reward_funcs=rewards,
        args=config,
        train_dataset=Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[recorder],
    )
    trainer.eos_token_ids = []
    recorder.phases.watch(trainer, "_generate_single_turn", "generation")
    recorder.phases.watch(trainer, "_generate_and_score_completions", "scoring")
    return trainer


def main() -> None:
    job: Job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    recorder = Recorder()
    trainer = make_trainer(job, recorder)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    size = job["prompts_per_step"] * job["group"]
    steps, seen = [], 0.0
    for timed, entry in zip(recorder.phases.steps, logged, strict=True):
        completion_tokens = entry["completions/mean_length"] * size
        prompt_tokens = entry["num_tokens"] - seen - completion_tokens
        seen = entry["num_tokens"]
        own = {name: entry[name] for name in ("loss", "reward", "entropy")}
        tokens = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
        steps.append(timed | own | tokens)
    result = {
        "steps": steps,
        "peak_mb": recorder.phases.peak_mb + recorder.phases.helpers_mb,
        "import_mb": recorder.import_mb,
    }
    Path(job["result"]).write_text(json.dumps(result))


main()
