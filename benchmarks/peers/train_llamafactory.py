"""One run of LLaMA-Factory's SFT, in its own environment: ``python train_llamafactory.py JOB.json``.

Modes: ``padded`` (its default) and ``neat_packing``. Its text goes through a template that writes
the same ids as the rows have; the recorder fails if one differs.
"""

from __future__ import annotations

import json
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import torch
from recorder import Job, Recorder

# LLaMA-Factory imports torchaudio for audio inputs, and there is none beside CPU torch.
stub = types.ModuleType("torchaudio")
stub.__spec__ = ModuleSpec("torchaudio", None)
sys.modules["torchaudio"] = stub

from llamafactory.data.formatter import EmptyFormatter, StringFormatter  # noqa: E402 - after the stub
from llamafactory.data.template import register_template  # noqa: E402
from llamafactory.train.tuner import run_exp  # noqa: E402


def describe_data(job: Job) -> None:
    """``dataset_info.json``, by which LLaMA-Factory finds its columns."""
    tags = {
        "role_tag": "role",
        "content_tag": "content",
        "user_tag": "user",
        "assistant_tag": "assistant",
    }
    entry = {
        "file_name": "messages.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": tags,
    }
    Path(job["data"], "dataset_info.json").write_text(json.dumps({"rows": entry}))


def batching(job: Job) -> dict[str, object]:
    """The arguments in which the modes differ."""
    if job["mode"] == "padded":
        return {"per_device_train_batch_size": job["samples_per_step"]}
    assert job["mode"] == "neat_packing", job["mode"]
    return {
        "neat_packing": True,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": job["packs_per_step"],
    }


def main() -> None:
    job: Job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    recorder = Recorder(job)
    describe_data(job)
    register_template(
        name="words",
        format_user=StringFormatter(slots=["{{content}} <sep>"]),
        format_assistant=StringFormatter(slots=["{{content}} <eos>"]),
        format_prefix=EmptyFormatter(slots=["<bos>"]),
    )
    arguments = {
        "model_name_or_path": job["model"],
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "rows",
        "dataset_dir": job["data"],
        "template": "words",
        "cutoff_len": job["pack_length"],
        "disable_shuffling": True,
        "output_dir": job["scratch"],
        "overwrite_cache": True,
        "num_train_epochs": 1.0,
        "learning_rate": job["learning_rate"],
        "lr_scheduler_type": "constant",
        "bf16": job["dtype"] == "bfloat16",
        "flash_attn": "sdpa",
        "disable_gradient_checkpointing": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        **batching(job),
    }
    run_exp(arguments, callbacks=[recorder])
    recorder.write()


main()
