"""One run of taut, of which the memory counts: ``python train_taut_memory.py JOB.json``, or under torchrun.

The peak is that of loading, checking and training; saving comes after it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import peft  # noqa: F401  what every worker imports before memory counts
from footprint import Job, begin, peak_mb
from torch import distributed
from transformers import LlamaForCausalLM  # noqa: F401

import taut
from taut.models.cpu import cpu_matmul
from taut.train import trainer as loop


def main() -> None:
    job: Job = json.loads(Path(sys.argv[1]).read_text())
    begin(job)
    if job["quantize"]:
        import bitsandbytes  # noqa: F401
    device, out = job["device"], Path(job["scratch"], "run")
    import_mb = peak_mb(device)
    peaks: list[float] = []
    of_ranks: list[Any] = []
    train_step = loop.train_step

    def noted(trainer: Any, step: int) -> Any:
        peaks.append(peak_mb(device))
        report = train_step(trainer, step)
        if step == job["num_steps"]:
            mine = {"peak_mb": peak_mb(device), "loaded_mb": peaks[0], "import_mb": import_mb}
            of_ranks.append(mine)
            if distributed.is_initialized():
                of_ranks[:] = [None] * distributed.get_world_size()
                distributed.all_gather_object(of_ranks, mine)
        return report

    loop.train_step = noted
    keys = {
        "model": job["model"],
        "data.train": str(Path(job["data"], "messages.jsonl")),
        "out": str(out),
        "steps": job["num_steps"],
        "dtype": job["dtype"],
        "device": device,
        "lora.rank": job["rank"],
        "quantize": job["quantize"],
        "batch.samples_per_step": job["samples_per_step"],
        "batch.shuffle": False,
        "optim.learning_rate": job["learning_rate"],
        "optim.schedule": "constant",
        "optim.warmup_steps": 0,
        "contract.prompts": 0,
        "stop_check.prompts": 0,
        "save.merged": not job["rank"],
    }
    taut.sft(**{**keys, **job["keys"]})
    if int(os.environ.get("RANK", "0")):
        return
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    steps = [
        {"seconds": event["seconds"], "loss": event["loss"]}
        for event in events
        if event["kind"] == "step"
    ]
    worst = max(of_ranks, key=lambda rank: float(rank["peak_mb"] - rank["import_mb"]))
    result = {"steps": steps, **worst, "ranks": of_ranks, "cpu_matmul": cpu_matmul.active().name}
    Path(job["result"]).write_text(json.dumps(result))


main()
