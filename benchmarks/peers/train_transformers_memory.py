"""One run of the plain loop over transformers' model: ``python train_transformers_memory.py JOB.json``.

All weights or peft's adapters, AdamW, gradients clipped at 1, all rows of a step in one batch; autocast where the job
computes in bfloat16.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import peft
import torch
from footprint import Job, adapters, begin, load, peak_mb, synchronize
from recorder import read_rows
from transformers import LlamaForCausalLM  # noqa: F401  what every worker imports before memory counts


def main() -> None:
    job: Job = json.loads(Path(sys.argv[1]).read_text())
    begin(job)
    if job["quantize"]:
        import bitsandbytes  # noqa: F401
    device, compute = job["device"], getattr(torch, job["dtype"])
    import_mb = peak_mb(device)
    model = load(job)
    settings = adapters(job)
    if settings is not None:
        model = peft.get_peft_model(model, settings)
    if job["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=job["learning_rate"], weight_decay=0.0, fused=True)
    loaded_mb, rows, steps = peak_mb(device), read_rows(job), []
    model.train()
    for step in range(job["num_steps"]):
        synchronize(device)
        began = time.perf_counter()
        some = rows[step * job["samples_per_step"] :][: job["samples_per_step"]]
        ids = torch.tensor([row["ids"] for row in some], device=device)
        labels = ids.clone()
        for label, row in zip(labels, some, strict=True):
            label[: row["num_prompt"]] = -100
        with torch.autocast(device, dtype=compute, enabled=compute != torch.float32):
            loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found = float(loss.detach())
        synchronize(device)
        steps.append({"seconds": time.perf_counter() - began, "loss": found})
    result = {
        "steps": steps,
        "peak_mb": peak_mb(device),
        "loaded_mb": loaded_mb,
        "import_mb": import_mb,
    }
    Path(job["result"]).write_text(json.dumps(result))


main()
