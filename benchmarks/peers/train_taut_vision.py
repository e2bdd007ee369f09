"""One run of ``taut sft`` on pictures: ``python train_taut_vision.py JOB.json``.

Modes: ``shared`` (the default) and ``unshared`` (each question has the picture to itself). The checks before a run, and
the evaluation and the checkpoints after it, are off: what is timed is the steps.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from recorder import Job, peak_mb

import taut
from taut.models.cpu import cpu_matmul
from taut.train import trainer

OFF = {"check": "off", "stop_check.prompts": 0, "contract.prompts": 0, "checkpoint.every": 0}


def main() -> None:
    job: Job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    out = Path(job["scratch"], "run")
    spent = watch_steps()
    chosen = {"cpu_matmul": job["cpu_matmul"]} if "cpu_matmul" in job else {}
    import_mb = peak_mb()
    taut.sft(
        model=job["model"],
        data={"train": str(Path(job["data"], "messages.jsonl"))},
        out=str(out),
        steps=job["num_steps"],
        dtype=job["dtype"],
        device="cpu",
        **chosen,
        freeze=["vision_tower"] if job["is_tower_frozen"] else [],
        batch={
            "samples_per_step": job["samples_per_step"],
            "share_prefixes": job["mode"] == "shared",
            "shuffle": False,
        },
        optim={
            "learning_rate": job["learning_rate"],
            "schedule": "constant",
            "warmup_steps": 0,
        },
        **OFF,
    )
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    done = [event for event in events if event["kind"] == "step"]
    steps = [
        {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "loss": event["loss"],
            "rows": [int(sample.rsplit(":", 1)[1]) - 1 for sample in event["sample_ids"]],
            "num_tokens": event["num_tokens_unshared"],
        }
        for event, (seconds, cpu_seconds) in zip(done, spent, strict=True)
    ]
    result = {
        "steps": steps,
        "peak_mb": peak_mb(),
        "import_mb": import_mb,
        "cpu_matmul": cpu_matmul.active().name,
    }
    Path(job["result"]).write_text(json.dumps(result))


def watch_steps() -> list[tuple[float, float]]:
    """Filled with the seconds and the processor seconds of each step, from the end of one to the end of the next."""
    spent: list[tuple[float, float]] = []
    train_step = trainer.train_step
    ends: list[tuple[float, float]] = []

    def timed(*args: Any) -> trainer.StepReport:
        start = ends[-1] if ends else (time.perf_counter(), time.process_time())
        report = train_step(*args)
        ends.append((time.perf_counter(), time.process_time()))
        spent.append((ends[-1][0] - start[0], ends[-1][1] - start[1]))
        return report

    trainer.train_step = timed
    return spent


main()
