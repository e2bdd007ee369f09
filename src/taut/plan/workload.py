"""The micro-batches of a run's first steps: as the loop would lay them out, or a guess where there is no data.

A run that generates is planned with completions of maximal length. Its prompts are the first ones of the run;
completions are random tokens, all different; their rewards differ, so that every sample is trained on; replayed
rollouts are complete; scores of other models are 0. Generation itself is the topic of rollouts.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedConfig

from taut.data.batching import assign, layouts, samples_of
from taut.data.dataset import Dataset, SourceShards
from taut.data.packing import ALONE, PackPolicy, num_distinct_tokens, pack
from taut.data.rows.prompts import PromptRow, PromptSet
from taut.data.store.shards import ShardBuilder, Shards
from taut.methods.inputs import Inputs
from taut.methods.method import RunConfig
from taut.models import architecture
from taut.models.load import context_length
from taut.models.self_test import one_sample_reasons
from taut.plan.models import skeleton
from taut.plan.rates import Work, work_of
from taut.rl.online import Online, made_up_trajectory, numbered
from taut.rl.rollout import POLICY, REFERENCE, VALUE, Group, distinct
from taut.run.setup import build_budget, build_policy
from taut.train.distributed import Ranks
from taut.train.trainer import StepSource
from taut.types import TEACHER_LOGP, TOP_IDS, TOP_LOGP, Packed, Sample, Tree

NUM_STEPS = 5
"""Number of planned steps."""
GUESSED_LENGTH = 1024
"""Largest number of tokens of a sample where there is no data."""


class Supply(NamedTuple):
    """Trees of the first steps, as material for a micro-batch of any size."""

    trees: Sequence[Tree]
    policy: PackPolicy

    @property
    def longest(self) -> int:
        """Tokens of the largest tree that is never split, or of the longest sample."""
        return max(
            num_distinct_tokens(tree.samples, self.policy)
            if tree.is_atom
            else max(sample.num_tokens for sample in tree.samples)
            for tree in self.trees
        )

    def filled(self, tokens: int) -> Packed:
        """A micro-batch of so many tokens: samples in order, the last one truncated, nothing shared. Answers that are
        compared share their prompt and are not truncated: as many rows as fit, if one fits.
        """
        if self.trees[0].is_atom:
            chosen, left = list[Sample](), tokens
            for number, tree in enumerate(cycle(self.trees)):
                left -= num_distinct_tokens(tree.samples, self.policy)
                if left < 0:
                    break
                chosen += [replace(s, id=f"{s.id}#{number}", group=number) for s in tree.samples]
            if chosen:
                return pack(chosen, self.policy)
        # rows by themselves, the last one cut
        cut: list[Sample] = []
        for number, sample in enumerate(cycle(samples_of(self.trees))):
            if sample.media and tokens < sample.num_tokens and cut:
                break  # what has pictures is not cut
            stop = sample.num_tokens if sample.media else min(tokens, sample.num_tokens)
            kept = sample.target_at_N < stop
            if not kept.any() and stop == sample.num_tokens:
                kept[:] = True
            at_N, weight_N = sample.target_at_N[kept], sample.weight_N[kept]
            streams = {name: value_N[kept] for name, value_N in sample.streams.items()}
            ids_T, name = sample.ids_T[:stop], f"{sample.id}#{number}"
            cut.append(Sample(name, ids_T, at_N, weight_N, sample.media, streams))
            tokens -= stop
            if tokens <= 0:
                break
        return pack(cut, ALONE)


class Workload(NamedTuple):
    """The micro-batches of a run."""

    first: Packed
    """The largest micro-batch at the beginning of a step."""
    later: Packed | None
    """The largest of the other micro-batches, which add to existing gradients; None if there is no other."""
    fullest: Packed
    """The largest micro-batch that the token budget allows."""
    steps: list[list[Work]]
    """For each of the first steps, the micro-batches of the rank with the most work."""
    supply: Supply
    """Material for micro-batches of other sizes."""
    source: str
    """The origin of these micro-batches, as text."""

    @property
    def largest(self) -> Packed:
        """The largest micro-batch of the first steps."""
        packs = [self.first] if self.later is None else [self.first, self.later]
        return max(packs, key=lambda packed: packed.num_tokens)


def workload(run: RunConfig, inputs: Inputs, num_ranks: int) -> Workload:
    """The first steps on so many ranks; of a run that generates, with completions of maximal length."""
    # how the run lays samples out
    model = skeleton(run, inputs.config)
    window = architecture.flops(model).window
    one_sample = "; ".join(one_sample_reasons(model, inputs.longest)) or None
    has_dropout = run.lora.dropout > 0 and run.lora.is_on
    has_noise = run.noise.neftune_alpha > 0 or has_dropout
    policy, _ = build_policy(run, one_sample, has_noise=has_noise)
    ranks = Ranks(0, num_ranks, torch.device("cpu"))
    budget = build_budget(run, model, ranks, one_sample=one_sample is not None)
    step_source, num_steps, _ = run.plan(inputs.train)
    # the first steps: those whose samples are known, or completions of maximal length
    first: list[Packed] = []
    later: list[Packed] = []
    steps: list[list[Work]] = []
    trees: list[Tree] = []
    num_planned = min(num_steps, NUM_STEPS)
    numbers = range(1, 1 + num_planned)
    known = (step for step in numbers if step == 1 or run.generates or step_source.is_known(step))
    planned: Iterable[list[Tree]] = map(step_source.prepare, known)
    if run.generates:
        planned = assumed_steps(step_source, inputs.config, num_planned)
    for step_trees in planned:
        trees += step_trees
        shares = [
            [p for planned in rank for p in layouts(planned, policy, budget.tokens_per_microbatch)]
            for rank in assign(step_trees, budget)
        ]
        first += [share[0] for share in shares if share]
        later += [packed for share in shares for packed in share[1:]]
        works = [[work_of(packed, window) for packed in share] for share in shares]
        steps.append(max(works, key=lambda share: sum(work.tokens for work in share)))
    # the fullest micro-batch that the budget allows
    largest = max([*first, *later], key=lambda packed: packed.num_tokens)
    longest = inputs.train.longest if not inputs.grows else inputs.longest
    max_tokens = longest if one_sample else max(run.batch.tokens_per_microbatch, longest)
    per_row = max(len(tree.samples) for tree in trees)
    most = run.batch.tokens_per_step or longest * run.batch.samples_per_step * per_row
    max_tokens = min(max_tokens, max(most, longest))
    supply = Supply(trees, policy)
    fullest = largest if max_tokens <= largest.num_tokens else supply.filled(max_tokens)
    fullest = max(fullest, largest, key=lambda packed: packed.num_tokens)
    source = f"the first {len(steps)} steps of {inputs.train.report.num_samples:,} samples"
    if run.generates:
        source += ", with completions of maximal length"
    if run.is_replayed:
        source += ", none of which is generated"
    return Workload(
        first=max(first, key=lambda packed: packed.num_tokens),
        later=max(later, key=lambda packed: packed.num_tokens, default=None),
        fullest=fullest,
        steps=steps,
        supply=supply,
        source=source,
    )


def without_data(run: RunConfig, config: PreTrainedConfig, num_ranks: int) -> Workload:
    """The steps of a run whose rows are not known: samples of one length, every token a target, in micro-batches that
    fill the token budget. What is compared, judged or generated is laid out by the run from ``assumed_data``.
    """
    if run.row_kind != "sft":
        train = assumed_data(run, config)
        unread: Any = None
        inputs = Inputs(config, unread, unread, train, None, 0, [], unread, [], run.grows)
        found = workload(run, inputs, num_ranks)
        return found._replace(source=f"no data given: {train.parts[0].path}; {found.source}")
    budget = run.batch.tokens_per_microbatch
    length = min(run.data.max_length or GUESSED_LENGTH, context_length(config) or GUESSED_LENGTH)
    sample = Sample("sample", np.zeros(length, int), np.arange(1, length), np.ones(length - 1))
    supply = Supply([Tree((sample,))], ALONE)
    window = architecture.flops(skeleton(run, config)).window
    # how much of a step a rank has
    num_samples = run.batch.samples_per_step
    if run.batch.tokens_per_step is not None:
        num_samples = max(1, run.batch.tokens_per_step // length)
    share = -(-num_samples // num_ranks)
    packed = supply.filled(min(max(budget, length), share * length))
    work = [work_of(packed, window)] * max(1, round(share * length / packed.num_tokens))
    source = (
        f"no data given: samples of {length:,} tokens, all of them targets, {share} a step and GPU"
    )
    later = packed if len(work) > 1 else None
    return Workload(packed, later, packed, [work], supply, source)


def assumed_data(run: RunConfig, config: PreTrainedConfig) -> Dataset:
    """Rows for two steps, each of ``data.max_length`` tokens or a guess: half of them the prompt, which two answers
    share that are compared; prompts alone where answers are generated.
    """
    length = min(run.data.max_length or GUESSED_LENGTH, context_length(config) or GUESSED_LENGTH)
    half, builder, prompts = max(1, length // 2), ShardBuilder(), list[PromptRow]()
    about = f"rows of {length:,} tokens are assumed, half of them the prompt"
    builder.num_rows = 2 * run.batch.samples_per_step
    for number in range(1, 1 + builder.num_rows):
        place, begun_T = f"{about}:{number}", np.full(half, number)
        prompts.append(PromptRow(place, str(number), begun_T, "", (), None, {}))
        samples = [Sample(place, begun_T, np.arange(1, half), np.ones(half - 1))]
        for answer in range(0 if run.generates else 1 + run.compares_answers):
            ids_T, at_N = np.append(begun_T, [answer] * (length - half)), np.arange(half, length)
            values = dict.fromkeys(run.loss().needs_values, float((number + answer) % 2))
            one = Sample(f"{place}#{answer}", ids_T, at_N, np.ones(at_N.size), values=values)
            samples = [*samples[:answer], one]
        builder.add([(number, place, samples)])
    shards = Shards.of([builder.build()])
    part = SourceShards(about, (about,), 1.0, about, shards, about, (), (about,))
    return PromptSet([part], prompts) if run.generates else Dataset([part])


# -- runs that generate


def assumed_steps(
    source: StepSource, config: PreTrainedConfig, num_steps: int
) -> Iterator[list[Tree]]:
    """The trees of the first steps, with completions of maximal length."""
    assert isinstance(source, Online), "the source of steps of a run that generates"
    rollout = source.config
    for number in range(-(-num_steps // rollout.updates)):
        trees = _rollout_trees(source, config, number)
        num_trees, replayed = len(trees), rollout.replay_groups
        if rollout.max_staleness is not None:
            fresh_before = (rollout.max_staleness + 1) // rollout.updates
            replayed = min(replayed, (fresh_before - 1) * num_trees)
        num_trees += replayed
        other = number
        while len(trees) < num_trees:  # later rollouts stand for the replayed ones
            other += 1
            trees += _rollout_trees(source, config, other)
        for update in range(min(rollout.updates, num_steps - number * rollout.updates)):
            yield numbered(source.part(trees[:num_trees], number, update))


def _rollout_trees(source: Online, config: PreTrainedConfig, number: int) -> list[Tree]:
    """The trees of a rollout."""
    draw = np.random.default_rng([source.seed, number])
    # random tokens of maximal length, with different rewards
    context, vocabulary = context_length(config), int(config.get_text_config().vocab_size)
    rows = distinct([source.prompts.prompt_rows[index] for index in source.order.step(number + 1)])
    groups, scores = [], {}
    for row in rows:
        size = source.config.grows
        if context is not None:
            size = max(1, min(size, context - row.ids_T.size))
        ids_SN = draw.integers(0, vocabulary, (source.config.n, size))
        rewards = [source.credit.good + index / source.config.n for index in range(len(ids_SN))]
        trajectories = [
            made_up_trajectory(row, index, ids_N, reward, number)
            for index, (ids_N, reward) in enumerate(zip(ids_SN, rewards, strict=True))
        ]
        groups.append(Group(tuple(trajectories)))
        for trajectory in trajectories:
            shapes = dict.fromkeys((POLICY, REFERENCE, VALUE, TEACHER_LOGP), (size,))
            listed = dict.fromkeys((TOP_IDS, TOP_LOGP), (size, source.credit.num_listed))
            shape_of: dict[str, tuple[int, ...]] = {**shapes, **listed}
            scores[trajectory.name] = {name: np.zeros(shape) for name, shape in shape_of.items()}
    return [sample.tree for sample in source.credit.assign(groups, scores)[0]]
