"""TRL's GRPO losses and gradients on one rollout of its own: ``python loss_trl_grpo.py JOB.json``.

The reference is the model as it is on disk; the policy that rolls out has been moved from it, and the policy that
trains has been moved again, so that ratios are not 1. Many tokens end a completion: lengths differ. Written beside the
result, as safetensors: the rollout (``batch``), the weights that train (``now``), the gradient of each of the job's
losses (``NAME``). In float64, but for TRL's head, which computes in float32.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from reward import share_of_marks
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

Job = dict[str, Any]
STREAMS = ("old_per_token_logps", "ref_per_token_logps")


def rewards(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    return [share_of_marks(completion[0]["content"]) for completion in completions]


def make_trainer(job: Job, rows: list[Any], settings: dict[str, Any]) -> GRPOTrainer:
    config = GRPOConfig(
        output_dir=job["scratch"],
        bf16=False,
        num_generations=job["group"],
        per_device_train_batch_size=len(rows) * job["group"],
        max_completion_length=job["new_tokens"],
        gradient_checkpointing=False,
        report_to="none",
        use_cpu=True,
        num_iterations=2,
        **settings,
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            job["model"], dtype=torch.float64, attn_implementation="sdpa"
        ),
        reward_funcs=rewards,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
    )


@torch.no_grad()
def move(model: nn.Module, by: float, seed: int) -> None:
    """Add noise to every weight, relative to the spread of its tensor."""
    random = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=random, dtype=parameter.dtype)
        parameter += by * parameter.std(correction=0).clamp(min=0.02) * noise


def roll_out(job: Job, rows: list[Any], now: Path) -> dict[str, Tensor]:
    """What TRL trains on, and the weights that do."""
    trainer = make_trainer(
        job, rows, {"beta": 0.04, "generation_kwargs": {"eos_token_id": job["ends"]}}
    )
    trainer.eos_token_ids = job["ends"]
    move(trainer.model, job["moved"], 1)
    trainer.model.train()
    repeated = [row for row in rows for _ in range(job["group"])]
    batch = trainer._generate_and_score_completions(repeated)
    move(trainer.model, job["moved"], 2)
    save_file({k: v.clone() for k, v in trainer.model.state_dict().items()}, now)
    return dict(batch)


def gradient_of(trainer: GRPOTrainer, weights: dict[str, Tensor], batch: dict[str, Tensor]) -> Any:
    """The loss, and the gradient of every parameter."""
    trainer.model.load_state_dict(weights)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in trainer.model.named_parameters()}


def main() -> None:
    job: Job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    folder = Path(job["folder"])
    rows = [json.loads(line) for line in Path(job["data"]).read_text().splitlines()]
    batch = roll_out(job, rows, folder / "now.safetensors")
    save_file({k: v.contiguous() for k, v in batch.items()}, folder / "batch.safetensors")
    weights = load_file(folder / "now.safetensors")
    found = {}
    for name, variant in job["losses"].items():
        trainer = make_trainer(job, rows, variant["trl"])
        given = {k: v for k, v in batch.items() if not variant["is_fresh"] or k != STREAMS[0]}
        found[name], grads = gradient_of(trainer, weights, given)
        save_file(grads, folder / f"{name}.safetensors")
    Path(job["result"]).write_text(json.dumps({"losses": found}))


main()
