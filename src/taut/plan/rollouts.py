"""Memory and time that generating in this process, and scoring, take of a rank between the steps that train.

    bytes      what training holds (no gradients), autocast's copies of the weights, the keys and values of as many
               completions as are decoded at a time, each with all the tokens it may have, and of their prompts; with an
               environment those that are kept between turns, and once more while a turn takes them up; and the most of
               what a prefill and a round of decoding make
    seconds    each round of decoding reads every weight, and the keys and values so far; it takes no less than its
               products and its launches, nor than weights that ranks gather for it take to arrive

A prefill is traced as a step is (tracing.py), and so are the keys and values of a token. The seconds hold for a GPU's
data sheet, with the same assumptions as those of a step.

Scoring takes the most that one forward makes of a model that judges completions or teaches them. These run one after
another, without gradients, while no activations are kept. A reward model takes ``tokens_per_batch`` tokens at a time,
or what a rollout has; a teacher, and another model as the reference, a micro-batch. A forward is traced as a step is;
of layers alike a few, since nothing of a layer is kept. The forwards of policy and critic are left out: a step is more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig

from taut.attention.layout import Layout
from taut.data.packing import ALONE, pack
from taut.inference.factory import inference_context
from taut.methods.method import RunConfig
from taut.methods.online import OnlineMethod
from taut.models import architecture
from taut.models.precision import cast_once, compute_context
from taut.models.scorer import Scorer, traced_for
from taut.plan.models import (
    POLICY,
    REWARDS,
    Kernels,
    configs_of,
    frozen_model,
    gather,
    judge_dtype,
    judge_model,
    judges_of,
    model_config,
    planned_scorer,
    with_layers,
)
from taut.plan.rates import GPUS, LAUNCH, NARROW, NETWORK, PER_NODE, UTILIZATION, forward_share
from taut.plan.trace_cache import kept
from taut.plan.tracing import CPU, Shapes, Traced, depths_of, known_parts, on_fakes, readable
from taut.plan.workload import Supply
from taut.types import Packed, Sample, Wants

LOGITS = 3
"""Copies of a round's logits in float32: the logits, their log-probabilities, and what is drawn from."""


