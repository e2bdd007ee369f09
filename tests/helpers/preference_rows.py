"""Answers for tests of losses, and a step of them: the whole step's statistics first, then micro-batch by micro-batch.

``answers`` makes samples that any loss can read: pairs, a group of three, labels, scores, a reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from taut.data.packing import ALONE, PackPolicy, pack
from taut.losses.loss import Loss, count_units
from taut.losses.policy import PolicyGradient
from taut.losses.reward import Process, ScalarLoss
from taut.train import step_statistics
from taut.train.distributed import Ranks
from taut.types import Packed, Sample, Scores

ONE = Ranks(0, 1, torch.device("cpu"))
Score = Callable[[Packed], Scores]
ROLLED_OUT = ("old_logp_N", "engine_logp_N")
"""What was said of an answer's tokens when it was sampled."""


def answer(name: str, prompt: list[int], reply: list[int], group: int, **values: float) -> Sample:
    """A prompt with one answer, whose tokens are the targets, weighted unevenly."""
    random = np.random.default_rng([group, len(reply)])
    at_N = np.arange(len(prompt), len(prompt) + len(reply))
    every = {"preference": 0.0, "margin": 0.0, "label": 0.0, "score": 0.0} | values
    every["entropy_coef"] = 0.01 + 0.02 * group
    streams = {"ref_logp_N": random.uniform(-6.0, -1.0, at_N.size)}
    weight_N = random.uniform(0.5, 1.5, at_N.size)
    streams |= {name: random.uniform(-4.0, -2.0, at_N.size) for name in ROLLED_OUT}
    streams["advantage_N"] = random.normal(size=at_N.size)
    ids_T = np.array(prompt + reply)
    return Sample(name, ids_T, at_N, weight_N, streams=streams, values=every, group=group)


def answers(vocab_size: int = 97, seed: int = 0) -> list[Sample]:
    """Four prompts: with two answers, with three, with two that begin alike, with one token each."""
    random = np.random.default_rng(seed)

    def draw(count: int) -> list[int]:
        return [int(token) for token in random.integers(0, vocab_size, count)]

    def good(margin: float, score: float) -> dict[str, float]:
        return {"preference": 1.0, "margin": margin, "label": 1.0, "score": score}

    long, short, other, last = draw(19), draw(5), draw(11), draw(7)
    begin = draw(6)
    return [
        answer("a1", long, draw(6), 0, **good(0.7, 1.5)),
        answer("a0", long, draw(9), 0, score=-0.5),
        answer("b2", short, draw(4), 1, preference=2.0, margin=3.0, label=1.0, score=3.0),
        answer("b0", short, draw(7), 1, preference=0.5, margin=0.5, score=0.5),
        answer("b1", short, draw(3), 1, preference=1.0, margin=1.0, label=1.0, score=1.0),
        answer("c0", other, begin + draw(2), 2, score=-2.0),
        answer("c1", other, begin + draw(5), 2, **good(1.2, 0.0)),
        answer("d1", last, draw(1), 3, **good(0.1, 0.3)),
        answer("d0", last, draw(1), 3, score=0.2),
    ]


def answers_for(loss: Loss) -> list[Sample]:
    """The same as a loss reads them: with steps for a process reward, without targets for a scalar head."""
    samples = answers()
    if isinstance(loss, Process):
        return [with_steps(sample, seed) for seed, sample in enumerate(samples)]
    if isinstance(loss, ScalarLoss):
        return [without_targets(sample) for sample in samples]
    if isinstance(loss, PolicyGradient) and loss.critic:
        return [with_returns(sample, seed) for seed, sample in enumerate(samples)]
    return samples


def without_targets(sample: Sample) -> Sample:
    nothing = np.empty(0)
    return replace(
        sample,
        target_at_N=nothing.astype(np.int64),
        weight_N=nothing,
        streams=dict.fromkeys(sample.streams, nothing),
    )


