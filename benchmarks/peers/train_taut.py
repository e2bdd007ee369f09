"""One run of taut: ``python train_taut.py JOB.json``.

Modes: ``shared`` (the default) and ``unshared`` (every row has its prefix to itself).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from recorder import Job, peak_mb

import taut
from taut.models.cpu import cpu_matmul


def main() -> None:
    job: Job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    out = Path(job["scratch"], "run")
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
    )
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    steps = [
        {
            "seconds": event["seconds"],
            "loss": event["loss"],
            "rows": [line_number(sample) - 1 for sample in event["sample_ids"]],
            "num_tokens": event["num_tokens"],
        }
        for event in events
        if event["kind"] == "step"
    ]
    result = {
        "steps": steps,
        "peak_mb": peak_mb(),
        "import_mb": import_mb,
        "cpu_matmul": cpu_matmul.active().name,
    }
    Path(job["result"]).write_text(json.dumps(result))


def line_number(sample_id: str) -> int:
    """``messages.jsonl:17`` -> 17"""
    return int(sample_id.rsplit(":", 1)[1])


main()
