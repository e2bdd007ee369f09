"""What the first steps of a run compute: their micro-batches as the loop would lay them out, or without data, a guess.

Imports build and below. The package, its command and its checks import it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedConfig

from taut.build import build_budget, build_method, build_policy
from taut.data.pack import ALONE, pack
from taut.data.plan import assign, layouts
from taut.estimate.rates import Work, work_of
from taut.models import anatomy
from taut.models.load import context_length, load_skeleton
from taut.models.prove import one_sample_reasons
from taut.parallel import Ranks
from taut.run import Inputs, Run
from taut.types import Packed, Sample

NUM_STEPS = 5
"""Steps that are planned."""
GUESSED = 1024
"""Tokens of a sample where there is no data: no more than this."""


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
    samples: Sequence[Sample]
    """What micro-batches of other sizes are made of."""
    source: str
    """Where this comes from, for people."""

    @property
    def largest(self) -> Packed:
        """The largest micro-batch of the first steps."""
        found = [self.first] if self.later is None else [self.first, self.later]
        return max(found, key=lambda packed: packed.num_tokens)


def workload(run: Run, inputs: Inputs, num_ranks: int) -> Workload:
    """The first steps, on so many ranks."""
    skeleton = load_skeleton(run.model, inputs.config, run.trust_remote_code)
    window = anatomy.flops(skeleton).window
    one_sample = "; ".join(one_sample_reasons(skeleton, inputs.longest)) or None
    has_dropout = run.lora.dropout > 0 and run.lora.is_on
    has_noise = run.noise.neftune_alpha > 0 or has_dropout
    policy, _ = build_policy(run, one_sample, has_noise=has_noise)
    ranks = Ranks(0, num_ranks, torch.device("cpu"))
    budget = build_budget(run, skeleton, ranks, one_sample=one_sample is not None)
    method, num_steps, _ = build_method(run, inputs.train)
    first: list[Packed] = []
    later: list[Packed] = []
    steps: list[list[Work]] = []
    samples: list[Sample] = []
    for step in range(1, 1 + min(num_steps, NUM_STEPS)):
        trees = method.prepare(step)
        samples += [sample for tree in trees for sample in tree.samples]
        shares = [
            [p for one in rank for p in layouts(one, policy, budget.tokens_per_microbatch)]
            for rank in assign(trees, budget)
        ]
        first += [share[0] for share in shares if share]
        later += [packed for share in shares for packed in share[1:]]
        works = [[work_of(packed, window) for packed in share] for share in shares]
        steps.append(max(works, key=lambda some: sum(work.tokens for work in some)))
    largest = max([*first, *later], key=lambda packed: packed.num_tokens)
    longest = int(inputs.train.lengths.max())
    most = longest if one_sample else max(run.batch.tokens_per_microbatch, longest)
    most = min(most, longest * run.batch.samples_per_step)
    fullest = largest if most <= largest.num_tokens else filled(samples, most)
    source = f"the first {len(steps)} steps of {inputs.train.report.num_samples:,} samples"
    begin = max(first, key=lambda packed: packed.num_tokens)
    return Workload(begin, _largest(later), fullest, steps, samples, source)


def _largest(packs: Sequence[Packed]) -> Packed | None:
    return max(packs, key=lambda packed: packed.num_tokens, default=None)


def without_data(run: Run, config: PreTrainedConfig, num_ranks: int) -> Workload:
    """Samples of one length, every token a target, in micro-batches that fill the token budget."""
    budget = run.batch.tokens_per_microbatch
    length = min(run.data.max_length or GUESSED, context_length(config) or GUESSED)
    samples = [_made_up(length)]
    window = anatomy.flops(load_skeleton(run.model, config, run.trust_remote_code)).window
    share = -(-run.batch.samples_per_step // num_ranks)
    packed = filled(samples, min(max(budget, length), share * length))
    each = work_of(packed, window)
    work = [each] * max(1, round(share * length / packed.num_tokens))
    source = (
        f"no data given: samples of {length:,} tokens, all of them targets, {share} a step and GPU"
    )
    later = packed if len(work) > 1 else None
    return Workload(packed, later, packed, [work], samples, source)


def filled(samples: Sequence[Sample], tokens: int) -> Packed:
    """A micro-batch of so many tokens, of samples as they come, the last one cut; nothing is shared."""
    return pack(list(_up_to(samples, tokens)), ALONE)


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
        )
        left -= stop
        if left <= 0:
            return


def _made_up(length: int) -> Sample:
    return Sample("sample", np.zeros(length, int), np.arange(1, length), np.ones(length - 1))
