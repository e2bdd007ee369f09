"""What generating in this process takes of a rank, between the steps that train: bytes and seconds.

    bytes      what training holds (no gradients), autocast's copies of the weights, the keys and values of as many
               completions as are decoded at a time, each with all the tokens it may have, and of their prompts; with an
               environment those that are kept between turns, and once more while a turn takes them up; and the most of
               what a prefill and a round of decoding make
    seconds    each round of decoding reads every weight, and the keys and values so far; it takes no less than its
               products and its launches, nor than weights that ranks gather for it take to arrive

A prefill is traced as a step is (tracing.py), and so are the keys and values of a token. The seconds hold for a GPU's
data sheet, with the same assumptions as those of a step.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig

from taut.attention.layout import Layout
from taut.data.packing import ALONE, pack
from taut.methods.method import RunConfig
from taut.methods.online import OnlineMethod
from taut.models import architecture
from taut.models.precision import cast_once, compute_context
from taut.models.scorer import traced_for
from taut.plan.models import (
    POLICY,
    REWARDS,
    Kernels,
    configs_of,
    gather,
    planned_scorer,
    with_layers,
)
from taut.plan.rates import GPUS, LAUNCH, NARROW, NETWORK, PER_NODE, UTILISATION
from taut.plan.steps import Supply
from taut.plan.tracing import CPU, Shapes, Traced, depths_of, known_parts, on_fakes
from taut.rl.rollout import RolloutConfig
from taut.types import Sample

LOGITS = 3
"""Copies of a round's logits in float32: the logits, their log-probabilities, and what is drawn from."""