class Rollout(NamedTuple):
    """The generation of a rank."""

    completions: int
    """Completions of a rollout."""
    at_a_time: int
    prompts: int
    """Prompts of the completions that are decoded at a time."""
    prompt_tokens: int
    """Tokens of the longest prompt."""
    new_tokens: int
    """Maximum tokens of a completion."""
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
    """Operators of a forward."""

    @property
    def bytes(self) -> int:
        """Bytes beside those that training holds."""
        tokens = self.prompts * self.prompt_tokens + self.at_a_time * self.new_tokens
        # between turns, at most the distinct tokens of the rollout
        per_prompt = self.at_a_time // self.prompts
        in_all = self.completions * (self.new_tokens + self.prompt_tokens // per_prompt)
        between = 2 * min(self.cache, self.kept * in_all)
        return self.casts + self.kept * tokens + between + self.temporary


@kept
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
    # a prefill of a few layers, twice, from which the others follow
    sizes, peaks, operators = [], [], []
    length = min(longest, local.prefill_tokens)
    count = max(1, min(local.prefill_tokens // length, prompts))
    scorer = planned_scorer(run, configs_of(run, config), kernels)
    depths = depths_of(run, POLICY, scorer.model)
    for depth in depths:
        one = _prefill(run, with_layers(config, depth), kernels, length, count)
        sizes.append(one[0])
        peaks.append(one[1])
        operators.append(one[2])
    layers = len(architecture.layers(scorer.model))
    steps = 0.0 if len(depths) == 1 else (layers - depths[0]) / (depths[1] - depths[0])

    def whole(counts: list[int]) -> int:
        return round(counts[0] + steps * (counts[-1] - counts[0]))

    parts = {part: whole([peak[part] for peak in peaks]) for part in peaks[0]}
    per_token = whole(sizes) // (length * count)
    prefill = parts["temporary"] + parts["activations"] + parts["logits"]
    vocabulary = architecture.head(scorer.model).weight.shape[0]
    # the share of the completions that are sampled one by one, in each turn
    fork = settings.fork
    paths: tuple[float, ...] = (1.0,)
    if settings.environment.is_on:
        turns = range(1, settings.environment.max_turns + 1)
        paths = tuple(fork.n ** sum(at < turn for at in fork.turns) / fork.leaves for turn in turns)
    return Rollout(
        completions=prompts * settings.n,
        at_a_time=at_a_time,
        prompts=-(-at_a_time // settings.n),
        prompt_tokens=longest,
        new_tokens=settings.grows,
        paths=paths,
        updates=settings.updates,
        kept=per_token,
        cache=int(local.prefix_cache_gib * 2**30) if settings.environment.is_on else 0,
        casts=parts["casts"],
        temporary=max(prefill, LOGITS * 4 * at_a_time * vocabulary),
        operators=whole(operators),
    )


def _prefill(
    run: RunConfig, config: PreTrainedConfig, kernels: Kernels, length: int, count: int
) -> tuple[int, dict[str, int], int]:
    """Prefill prompts without contents: the bytes of keys and values, the parts at the peak, and the operators."""
    scorer = planned_scorer(run, configs_of(run, config) | {POLICY: config}, kernels)
    gather(run, scorer, kernels)
    ids_T, nothing_N = np.zeros(length, dtype=np.int64), np.empty(0, dtype=np.int64)
    prompts = [Sample(f"{n}", ids_T, nothing_N, np.empty(0)) for n in range(count)]
    packed = pack(prompts, ALONE)
    reach_T = packed.reach_T.numpy()

    def act(mode: FakeTensorMode) -> tuple[int, dict[str, int], int]:
        allocations = Shapes(known_parts(scorer), None, None)
        layout = Layout(reach_T, None, CPU, kept={})
        context = compute_context(kernels.dtype, CPU, by_weights=kernels.by_weights)
        with (
            torch.no_grad(),
            allocations,
            cast_once(scorer),
            context,
            traced_for(kernels.gpu_memory),
        ):
            scorer.next_logits(packed.ids_T, packed.position_ids, layout, packed.read_R)
        assert layout.kept is not None
        kept = sum(x.nbytes for pair in layout.kept.values() for x in pair)
        history = allocations.history()
        return kept, history.peak(), history.operators

    found: tuple[int, dict[str, int], int] = on_fakes(run, scorer, act)
    return found


def seconds_of(
    name: str, traced: Traced, rollout: Rollout, num_ranks: int, replicas: int = 1
) -> float:
    """The seconds of generating, for each optimizer step, on a GPU of ``GPUS``."""
    gpu, policy, shards = GPUS[name], traced.policy, num_ranks // replicas
    speed, bandwidth = UTILIZATION * gpu.tflops * 1e12, gpu.gb_per_second * 1e9
    link = gpu.link_gb_per_second * 1e9
    link = link if shards <= PER_NODE else min(link, NETWORK)
    forward = forward_share(policy.num_trained, policy.num_parameters)
    flops = traced.flops
    tokens = rollout.prompt_tokens + rollout.new_tokens / 2
    token = (flops.per_token + flops.per_target) * forward + flops.per_pair / 3 * tokens
    weights = min(policy.weights.all, NARROW * policy.num_parameters)
    gathered = policy.gathered.all * (shards - 1) / shards / link
    least = max(LAUNCH * rollout.operators, gathered)
    # each round of decoding takes what bounds it: products, memory, launches or gathering
    rounds = 0.0
    for share in rollout.paths:
        paths = math.ceil(share * rollout.completions)
        at_a_time = min(paths, rollout.at_a_time)
        read = weights + rollout.kept * at_a_time * tokens
        round_ = max(at_a_time * token / speed, read / bandwidth, least)
        rounds += -(-paths // at_a_time) * round_ / len(rollout.paths)
    # prompts once, and what judges the completions
    prompts = rollout.completions // max(1, rollout.at_a_time // rollout.prompts)
    prefill = prompts * rollout.prompt_tokens * flops.per_token * forward / speed
    judged = rollout.completions * (rollout.prompt_tokens + rollout.new_tokens) / speed
    judged *= sum(m.flops.per_token / 2 for m in traced.models if m.part == REWARDS and m.flops)
    return (rounds * rollout.new_tokens + prefill + judged) / rollout.updates


# -- scoring a rollout


class _Forward(NamedTuple):
    """A model, and what it is given at a time."""

    config: PreTrainedConfig
    make: Callable[[PreTrainedConfig], nn.Module]
    tokens: int
    wants: Wants
    context: Callable[[], AbstractContextManager[Any]]


@kept
def scoring_of(run: RunConfig, kernels: Kernels, supply: Supply, num_ranks: int) -> int:
    """Bytes that scoring takes beside what training holds; 0 if no model scores."""
    if not isinstance(run, OnlineMethod):
        return 0
    kernels = kernels._replace(is_sharded=num_ranks > 1 or run.parallel.cpu_offload)
    samples = [sample.num_tokens for tree in supply.trees for sample in tree.samples]
    rows = -(-run.batch.samples_per_step * run.rollout.minibatches // num_ranks)
    most = rows * run.rollout.n * max(samples)
    return max(
        (_bytes(run, one, kernels, supply, most) for one in _forwards(run, kernels)), default=0
    )


def _forwards(run: RunConfig, kernels: Kernels) -> Iterator[_Forward]:
    # reward models, a batch at a time
    for judge in judges_of(run, kernels):
        dtype = judge_dtype(judge, kernels)
        yield _Forward(
            model_config(judge.model, judge.trust_remote_code),
            partial(judge_model, judge, kernels),
            judge.tokens_per_batch,
            Wants(logp=False, scalar=True),
            partial(inference_context, dtype),
        )
    # teachers and another reference, a micro-batch at a time
    reference, teachers = run.models().reference, run.models().completions
    paths = [] if teachers is None else [path for _, _, path in teachers.directories]
    if reference is not None and reference.model is not None:
        paths.append(reference.model)
    for path in paths:
        yield _Forward(
            model_config(path, run.trust_remote_code),
            partial(frozen_model, run, path, kernels),
            run.batch.tokens_per_microbatch,
            Wants(),
            partial(compute_context, kernels.dtype, CPU, by_weights=kernels.by_weights),
        )


def _bytes(run: RunConfig, one: _Forward, kernels: Kernels, supply: Supply, most: int) -> int:
    """Bytes that a forward takes beside the model's weights, at the peak."""
    depth = depths_of(run, REWARDS, one.make(one.config))[0]
    scorer = Scorer(one.make(with_layers(one.config, depth))).eval()
    packed: Packed = readable(supply.filled(min(one.tokens, most)))
    vocabulary = architecture.head(scorer.model).weight.shape[0] if one.wants.logp else None

    def act(mode: FakeTensorMode) -> dict[str, int]:
        allocations = Shapes(known_parts(scorer), vocabulary, None)
        with torch.no_grad(), allocations, one.context(), traced_for(kernels.gpu_memory):
            scorer(packed, wants=one.wants)
        return allocations.history().peak()

    parts: dict[str, int] = on_fakes(run, scorer, act)
    return sum(parts[name] for name in ("casts", "activations", "logits", "temporary"))
