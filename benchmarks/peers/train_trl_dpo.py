"""One run of TRL's DPOTrainer: ``python train_trl_dpo.py JOB.json``, in TRL's own environment.

Modes, which differ in how a step's pairs are cut and in whether activations are computed again:

    defaults       8 pairs at a time (the library's default batch), activation checkpointing (TRL's default)
    accumulated    8 pairs at a time
    batch          the step as one batch
    checkpointed   the step as one batch, activation checkpointing

TRL's defaults stay as they are except for what must be equal for all: dtype, order of the pairs, learning rate, the
LoRA adapter's first weights, nothing saved. ``padding_free`` is switched off by TRL 1.16 itself.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, set_peft_model_state_dict
from recorder import Job, Recorder
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer


def batching(job: Job) -> dict[str, Any]:
    """The arguments in which the modes differ."""
    pairs, mode = job["samples_per_step"], job["mode"]
    at_a_time = min(pairs, job["pairs_at_a_time"]) if mode in ("defaults", "accumulated") else pairs
    assert pairs % at_a_time == 0, f"{pairs} pairs do not come in batches of {at_a_time}"
    return {
        "per_device_train_batch_size": at_a_time,
        "gradient_accumulation_steps": pairs // at_a_time,
        "gradient_checkpointing": mode in ("defaults", "checkpointed"),
    }


def make_trainer(job: Job, recorder: Recorder) -> DPOTrainer:
    lora = LoraConfig(**job["lora"], target_modules="all-linear") if job["lora"] else None
    config = DPOConfig(
        output_dir=job["scratch"],
        num_train_epochs=1,
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        bf16=job["dtype"] == "bfloat16",
        max_length=None,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        beta=job["beta"],
        **job["loss"],
        **batching(job),
    )
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            job["model"], dtype=torch.float32, attn_implementation="sdpa"
        ),
        args=config,
        train_dataset=Dataset.from_list(
            [json.loads(line) for line in Path(job["data"], "pairs.jsonl").read_text().splitlines()]
        ),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        peft_config=lora,
        callbacks=[recorder],
    )
    if lora:
        weights = load_file(Path(job["adapter"], "adapter_model.safetensors"))
        found = set_peft_model_state_dict(trainer.model, weights)
        assert not found.unexpected_keys, found.unexpected_keys
    return trainer


def main() -> None:
    job: Job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    recorder = Recorder(job)
    trainer = make_trainer(job, recorder)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    recorder.write(metrics=logged)


main()
