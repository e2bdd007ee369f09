"""Completions under the plain model, one at a time: ``python generate_reference.py JOB.json``.

No cache, no batch, float32 on the job's weights (rounded to its dtype). Per completion and token: the log-probability
of the id, how far its logit is below the largest, and entropy and variance of the log-probability there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from generation import Job
from transformers import AutoModelForCausalLM


@torch.no_grad()
def main() -> None:
    job: Job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    model: Any = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=getattr(torch, job["dtype"]), attn_implementation="sdpa"
    )
    model.float().eval()
    scored = []
    for row in job["rows"]:
        ids = torch.tensor(row["completion"])
        whole = torch.tensor([[*row["prompt"], *row["completion"]]])
        hidden = model.model(input_ids=whole, use_cache=False).last_hidden_state[0]
        logits = model.lm_head(hidden[len(row["prompt"]) - 1 : -1]).double()
        logp = logits.log_softmax(-1)
        picked = logits.gather(1, ids[:, None]).squeeze(1)
        entropy = -(logp.exp() * logp).sum(-1)
        scored.append({
            "logp": logp.gather(1, ids[:, None]).squeeze(1).tolist(),
            "below_top": (logits.amax(-1) - picked).tolist(),
            "entropy": entropy.tolist(),
            "variance": ((logp.exp() * logp**2).sum(-1) - entropy**2).tolist(),
        })  # fmt: skip
    Path(job["result"]).write_text(json.dumps(scored))


main()
