"""The loss every framework must start at: ``python reference.py JOB.json``.

Each row alone through the plain Hugging Face model (float32, sdpa, no cache), log-softmax in
float64. Writes per row the summed negative log-probability of its targets.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from recorder import Job, read_rows
from transformers import AutoModelForCausalLM


@torch.no_grad()
def main() -> None:
    job: Job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    rows = read_rows(job)
    model = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    sums = {}
    for number in job["rows"]:
        ids = torch.tensor(rows[number]["ids"])
        start = rows[number]["num_prompt"]
        hidden = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        logits = model.lm_head(hidden[start - 1 : -1]).double()
        sums[number] = float(
            torch.nn.functional.cross_entropy(logits, ids[start:], reduction="sum")
        )
    Path(job["result"]).write_text(json.dumps(sums))


main()
