"""What the first steps of a run compute: their micro-batches as the loop would lay them out, or without data, a guess.

Imports build and below. The package, its command and its checks import it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedConfig

from taut.data.batching import assign, layouts, samples_of
from taut.data.packing import ALONE, PackPolicy, num_distinct_tokens, pack
from taut.data.prompts import PromptRow
from taut.errors import ConfigError
from taut.methods.inputs import Inputs
from taut.methods.method import RunConfig
from taut.models import architecture
from taut.models.load import context_length
from taut.models.self_test import one_sample_reasons
from taut.plan.rates import Work, work_of
from taut.plan.tracing import skeleton
from taut.rewards.panel import Verdict
from taut.rewards.verifier import Score
from taut.rl.advantages import judged_trajectories
from taut.rl.online import Online, Phase
from taut.rl.rollout import POLICY, REFERENCE, VALUE, Group, distinct
from taut.rl.sampler import Trajectory
from taut.run.setup import build_budget, build_policy
from taut.train.distributed import Ranks
from taut.train.trainer import StepSource
from taut.types import IntArray, Packed, Sample, Tree

NUM_STEPS = 5
"""Steps that are planned."""
GUESSED = 1024
"""Tokens of a sample where there is no data: no more than this."""


class Supply(NamedTuple):
    """Trees of the first steps, from which a micro-batch of any size can be made."""

    trees: Sequence[Tree]
    policy: PackPolicy

    @property
    def longest(self) -> int:
        """Tokens of the largest tree that is never cut, or of the longest sample."""
        return max(
            num_distinct_tokens(tree.samples, self.policy)
            if tree.is_atom
            else max(sample.num_tokens for sample in tree.samples)
            for tree in self.trees
        )

    def filled(self, tokens: int) -> Packed:
        """A micro-batch of so many tokens: of samples as they come, the last one cut, nothing shared. Answers that are
        compared share their prompt and are not cut: as many rows as there is room for, if there is room for one.
        """
        if self.trees[0].is_atom:
            whole = self._rows(tokens)
            if whole:
                return pack(whole, self.policy)
        return pack(list(_up_to(samples_of(self.trees), tokens)), ALONE)

    def _rows(self, tokens: int) -> list[Sample]:
        chosen: list[Sample] = []
        for number, tree in enumerate(cycle(self.trees)):
            tokens -= num_distinct_tokens(tree.samples, self.policy)
            if tokens < 0:
                return chosen
            named = [replace(s, id=f"{s.id}#{number}", group=number) for s in tree.samples]
            chosen += named
        raise AssertionError("trees come round for ever")


class Workload(NamedTuple):
    """What a run computes."""

    first: Packed
    """The largest of those that begin one of the first steps."""
    later: Packed | None
    """The largest of the others, which find gradients there; None: there are none."""
    fullest: Packed
    """The largest one that the token budget lets a step have."""
    steps: list[list[Work]]
    """For each of the first steps, the micro-batches of the rank that has most to do."""
    supply: Supply
    """What micro-batches of other sizes are made of."""
    source: str
    """Where this comes from, for people."""

    @property
    def largest(self) -> Packed:
        """The largest micro-batch of the first steps."""
        found = [self.first] if self.later is None else [self.first, self.later]
        return max(found, key=lambda packed: packed.num_tokens)


def workload(run: RunConfig, inputs: Inputs, num_ranks: int) -> Workload:
    """The first steps, on so many ranks; of a run that generates, if its completions are as long as they may be."""
    model = skeleton(run, inputs.config)
    window = architecture.flops(model).window
    one_sample = "; ".join(one_sample_reasons(model, inputs.longest)) or None
    has_dropout = run.lora.dropout > 0 and run.lora.is_on
    has_noise = run.noise.neftune_alpha > 0 or has_dropout
    policy, _ = build_policy(run, one_sample, has_noise=has_noise)
    ranks = Ranks(0, num_ranks, torch.device("cpu"))
    budget = build_budget(run, model, ranks, one_sample=one_sample is not None)
    method, num_steps, _ = run.plan(inputs.train)
    first: list[Packed] = []
    later: list[Packed] = []
    steps: list[list[Work]] = []
    trees: list[Tree] = []
    for step in range(1, 1 + min(num_steps, NUM_STEPS)):
        some = prepared(method, inputs.config, step) if run.generates else method.prepare(step)
        trees += some
        shares = [
            [p for one in rank for p in layouts(one, policy, budget.tokens_per_microbatch)]
            for rank in assign(some, budget)
        ]
        first += [share[0] for share in shares if share]
        later += [packed for share in shares for packed in share[1:]]
        works = [[work_of(packed, window) for packed in share] for share in shares]
        steps.append(max(works, key=lambda some: sum(work.tokens for work in some)))
    largest = max([*first, *later], key=lambda packed: packed.num_tokens)
    longest = int(inputs.train.lengths.max()) if not inputs.grows else inputs.longest
    most = longest if one_sample else max(run.batch.tokens_per_microbatch, longest)
    per_row = max(len(tree.samples) for tree in trees)
    most = min(most, longest * run.batch.samples_per_step * per_row)
    supply = Supply(trees, policy)
    fullest = largest if most <= largest.num_tokens else supply.filled(most)
    fullest = max(fullest, largest, key=lambda packed: packed.num_tokens)
    source = f"the first {len(steps)} steps of {inputs.train.report.num_samples:,} samples"
    if run.generates:
        source = f"training of {source}, all completions as long as they may be; generation is not foretold"
    begin = max(first, key=lambda packed: packed.num_tokens)
    return Workload(begin, _largest(later), fullest, steps, supply, source)


def _largest(packs: Sequence[Packed]) -> Packed | None:
    return max(packs, key=lambda packed: packed.num_tokens, default=None)


def without_data(run: RunConfig, config: PreTrainedConfig, num_ranks: int) -> Workload:
    """Samples of one length, every token a target, in micro-batches that fill the token budget. Raises ConfigError for
    a run whose rows are more than that.
    """
    if run.row_kind != "sft":
        raise ConfigError(
            f"data.train is not set: what the rows of {run.command()} share is not guessed; expected data; "
            "set data.train=FILE"
        )
    budget = run.batch.tokens_per_microbatch
    length = min(run.data.max_length or GUESSED, context_length(config) or GUESSED)
    supply = Supply([Tree((_made_up(length),))], ALONE)
    window = architecture.flops(skeleton(run, config)).window
    share = -(-run.batch.samples_per_step // num_ranks)
    packed = supply.filled(min(max(budget, length), share * length))
    each = work_of(packed, window)
    work = [each] * max(1, round(share * length / packed.num_tokens))
    source = (
        f"no data given: samples of {length:,} tokens, all of them targets, {share} a step and GPU"
    )
    later = packed if len(work) > 1 else None
    return Workload(packed, later, packed, [work], supply, source)


def _up_to(samples: Sequence[Sample], tokens: int) -> Iterator[Sample]:
    left = tokens
    for number, sample in enumerate(cycle(samples)):
        stop = min(left, sample.num_tokens)
        kept = sample.target_at_N < stop
        if not kept.any() and stop == sample.num_tokens:
            kept[:] = True
        yield Sample(
            f"{sample.id}#{number}",
            sample.ids_T[:stop],
            sample.target_at_N[kept],
            sample.weight_N[kept],
            streams={name: value_N[kept] for name, value_N in sample.streams.items()},
        )
        left -= stop
        if left <= 0:
            return


def _made_up(length: int) -> Sample:
    return Sample("sample", np.zeros(length, int), np.arange(1, length), np.ones(length - 1))


# --------------------------------------------------------------------------------------------------
# What a run that generates trains on if every completion has all the tokens it may have: the trees of its steps.
#
# The prompts are those the run begins with. Completions are tokens drawn at random, no two alike; their rewards
# differ, so that all is learned from that can be; what is replayed of earlier roll-outs is there in full; and nothing
# is scored: what models would say of them is 0. What generation itself takes, time and the keys and values that it
# keeps, is not foretold.
#
# Imports build and below. ``steps`` calls it.


def prepared(method: StepSource, config: PreTrainedConfig, step: int) -> list[Tree]:
    """The trees of a step (counted from 1)."""
    assert isinstance(method, Online), "the source of steps of a run that generates"
    number = (step - 1) // method.config.updates
    if method.phase is None or method.phase.number != number:
        trees = _assumed(method, config, number)
        most = _num_trees(method, len(trees))
        others = number
        while len(trees) < most:  # other roll-outs stand for those before
            others += 1
            trees += _assumed(method, config, others)
        method.phase = Phase(number, trees[:most])
    return method.prepare(step)


def _num_trees(method: Online, fresh: int) -> int:
    """Trees of a roll-out of so many, with all that are trained on again beside it."""
    config, replayed = method.config, method.config.replay
    if config.max_staleness is not None:
        before = (config.max_staleness + 1) // config.updates - 1 - config.ahead
        replayed = min(replayed, before * fresh)
    return fresh + replayed


def _assumed(method: Online, config: PreTrainedConfig, number: int) -> list[Tree]:
    """The trees of a roll-out."""
    draw = np.random.default_rng([method.seed, number])
    context, vocabulary = context_length(config), int(config.get_text_config().vocab_size)
    rows = distinct([method.prompts.asked[index] for index in method.order.step(number + 1)])
    groups = []
    for row in rows:
        most = method.config.grows
        size = most if context is None else max(1, min(most, context - row.ids_T.size))
        ids_SN = draw.integers(0, vocabulary, (method.config.n, size))
        worth = [method.credit.good + index / method.config.n for index in range(len(ids_SN))]
        trajectories = tuple(_episode(row, index, ids_N) for index, ids_N in enumerate(ids_SN))
        groups.append(Group(trajectories, tuple(Verdict({"assumed": Score(w)}, w) for w in worth)))
    paths = judged_trajectories(groups, number)
    names = (POLICY, REFERENCE, VALUE)
    said = {path.name: {name: np.zeros(path.sampled_at_N.size) for name in names} for path in paths}
    return method.credit.trees(paths, said).trees


def _episode(row: PromptRow, index: int, ids_N: IntArray) -> Trajectory:
    return Trajectory(
        row=row,
        index=index,
        ids_T=np.concatenate([row.ids_T, ids_N]),
        sampled_at_N=np.arange(row.ids_T.size, row.ids_T.size + ids_N.size),
        logp_N=np.zeros(ids_N.size),
        version_N=np.zeros(ids_N.size, dtype=np.int64),
        finish_reason="stop",
        text="",
    )
