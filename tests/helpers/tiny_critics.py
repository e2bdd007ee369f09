"""A policy with a critic beside it, the states it is read in, and a few steps of both, by however many ranks.

As a program, by ranks: ``python -m tests.helpers.tiny_critics PLACE`` takes the steps on every rank and leaves what was
seen.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.helpers.tiny_models import save_tiny
from tests.helpers.tiny_samples import nested_family
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from torch import Tensor

from taut.attention.layout import Layout
from taut.data.packing import ALONE, PackPolicy, pack
from taut.models.heads import OwnCritic
from taut.models.load import ShardLayers, load_model
from taut.models.precision import compute_context
from taut.models.scorer import Scorer
from taut.rl.critic import build_critic, save_critic
from taut.rl.settings import CriticConfig
from taut.train import distributed, optim, sharded
from taut.train.distributed import Ranks
from taut.train.settings import OptimConfig
from taut.types import Packed, Sample, Scores, Wants

CPU = torch.device("cpu")
ONE = Ranks(0, 1, CPU)
SHARE_ALL = PackPolicy(share_prefixes=True, min_saved_tokens=1)
BOTH = Wants(scalar=True)
VALUES = Wants(logp=False, scalar=True)
ATTENTION = "taut_reference"
RATE = 1e-2

KINDS: dict[str, dict[str, Any]] = {
    "own": {"kind": "own", "model": "critic", "head": "normal"},
    "shared": {"kind": "shared", "head": "normal"},
}


def save_models(place: Path) -> Path:
    """A policy, and a language model of another architecture and width to make a critic of, in float64."""
    save_tiny("llama", place / "policy", tiny_tokenizer(), dtype=torch.float64)
    save_tiny("gemma2", place / "critic", tiny_tokenizer(), dtype=torch.float64, hidden_size=48)
    return place


def setting_of(place: Path, policy: torch.nn.Module, **settings: Any) -> dict[str, Any]:
    """Arguments of ``build_critic``."""
    fixed = {"dtype": torch.float64, "device": CPU, "attention": ATTENTION, "longest": 64}
    return {"policy": policy, "path": str(place / "policy"), **fixed, **settings}


def load(path: Path, shard: ShardLayers | None = None) -> torch.nn.Module:
    return load_model(str(path), dtype=torch.float64, device=CPU, attention=ATTENTION, shard=shard)


def make(
    place: Path, settings: dict[str, Any], shard: ShardLayers | None = None, **common: Any
) -> Scorer:
    """A scorer in float64 with a critic; paths are relative to ``place``."""
    named = {"model": str(place / settings["model"])} if "model" in settings else {}
    policy = load(place / "policy", shard)
    config = CriticConfig(**settings | named)
    critic, _ = build_critic(config, **setting_of(place, policy, shard=shard, **common))
    return Scorer(policy, critic=critic)


def judged() -> list[Sample]:
    """Nested samples that are read where each target is chosen; prefixes are read by several."""
    rows = []
    for number, sample in enumerate(nested_family(90)):
        reads = sample.target_at_N - 1
        returns = np.random.default_rng(number).normal(size=reads.size)
        rows.append(replace(sample, read_at_R=reads, read_values={"return": returns}))
    return rows


def cost(scores: Scores, packed: Packed) -> Tensor:
    """Something of the policy and something of the critic."""
    assert scores.scalar_R is not None
    error_R = scores.scalar_R - packed.read_values["return"]
    return 0.5 * error_R.square().sum() - (packed.weight_N * scores.logp_N).sum()


def add_gradient(scorer: Scorer, layouts: Sequence[Packed], scale: float = 1.0) -> float:
    """The cost of some micro-batches, and its gradient added."""
    total = 0.0
    with compute_context(torch.float64, CPU):
        for packed in layouts:
            found = scale * cost(scorer(packed, wants=BOTH), packed)
            found.backward()
            total += float(found.detach())
    return total


def gradients(scorer: Scorer) -> dict[str, Tensor]:
    return {name: p.grad for name, p in scorer.named_parameters() if p.grad is not None}


def steps(place: Path, kind: str, ranks: Ranks, num_steps: int = 3) -> list[list[float]]:
    """What some updates come to. Each rank has its share of two micro-batches."""
    shard = distributed.layer_sharding(ranks, torch.float64)
    scorer, config = make(place, KINDS[kind], shard=shard), OptimConfig(learning_rate=RATE)
    assert scorer.critic is not None
    if isinstance(scorer.critic, OwnCritic):
        distributed.shard(scorer.critic, ranks, torch.float64)
    distributed.shard(scorer, ranks, torch.float64)
    pace = CriticConfig(learning_rate=2 * RATE, warmup_steps=1).pace(config, RATE)
    optimizer = optim.build_optimizer(scorer, config, pace)
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    layouts = [pack(judged()[::2], SHARE_ALL), pack(judged()[1::2], SHARE_ALL)]
    seen = []
    for step in range(1, num_steps + 1):
        mine = layouts[ranks.rank :: ranks.size]
        said = [before_the_step(scorer, packed) for packed in mine]
        with distributed.summing_gradients(trained, ranks):
            loss = add_gradient(scorer, mine, 1 / 100)
        norms = {name: float(norm) for name, norm in optim.clip(optimizer, 1.0).items()}
        optim.set_learning_rate(optimizer, RATE, step)
        optimizer.step()
        optimizer.zero_grad()
        seen.append([*ranks.sum([loss, *map(sum, zip(*said, strict=True))]), *norms.values()])
        if step == 2:
            out = place / f"{kind} of {ranks.size}"
            sharded.write(sharded.training_state(scorer, optimizer), out / "checkpoint", ranks)
    how: dict[str, Any] = {"stop_ids": [2], "template": None, "dtype": torch.float64}
    save_critic(scorer.critic, out / "critic", tiny_tokenizer(), ranks, **how)
    return seen


@torch.no_grad()
def before_the_step(scorer: Scorer, packed: Packed) -> list[float]:
    """Sums of the values, which an own critic gives without the policy, and of what an engine asks the policy for."""
    with compute_context(torch.float64, CPU):
        scalar_R = scorer(packed, wants=VALUES).scalar_R
        layout = Layout(packed.reach_T.numpy())
        logits_RV = scorer.next_logits(packed.ids_T, packed.position_ids, layout, packed.read_R)
    assert scalar_R is not None
    return [float(scalar_R.sum()), float(logits_RV.square().mean(1).sum())]


def main(place: Path) -> None:
    ranks = distributed.start("cpu")
    seen = {kind: steps(place, kind, ranks) for kind in KINDS}
    if ranks.is_writer:
        (place / "seen.json").write_text(json.dumps(seen))
    distributed.stop(ranks)


def values_of(scorer: Scorer, samples: Sequence[Sample], policy: PackPolicy = ALONE) -> Tensor:
    """V at each read, in the order of the samples."""
    packed = pack(samples, policy)
    with torch.no_grad(), compute_context(torch.float64, CPU):
        scalar_R = scorer(packed, wants=VALUES).scalar_R
    assert scalar_R is not None
    order = [packed.sample_ids.index(sample.id) for sample in samples]
    return torch.cat([scalar_R[packed.row_R == row] for row in order])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
