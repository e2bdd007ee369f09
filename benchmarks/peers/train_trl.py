"""One run of TRL's SFTTrainer: ``python train_trl.py JOB.json``, in TRL's own environment.

Modes: ``padded`` (the default), ``bfd`` (packing), ``padding_free`` and ``single`` (a row
at a time, accumulated). TRL's defaults stay as they
are except for what must be equal for all: dtype, order of the rows, no activation checkpointing, no
saving.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from recorder import Job, Recorder, read_rows
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer


def batching(job: Job) -> dict[str, object]:
    """The arguments in which the modes differ."""
    samples = {"per_device_train_batch_size": job["samples_per_step"]}
    if job["mode"] == "padded":
        return {"max_length": job["pack_length"], **samples}
    if job["mode"] == "single":
        return {
            "max_length": None,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": job["samples_per_step"],
        }
    if job["mode"] == "padding_free":
        return {"padding_free": True, "max_length": None, **samples}
    assert job["mode"] == "bfd", job["mode"]
    # One block at a time: a batch of blocks is laid flat, and its dense mask grows with the square.
    return {
        "packing": True,
        "packing_strategy": "bfd",
        "max_length": job["pack_length"],
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": job["packs_per_step"],
    }


def main() -> None:
    job: Job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    recorder = Recorder(job)
    rows = read_rows(job)
    masks = [[int(k >= r["num_prompt"]) for k in range(len(r["ids"]))] for r in rows]
    data = Dataset.from_dict({"input_ids": [r["ids"] for r in rows], "completion_mask": masks})
    config = SFTConfig(
        output_dir=job["scratch"],
        num_train_epochs=1,
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        bf16=job["dtype"] == "bfloat16",
        gradient_checkpointing=False,
        completion_only_loss=True,
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **batching(job),
    )
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            job["model"], dtype=torch.float32, attn_implementation="sdpa"
        ),
        args=config,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[recorder],
    )
    trainer.train()
    recorder.write()


main()