class Rollout(NamedTuple):
    """The generation of a rank."""

    completions: int
    """Of a rollout."""
    at_a_time: int
    prompts: int
    """Those of the completions that are decoded at a time."""
    prompt_tokens: int
    """Of the longest prompt."""
    new_tokens: int
    """Of each completion, at most."""
    paths: tuple[float, ...]
    """The share of the completions that are sampled one by one in each turn; less than 1 before a fork."""
    updates: int
    """Optimizer steps of a rollout."""
    kept: int
    """Bytes of a token's keys and values."""
    cache: int
    """Bytes of keys and values kept between turns, at most."""
    casts: int
    temporary: int
    """Most bytes that a prefill, or a round, makes beside keys and values."""
    operators: int
    """Of a forward."""

    @property
    def bytes(self) -> int:
        """What it takes beside what training holds."""
        tokens = self.prompts * self.prompt_tokens + self.at_a_time * self.new_tokens
        between = 2 * min(self.cache, self.kept * self.in_all)
        return self.casts + self.kept * tokens + between + self.temporary

    @property
    def in_all(self) -> int:
        """Distinct tokens of a rollout, at most."""
        per_prompt = self.at_a_time // self.prompts
        return self.completions * (self.new_tokens + self.prompt_tokens // per_prompt)


def rollout_of(
    run: RunConfig, config: PreTrainedConfig, kernels: Kernels, supply: Supply, num_ranks: int
) -> Rollout | None:
    """The generation of a run; None where a run generates nothing in this process."""
    if not isinstance(run, OnlineMethod) or run.is_replayed or run.rollout.engine != "local":
        return None
    kernels = kernels._replace(is_sharded=num_ranks > 1 or run.parallel.cpu_offload)
    settings, local = run.rollout, run.rollout.local
    shares = num_ranks // run.parallel.tensor
    prompts = -(-run.batch.samples_per_step * settings.minibatches // shares)
    samples = [sample for tree in supply.trees for sample in tree.samples]
    longest = max(int(sample.target_at_N[0]) for sample in samples)
    at_a_time = min(local.sequences, prompts * settings.n)
    kept, peaks, operators = [], [], []
    length = min(longest, local.prefill_tokens)
    count = max(1, min(local.prefill_tokens // length, prompts))
    scorer = planned_scorer(run, configs_of(run, config), kernels)
    depths = depths_of(run, POLICY, scorer.model)
    for depth in depths:
        one = _prefill(run, with_layers(config, depth), kernels, length, count)
        kept.append(one[0])
        peaks.append(one[1])
        operators.append(one[2])
    layers = len(architecture.layers(scorer.model))
    steps = 0.0 if len(depths) == 1 else (layers - depths[0]) / (depths[1] - depths[0])

    def whole(counts: list[int]) -> int:
        return round(counts[0] + steps * (counts[-1] - counts[0]))

    parts = {part: whole([peak[part] for peak in peaks]) for part in peaks[0]}
    per_token = whole(kept) // (length * count)
    prefill = parts["temporary"] + parts["activations"] + parts["logits"]
    vocabulary = architecture.head(scorer.model).weight.shape[0]
    return Rollout(
        completions=prompts * settings.n,
        at_a_time=at_a_time,
        prompts=-(-at_a_time // settings.n),
        prompt_tokens=longest,
        new_tokens=settings.grows,
        paths=_paths(settings),
        updates=settings.updates,
        kept=per_token,
        cache=int(local.prefix_cache_gib * 2**30) if settings.environment.is_on else 0,
        casts=parts["casts"],
        temporary=max(prefill, LOGITS * 4 * at_a_time * vocabulary),
        operators=whole(operators),
    )


def _paths(settings: RolloutConfig) -> tuple[float, ...]:
    """The share of the completions that are sampled one by one, in each turn."""
    if not settings.environment.is_on:
        return (1.0,)
    fork = settings.fork
    return tuple(
        fork.n ** sum(at < turn for at in fork.turns) / fork.leaves
        for turn in range(1, settings.environment.max_turns + 1)
    )


def _prefill(
    run: RunConfig, config: PreTrainedConfig, kernels: Kernels, length: int, count: int
) -> tuple[int, dict[str, int], int]:
    """Of prompts without contents: the bytes of their keys and values, the parts at the peak, and the operators."""
    scorer = planned_scorer(run, configs_of(run, config) | {POLICY: config}, kernels)
    gather(run, scorer, kernels)
    ids_T, nothing_N = np.zeros(length, dtype=np.int64), np.empty(0, dtype=np.int64)
    prompts = [Sample(f"{n}", ids_T, nothing_N, np.empty(0)) for n in range(count)]
    packed = pack(prompts, ALONE)
    reach_T = packed.reach_T.numpy()

    def act(mode: FakeTensorMode) -> tuple[int, dict[str, int], int]:
        ledger = Shapes(known_parts(scorer), None, None)
        layout = Layout(reach_T, None, CPU, kept={})
        context = compute_context(kernels.dtype, CPU, by_weights=kernels.by_weights)
        with torch.no_grad(), ledger, cast_once(scorer), context, traced_for(kernels.gpu_memory):
            scorer.next_logits(packed.ids_T, packed.position_ids, layout, packed.read_R)
        assert layout.kept is not None
        kept = sum(x.nbytes for pair in layout.kept.values() for x in pair)
        history = ledger.history()
        return kept, history.peak(), history.operators

    found: tuple[int, dict[str, int], int] = on_fakes(run, scorer, act)
    return found


def seconds_of(
    name: str, traced: Traced, rollout: Rollout, num_ranks: int, replicas: int = 1
) -> float:
    """The seconds of generating, for each optimizer step, on a GPU of ``GPUS``."""
    gpu, policy, shards = GPUS[name], traced.policy, num_ranks // replicas
    speed, bandwidth = UTILISATION * gpu.tflops * 1e12, gpu.gb_per_second * 1e9
    link = gpu.link_gb_per_second * 1e9
    link = link if shards <= PER_NODE else min(link, NETWORK)
    forward = 1 / 3 if policy.num_trained > policy.num_parameters / 2 else 1 / 2
    flops = traced.flops
    tokens = rollout.prompt_tokens + rollout.new_tokens / 2
    token = (flops.per_token + flops.per_target) * forward + flops.per_pair / 3 * tokens
    weights = min(policy.weights.all, NARROW * policy.num_parameters)
    gathered = policy.gathered.all * (shards - 1) / shards / link
    least = max(LAUNCH * rollout.operators, gathered)
    rounds = 0.0
    for share in rollout.paths:
        paths = math.ceil(share * rollout.completions)
        at_a_time = min(paths, rollout.at_a_time)
        read = weights + rollout.kept * at_a_time * tokens
        round_ = max(at_a_time * token / speed, read / bandwidth, least)
        rounds += -(-paths // at_a_time) * round_ / len(rollout.paths)
    prompts = rollout.completions // max(1, rollout.at_a_time // rollout.prompts)
    prefill = prompts * rollout.prompt_tokens * flops.per_token * forward / speed
    judged = rollout.completions * (rollout.prompt_tokens + rollout.new_tokens) / speed
    judged *= sum(m.flops.per_token / 2 for m in traced.models if m.part == REWARDS and m.flops)
    return (rounds * rollout.new_tokens + prefill + judged) / rollout.updates
