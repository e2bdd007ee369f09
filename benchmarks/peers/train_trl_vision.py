"""One run of TRL's SFTTrainer on pictures: ``python train_trl_vision.py JOB.json``, in TRL's own environment.

Modes, which differ in how a step's rows are cut and in whether activations are computed again:

    defaults       8 rows at a time (the library's default batch), activation checkpointing (TRL's default)
    batch          the step as one batch
    accumulated    the rows of a picture at a time: next to nothing is padded

TRL 1.16 refuses to pack pictures ("Packing is not supported for vision datasets.") and to lay them flat ("Padding-free
training is yet not supported for vision datasets."). Rows are prompts with completions, of which it learns the
completions. Its defaults stay as they are except for what must be equal for all: dtype, order of the rows, no limit on
their length, learning rate, nothing saved.

The Qwen processors need torchvision, whose build for CUDA loads beside CPU torch once the schemas of its two operators
are known; both are of no use here. transformers looks for it once, so it is imported after that.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

Job = dict[str, Any]
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def load_torchvision(folder: str) -> torch.library.Library:
    """Put what pictures need on the path; the library has to be kept."""
    sys.path.insert(0, folder)
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(name + SCHEMA)
    import torchvision  # noqa: F401

    return operators


def batching(job: Job) -> dict[str, Any]:
    """The arguments in which the modes differ."""
    rows, mode = job["samples_per_step"], job["mode"]
    at_a_time = {"defaults": 8, "batch": rows, "accumulated": job["rows_per_picture"]}[mode]
    assert rows % at_a_time == 0, f"{rows} rows do not come in batches of {at_a_time}"
    return {
        "per_device_train_batch_size": at_a_time,
        "gradient_accumulation_steps": rows // at_a_time,
        "gradient_checkpointing": mode == "defaults",
    }


def make_data(job: Job) -> Any:
    """The rows; a picture is a path until a batch needs it."""
    from datasets import Dataset, Image, List

    folder = Path(job["data"])
    rows = [json.loads(line) for line in (folder / "asked.jsonl").read_text().splitlines()]
    for row in rows:
        row["images"] = [str(folder / name) for name in row["images"]]
    return Dataset.from_list(rows).cast_column("images", List(Image()))


def make_processor(model: str) -> Any:
    """As ``AutoProcessor`` makes one of a published model's files."""
    from transformers import (
        AutoImageProcessor,
        AutoTokenizer,
        Qwen2_5_VLProcessor,
        Qwen2VLVideoProcessor,
    )

    tokenizer = AutoTokenizer.from_pretrained(model)
    pictures = AutoImageProcessor.from_pretrained(model)
    return Qwen2_5_VLProcessor(
        pictures, tokenizer, Qwen2VLVideoProcessor(), chat_template=tokenizer.chat_template
    )


def main() -> None:
    job: Job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    kept = load_torchvision(job["packages"])
    from recorder import Recorder
    from transformers import AutoModelForImageTextToText
    from trl import SFTConfig, SFTTrainer

    recorder = Recorder(job)
    config = SFTConfig(
        output_dir=job["scratch"],
        num_train_epochs=1,
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        bf16=job["dtype"] == "bfloat16",
        max_length=None,
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **batching(job),
    )
    model = AutoModelForImageTextToText.from_pretrained(
        job["model"], dtype=torch.float32, attn_implementation="sdpa"
    )
    model.model.visual.requires_grad_(not job["is_tower_frozen"])
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=make_data(job),
        processing_class=make_processor(job["model"]),
        callbacks=[recorder],
    )
    trainer.train()
    recorder.write()
    del kept


main()