def with_steps(sample: Sample, seed: int) -> Sample:
    """Reads at the answer's first, middle and last token, with labels in [0, 1]."""
    at_R = np.unique(sample.target_at_N[[0, sample.num_targets // 2, -1]])
    label_R = np.random.default_rng(seed).choice([0.0, 0.3, 1.0], at_R.size)
    return replace(without_targets(sample), read_at_R=at_R, read_values={"label": label_R})


def with_returns(sample: Sample, seed: int) -> Sample:
    """Reads at the state in which each target was chosen, with what it came to and what a critic had said."""
    random = np.random.default_rng(seed)
    values = {name: random.normal(size=sample.num_targets) for name in ("return", "value")}
    return replace(sample, read_at_R=sample.target_at_N - 1, read_values=values)


def mismatched(samples: Sequence[Sample]) -> list[Sample]:
    """Each prompt with the answer of the sample after it, and a reference that likes it less."""
    return [
        answer(
            f"{one.id}/{other.id}",
            one.ids_T[: one.target_at_N[0]].tolist(),
            other.ids_T[other.target_at_N[0] :].tolist(),
            number,
            **one.values,
        )
        for number, (one, other) in enumerate(zip(samples, [*samples[1:], samples[0]], strict=True))
    ]


def groups_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each group: what a micro-batch never cuts."""
    return [list(some) for _, some in groupby(samples, key=lambda sample: sample.group)]


def packs(groups: Sequence[Sequence[Sample]], policy: PackPolicy = ALONE) -> Packed:
    return pack([sample for group in groups for sample in group], policy)


def ready(loss: Loss, microbatches: Sequence[Packed], score: Score) -> list[Packed]:
    """The micro-batches with the statistics of the step, as the loop makes them."""
    if not loss.observes:
        return list(microbatches)
    seen = list(microbatches)
    if getattr(loss, "mismatched", False):
        seen = [pack([sample], ALONE) for sample in mismatched(answers())]
    with torch.no_grad():
        observed = [loss.observe(score(packed), packed) for packed in seen]
    stats = step_statistics.compute_statistics(loss, observed, ONE)
    planned = [(packed, True) for packed in microbatches]
    return [packed for packed, _ in step_statistics.attach_statistics(planned, stats, ONE)]


def scales(loss: Loss, microbatches: Sequence[Packed]) -> dict[str, float]:
    """One by each term's denominator."""
    return {
        term: 1.0 / sum(count_units(unit, packed) for packed in microbatches)
        for term, unit in loss.units.items()
    }


def step_loss(loss: Loss, microbatches: Sequence[Packed], score: Score) -> Tensor:
    """The loss of a step, differentiable."""
    by = scales(loss, microbatches)
    shares = [
        by[term] * value
        for packed in ready(loss, microbatches, score)
        for term, value in loss(score(packed), packed).terms.items()
    ]
    return torch.stack(shares).sum()


def step_metrics(loss: Loss, microbatches: Sequence[Packed], score: Score) -> Mapping[str, float]:
    """The metrics of a step."""
    sums = step_statistics.Sums()
    for packed in ready(loss, microbatches, score):
        for name, (total, count) in loss(score(packed), packed).metrics.items():
            sums.add(name, total, count)
    return sums.means(ONE)


def random_scores(packed: Packed, scale: float = 1.0, seed: int = 0) -> Scores:
    """Log-probabilities around the reference's, entropies and scalars, drawn by sample and place: the same in any
    layout.
    """
    drawn: list[Tensor] = []
    scalars: list[Tensor] = []
    for row, name in enumerate(packed.sample_ids):
        random = torch.Generator().manual_seed(sum(name.encode()) * 1000 + ord(name[-1]) + seed)
        num_targets = int((packed.row_N == row).sum())
        num_reads = int((packed.row_R == row).sum())
        drawn.append(torch.randn(num_targets, generator=random, dtype=torch.float64))
        scalars.append(torch.randn(num_reads, generator=random, dtype=torch.float64))
    logp_N = torch.cat(drawn) * scale - 3
    return Scores(-logp_N.abs(), entropy_N=logp_N.abs(), scalar_R=torch.cat(scalars) * scale)


def plain_pairs(lengths: Sequence[tuple[int, int]]) -> Packed:
    """Pairs whose answers have so many targets, of weight 1; rows and targets in this order, the better one first."""
    samples = [
        replace(
            answer(f"{number}.{better}", [1, 2], [3 + better] * length, number, preference=better),
            weight_N=np.ones(length),
        )
        for number, pair in enumerate(lengths)
        for better, length in zip((1, 0), pair, strict=True)
    ]
    return pack(samples, ALONE)


def with_values(packed: Packed, ref_logp_N: Tensor | None = None, **values: Tensor) -> Packed:
    """The same with another reference and other values of its samples."""
    streams = dict(packed.streams) if ref_logp_N is None else {"ref_logp_N": ref_logp_N}
    return replace(packed, streams=streams, values={**packed.values, **values})
