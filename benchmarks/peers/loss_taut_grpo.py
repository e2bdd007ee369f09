"""taut's losses and gradients on the rollout of TRL that ``loss_trl_grpo.py`` has left: ``python loss_taut_grpo.py
JOB.json``.

The group of a prompt is one tree; denominators are those of the loop. For each loss: its value, and the distance of its
gradient from TRL's, over all parameters, relative to the length of TRL's. In float64.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from taut.data.packing import pack
from taut.inference.factory import open_engine
from taut.inference.local import LocalEngine
from taut.inference.settings import ModelUse
from taut.losses.loss import count_units
from taut.losses.policy import PolicyGradient
from taut.methods.grpo import GrpoConfig
from taut.models.precision import backward_context, compute_context
from taut.models.scorer import Scorer
from taut.types import Packed, Sample

Job = dict[str, Any]
HELD = ("clip/low", "clip/high")
STREAMS = {"old_logp_N": "old_per_token_logps", "ref_logp_N": "ref_per_token_logps"}


def main() -> None:
    job: Job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    folder = Path(job["folder"])
    opened = open_engine(ModelUse(model=job["model"], dtype="float64", device="cpu"))
    assert isinstance(opened.engine, LocalEngine)
    scorer = opened.engine.scorer
    scorer.model.load_state_dict(load_file(folder / "now.safetensors"))
    scorer.requires_grad_()
    batch = load_file(folder / "batch.safetensors")
    microbatches = [pack(group) for group in grouped(samples_of(batch, folder), job["group"])]
    found = {}
    for name, variant in job["losses"].items():
        loss = GrpoConfig(**variant["taut"]).make_loss(
            temperature=variant["temperature"],
            limit=job["new_tokens"],
            is_fresh=variant["is_fresh"],
            has_engine_logp=False,
        )
        value, held = add_gradients(scorer, loss, microbatches)
        expected = load_file(folder / f"{name}.safetensors")
        found[name] = {"loss": value, "held": held, **distances(scorer, expected)}
        scorer.zero_grad()
    sizes = {
        "num_targets": sum(one.num_targets for one in microbatches),
        "num_samples": sum(one.num_samples for one in microbatches),
    }
    Path(job["result"]).write_text(json.dumps({"losses": found, **sizes}))


def samples_of(batch: Mapping[str, Tensor], folder: Path) -> list[Sample]:
    """TRL's rows without their pads."""
    samples = []
    for row in range(len(batch["prompt_ids"])):
        prompt_ids = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
        is_own = batch["completion_mask"][row].bool()
        ids_T = torch.cat([prompt_ids, batch["completion_ids"][row][is_own]]).numpy()
        num_targets = int(is_own.sum())
        streams = {
            ours: batch[theirs][row][is_own].double().numpy() for ours, theirs in STREAMS.items()
        }
        streams["advantage_N"] = np.full(num_targets, float(batch["advantages"][row]))
        at_N = np.arange(prompt_ids.numel(), ids_T.size)
        samples.append(Sample(f"row {row}", ids_T, at_N, np.ones(num_targets), streams=streams))
    return samples


def grouped(samples: Sequence[Sample], size: int) -> list[Sequence[Sample]]:
    return [samples[at : at + size] for at in range(0, len(samples), size)]


def add_gradients(
    scorer: Scorer, loss: PolicyGradient, microbatches: Sequence[Packed]
) -> tuple[float, float]:
    """As the loop has it: each term by its count over the step. The loss, and the share of tokens held."""
    counts = {
        term: sum(count_units(unit, packed) for packed in microbatches)
        for term, unit in loss.units.items()
    }
    value, held, num_targets = 0.0, 0.0, 0.0
    for packed in microbatches:
        with compute_context(torch.float64, scorer.device):
            scores = scorer(packed, wants=loss.wants)
        sums = loss(scores, packed)
        total = torch.stack([sums.terms[term] / n for term, n in counts.items()]).sum()
        with backward_context(torch.float64):
            total.backward()  # type: ignore[no-untyped-call]
        value += total.item()
        held += sum(float(sums.metrics[name][0]) for name in HELD if name in sums.metrics)
        num_targets += packed.num_targets
    return value, held / num_targets


def distances(scorer: Scorer, expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Of the whole gradient, and of the parameter where it is largest; relative to the whole, and to its own."""
    ours = {name: p.grad for name, p in scorer.model.named_parameters() if p.grad is not None}
    assert ours.keys() == expected.keys(), f"{ours.keys() ^ expected.keys()}"
    gaps = {name: float((ours[name] - expected[name]).norm()) for name in ours}
    sizes = {name: float(expected[name].norm()) for name in ours}
    return {
        "gradient": float(
            np.linalg.norm(list(gaps.values())) / np.linalg.norm(list(sizes.values()))
        ),
        "worst_parameter": max(gaps[name] / sizes[name] for name in ours),
        "gradient_norm": float(np.linalg.norm(list(sizes.values()))),
    }


main()
