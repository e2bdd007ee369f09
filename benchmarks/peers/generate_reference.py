"""Completions under the plain model, one at a time: ``python generate_reference.py JOB.json``.

No cache, no batch, float32 on the job's weights (rounded to its dtype). Per completion and token: the log-probability
of the id, the same computed in the job's dtype, how far its logit is below the largest, and entropy and variance of
the log-probability there.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from generation import Job
from torch import Tensor
from transformers import AutoModelForCausalLM


def logits_of(model: Any, row: Job) -> Tensor:
    """Of each token of the completion, in float64."""
    whole = torch.tensor([[*row["prompt"], *row["completion"]]])
    hidden = model.model(input_ids=whole, use_cache=False).last_hidden_state[0]
    logits: Tensor = model.lm_head(hidden[len(row["prompt"]) - 1 : -1])
    return logits.double()


@torch.no_grad()
def main() -> None:
    job: Job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    narrow: Any = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=getattr(torch, job["dtype"]), attn_implementation="sdpa"
    ).eval()
    model = copy.deepcopy(narrow).float()
    scored = []
    for row in job["rows"]:
        ids = torch.tensor(row["completion"])[:, None]
        logits = logits_of(model, row)
        logp = logits.log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        in_dtype = logits_of(narrow, row).log_softmax(-1)
        scored.append({
            "logp": logp.gather(1, ids).squeeze(1).tolist(),
            "logp_in_dtype": in_dtype.gather(1, ids).squeeze(1).tolist(),
            "below_top": (logits.amax(-1) - logits.gather(1, ids).squeeze(1)).tolist(),
            "entropy": entropy.tolist(),
            "variance": ((logp.exp() * logp**2).sum(-1) - entropy**2).tolist(),
        })  # fmt: skip
    Path(job["result"]).write_text(json.dumps(scored))


main()
