"""One run of TRL's SFTTrainer, of which the memory counts: ``python train_trl_memory.py JOB.json``.

TRL's defaults stay as they are except for what is equal for all: dtype, order and number of the rows, no saving, and
whether activations are kept.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import peft  # noqa: F401  what every worker imports before memory counts
from datasets import Dataset
from footprint import Job, adapters, begin, load, peak_mb
from recorder import Recorder, read_rows
from transformers import AutoTokenizer, LlamaForCausalLM  # noqa: F401
from trl import SFTConfig, SFTTrainer


def main() -> None:
    job: Job = json.loads(Path(sys.argv[1]).read_text())
    begin(job)
    if job["quantize"]:
        import bitsandbytes  # noqa: F401
    device = job["device"]
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
        gradient_checkpointing=job["checkpointing"],
        completion_only_loss=True,
        train_sampling_strategy="sequential",
        per_device_train_batch_size=job["samples_per_step"],
        max_length=None,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=device == "cpu",
    )
    trainer = SFTTrainer(
        model=load(job),
        args=config,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[recorder],
        peft_config=adapters(job),
    )
    loaded_mb = peak_mb(device)
    trainer.train()
    if device == "cuda":
        recorder.import_mb, recorder.peak_mb = 0.0, peak_mb(device)
    recorder.write(loaded_mb=loaded_mb)


main()
