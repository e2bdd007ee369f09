"""One run of ``taut dpo``: ``python train_taut_dpo.py JOB.json``.

Modes: ``shared`` (the default) and ``unshared`` (each answer has the prompt to itself). The checks before a run, and
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
NAMES = {"rewards/margin": "rewards/margins", "rewards/accuracy": "rewards/accuracies"}
"""Metrics that TRL calls by another name."""


def main() -> None:
    job: Job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    out = Path(job["scratch"], "run")
    cpu_seconds = watch_steps()
    lora = job["lora"] and {"rank": job["lora"]["r"], "alpha": job["lora"]["lora_alpha"]}
    chosen = {"cpu_matmul": job["cpu_matmul"]} if "cpu_matmul" in job else {}
    import_mb = peak_mb()
    taut.dpo(
        model=job["model"],
        data={"train": str(Path(job["data"], "pairs.jsonl"))},
        out=str(out),
        steps=job["num_steps"],
        dtype=job["dtype"],
        device="cpu",
        **chosen,
        batch={
            "samples_per_step": job["samples_per_step"],
            "tokens_per_microbatch": job["tokens_at_a_time"],
            "share_prefixes": job["mode"] == "shared",
            "shuffle": False,
        },
        optim={
            "learning_rate": job["learning_rate"],
            "schedule": "constant",
            "warmup_steps": 0,
        },
        lora=lora or {},
        dpo={"beta": job["beta"], **job["loss"]},
        **OFF,
    )
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    done = [event for event in events if event["kind"] == "step"]
    steps = [
        {
            "seconds": event["seconds"],
            "cpu_seconds": cpu,
            "loss": event["loss"],
            "rows": [row_of(sample) for sample in event["sample_ids"]],
            "num_tokens": event["num_tokens_unshared"],
        }
        for event, cpu in zip(done, cpu_seconds, strict=True)
    ]
    metrics = [{NAMES.get(name, name): value for name, value in one.items()} for one in done]
    result = {
        "steps": steps,
        "peak_mb": peak_mb(),
        "import_mb": import_mb,
        "cpu_matmul": cpu_matmul.active().name,
        "metrics": metrics,
    }
    Path(job["result"]).write_text(json.dumps(result))


def watch_steps() -> list[float]:
    """Filled with the processor seconds of each step."""
    seconds: list[float] = []
    train_step = trainer.train_step

    def timed(*args: Any) -> trainer.StepReport:
        start = time.process_time()
        report = train_step(*args)
        seconds.append(time.process_time() - start)
        return report

    trainer.train_step = timed
    return seconds


def row_of(sample_id: str) -> int:
    """``pairs.jsonl:17#2`` -> 33, the rejected answer of the 17th pair."""
    line, number = sample_id.rsplit(":", 1)[1].split("#")
    return 2 * (int(line) - 1) + int(number) - 1


main()
