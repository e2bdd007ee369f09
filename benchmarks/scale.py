"""A step's plan, by samples and ranks: seconds, tokens computed, and what ranks in lockstep take, before and after.

*before* is ``assign`` as it was: every tree cut where its shared prefix is shortest until each piece fits, and a scan
of all ranks for each piece. Samples are random tokens, costs those of an 8B model. No model runs.

    seconds     CPU seconds of this process: every rank plans for all
    computed    tokens computed over distinct tokens
    fullest     predicted cost of the fullest rank
    lockstep    the sum over micro-batches of the slowest rank, which is what ranks that wait for each other take

Costs are over an ideal: no prefix repeated and an even division, or the largest sample where that is more.

    python benchmarks/scale.py            # minutes
    python benchmarks/scale.py --quick    # under a minute: fewer samples, shorter trajectories
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from taut.data.batching import Budget, CostModel, Microbatch, assign, samples_of
from taut.data.packing import PackPolicy, num_distinct_tokens, shared_prefixes
from taut.types import IntArray, Sample, Tree

COST = CostModel(6 * 8e9, 12 * 4096 * 32, 6 * 4096 * 128256)
VOCAB = 150_000

# -- samples


def sample(name: str, ids_T: IntArray, num_given: int) -> Sample:
    """A sample whose tokens after the given ones are targets."""
    at_N = np.arange(max(1, num_given), ids_T.size)
    return Sample(name, ids_T, at_N, np.ones(at_N.size))


def chats(number: int, mean: int, longest: int = 32_768) -> list[Tree]:
    """Samples without common prefixes, of log-normal lengths."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(mean) - 0.4, 0.9, number).astype(int), 16, longest)
    return [
        Tree((sample(f"chats.jsonl:{i}", random.integers(0, VOCAB, length), length // 3),))
        for i, length in enumerate(lengths)
    ]


def groups(number: int, prompt: int, mean: int, longest: int, size: int = 16) -> list[Tree]:
    """Prompts, each with a group of answers."""
    random = np.random.default_rng(0)
    trees = []
    for group in range(number // size):
        ids_T = random.integers(0, VOCAB, prompt)
        lengths = np.clip(random.lognormal(np.log(mean) - 0.25, 0.7, size).astype(int), 16, longest)
        answers = [np.append(ids_T, random.integers(0, VOCAB, length)) for length in lengths]
        of_group = [sample(f"{group}#{i}", answer, prompt) for i, answer in enumerate(answers)]
        trees.append(Tree(tuple(of_group)))
    return trees


def trajectory(turns: int) -> list[Tree]:
    """An agent whose history is rewritten each turn (thinking is dropped): a sample a turn, each with all before."""
    random = np.random.default_rng(0)
    history = random.integers(0, VOCAB, 1000)
    samples = []
    for turn in range(turns):
        thinking, answer, result = (random.integers(0, VOCAB, size) for size in (60, 250, 50))
        ids_T = np.concatenate([history, thinking, answer])
        samples.append(sample(f"turn {turn}", ids_T, history.size))
        history = np.concatenate([history, answer, result])
    return [Tree(tuple(samples))]


# -- the plan as it was


class Piece(NamedTuple):
    """A tree that stays in one micro-batch."""

    tree: Tree
    num_tokens: int
    cost: float


def piece_of(samples: Sequence[Sample], budget: Budget) -> Piece:
    """The tree of samples that are laid out together."""
    order, shared = shared_prefixes(samples, PackPolicy(True, budget.min_saved_tokens))
    lengths = np.array([samples[index].num_tokens for index in order])
    prefixes = np.array(shared)
    num_tokens = int((lengths - prefixes).sum())
    pairs = (lengths * (lengths + 1) - prefixes * (prefixes + 1)).sum() / 2
    num_targets = sum(sample.num_targets for sample in samples)
    rates = budget.cost
    cost = rates.per_token * num_tokens + rates.per_pair * pairs + rates.per_target * num_targets
    return Piece(Tree(tuple(samples[index] for index in order)), num_tokens, float(cost))


def assign_before(trees: Sequence[Tree], budget: Budget) -> list[list[Microbatch]]:
    """``assign`` as it was, without atoms."""
    pool = samples_of(trees)
    total = piece_of(pool, budget).cost
    best: list[list[Piece]] = []
    least = np.inf
    for share in (1.0, 0.5, 0.25) if budget.num_ranks > 1 else (np.inf,):
        ranks: list[list[Piece]] = [[] for _ in range(budget.num_ranks)]
        loads = [0.0] * budget.num_ranks
        pieces = pieces_before(pool, budget, share * total / budget.num_ranks)
        for piece in sorted(pieces, key=lambda piece: -piece.cost):
            rank = loads.index(min(loads))
            ranks[rank].append(piece)
            loads[rank] += piece.cost
        if max(loads) < 0.97 * least:
            best, least = ranks, max(loads)
    return [filled_before(pieces, budget) for pieces in best]


def pieces_before(pool: Sequence[Sample], budget: Budget, max_cost: float) -> list[Piece]:
    """Trees, cut where the shared prefix is shortest until all fit."""
    order, shared = shared_prefixes(pool, PackPolicy(True, budget.min_saved_tokens))
    starts = [i for i, prefix in enumerate(shared) if prefix == 0]
    todo = [list(range(a, b)) for a, b in pairwise([*starts, len(order)])]
    done: list[Piece] = []
    while todo:
        run = todo.pop()
        piece = piece_of([pool[order[i]] for i in run], budget)
        fits = piece.num_tokens <= budget.tokens_per_microbatch and piece.cost <= max_cost
        if fits or len(run) == 1:
            done.append(piece)
            continue
        middle = len(run) / 2
        cut = min(range(1, len(run)), key=lambda i: (shared[run[i]], abs(i - middle)))
        todo += [run[cut:], run[:cut]]
    return done


def filled_before(pieces: Sequence[Piece], budget: Budget) -> list[Microbatch]:
    """The micro-batches of a rank: first fit, longest first."""
    most = budget.tokens_per_microbatch
    bins: list[list[Piece]] = []
    room: list[int] = []
    for piece in sorted(pieces, key=lambda piece: -piece.num_tokens):
        index = next((i for i, free in enumerate(room) if free >= piece.num_tokens), None)
        if index is None:
            bins.append([])
            room.append(most)
            index = len(bins) - 1
        bins[index].append(piece)
        room[index] -= piece.num_tokens
    filled: list[Microbatch] = []
    for group in bins:
        trees = tuple(piece.tree for piece in group)
        fits = piece_of(samples_of(trees), budget).num_tokens <= most
        filled += [trees] if fits else [(tree,) for tree in trees]
    return filled


# -- measures


class Measured(NamedTuple):
    """A plan in numbers; costs over the ideal."""

    seconds: float
    computed: float
    fullest: float
    lockstep: float


def measured(
    plan: Callable[[Sequence[Tree], Budget], list[list[Microbatch]]],
    trees: Sequence[Tree],
    budget: Budget,
) -> Measured:
    """Plan a step, and measure the plan."""
    begin = time.process_time()
    ranks = plan(trees, budget)
    seconds = time.process_time() - begin

    everything = samples_of(trees)
    planned = [sample.id for rank in ranks for some in rank for sample in samples_of(some)]
    assert sorted(planned) == sorted(sample.id for sample in everything), "each sample once"
    whole = piece_of(everything, budget)
    ideal = max(whole.cost / len(ranks), *(piece_of([it], budget).cost for it in everything))
    pieces = [[piece_of(samples_of(some), budget) for some in rank] for rank in ranks]
    costs = [[piece.cost for piece in rank] for rank in pieces]
    rounds = range(max(map(len, costs)))
    slowest = [max(rank[k] for rank in costs if k < len(rank)) for k in rounds]
    computed = sum(piece.num_tokens for rank in pieces for piece in rank)
    distinct = num_distinct_tokens(everything, PackPolicy(True, budget.min_saved_tokens))
    fullest = max(map(sum, costs))
    return Measured(seconds, computed / distinct, fullest / ideal, sum(slowest) / ideal)


def cases(is_quick: bool) -> Iterator[tuple[str, list[Tree], Budget]]:
    """Name, trees and budget of each case."""
    k = 1 if is_quick else 4
    yield "SFT, 1k tokens", chats(1024 * k, 1000), Budget(16_384, 16 * k, COST)
    yield "GRPO, 16 answers of 2k", groups(1024, 512, 2000, 8192), Budget(16_384, 8, COST)
    yield "GRPO, 16 answers of 2k", groups(1024, 512, 2000, 8192), Budget(16_384, 64, COST)
    yield (
        "GRPO, 16 answers of 7k",
        groups(256 * k, 1000, 7000, 16_384),
        Budget(32_768, 16 * k, COST),
    )
    turns = 80 if is_quick else 200
    for budget in (65_536, 131_072):
        yield f"one trajectory, {turns} turns", trajectory(turns), Budget(budget, 8, COST)
    num_samples, num_ranks = (8192, 512) if is_quick else (65_536, 4096)
    yield "SFT, 200 tokens", chats(num_samples, 200, 2048), Budget(16_384, num_ranks, COST)
    yield (
        "GRPO, 16 answers of 200",
        groups(num_samples, 64, 200, 1024),
        Budget(16_384, num_ranks, COST),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    asked = parser.parse_args()
    print("| case | samples | ranks | budget | plan | seconds | computed | fullest | lockstep |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, trees, budget in cases(asked.quick):
        sizes = (
            f"{len(samples_of(trees)):,} | {budget.num_ranks:,} | {budget.tokens_per_microbatch:,}"
        )
        for label, plan in (("before", assign_before), ("now", assign)):
            found = measured(plan, trees, budget)
            figures = " | ".join(f"{value:.3f}" for value in found)
            print(f"| {name} | {sizes} | {label} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
