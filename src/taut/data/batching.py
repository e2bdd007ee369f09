"""Samples of a step to trees, and trees to micro-batches: pure functions of the samples.

``Rows`` makes the trees of a step by index: one tree a sample, or one a row whose answers are compared. ``assign``
divides a step's trees among ranks and micro-batches within a token budget, balanced by predicted cost; it does not
depend on the step. Neither depends on whether prefixes are shared in the end, on a restart, or on any randomness.

Tokens are counted as distinct tokens (a shared prefix once), since that is what a micro-batch holds. With
``batch.share_prefixes=false`` the same micro-batches are laid out in as many parts as the budget requires.

Does not say which samples a step has (``order.py``), and does not lay out tokens (``packing.py``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush, heapreplace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from taut.data.dataset import Dataset, Samples
from taut.data.order import MOST_IN_ARRAYS, Order, TokenLimit, is_large
from taut.data.packing import (
    PackPolicy,
    num_distinct_tokens,
    pack,
    prefix_order,
    shared_prefixes,
)
from taut.data.packing import common_prefix as common_prefix_of
from taut.data.render.images import outside, uncut, within
from taut.data.settings import BatchConfig
from taut.errors import ConfigError
from taut.types import FloatArray, IntArray, Packed, Sample, Tree


def prefix_groups(samples: Sequence[Sample], min_tokens: int) -> IntArray:
    """The group number of each sample: a group is the samples that share a document.

    It is a run of at least two samples with a common prefix of ``min_tokens`` in which no smaller run shares
    ``min_tokens`` more: a system prompt common to all does not make one group of everything. An image counts as at
    least ``min_tokens`` tokens.
    """
    order = prefix_order(samples)
    shared = [common_prefix_of(samples[a], samples[b]) for a, b in pairwise(order)]
    common = [0]
    for index, size in zip(order, shared, strict=False):
        images = [image for image in samples[index].media if image.stop <= size]
        common.append(size + sum(max(0, min_tokens - (it.stop - it.start)) for it in images))
    group_of = np.full(len(samples), -1, dtype=np.int64)
    num_groups = 0
    runs = [(0, len(order))]
    while runs:
        start, stop = runs.pop()
        shortest = min(common[start + 1 : stop], default=0)
        # maximal runs of two or more inside it that share min_tokens more
        inner, at = [], start
        for index in range(start + 1, stop + 1):
            if index == stop or common[index] < shortest + min_tokens:
                if index - at > 1:
                    inner.append((at, index))
                at = index
        if inner:
            runs.extend(inner)
        elif shortest >= min_tokens:
            group_of[order[start:stop]] = num_groups
            num_groups += 1
    alone = group_of < 0
    group_of[alone] = np.arange(num_groups, num_groups + int(alone.sum()))
    return group_of


class CostModel(NamedTuple):
    """Predicted cost of a micro-batch, in FLOPs: per token, per visible pair of tokens, per target."""

    per_token: float = 1.0
    per_pair: float = 0.0
    per_target: float = 0.0


class Budget(NamedTuple):
    """The limits of the division of a step."""

    tokens_per_microbatch: int
    num_ranks: int = 1
    cost: CostModel = CostModel()
    min_saved_tokens: int = 16
    one_sample: bool = False
    """Whether every micro-batch is one sample: for models with state across tokens."""


PLAN = 2
"""Version of ``assign``: under another one the micro-batches of a step may be others, and numbers agree to rounding."""
Microbatch = tuple[Tree, ...]
"""Trees that are computed together."""


class Piece(NamedTuple):
    """Samples that stay in one micro-batch: a part of a ``Line``."""

    cost: float
    """Predicted, in FLOPs."""
    size: int
    """Distinct tokens; 1 where every micro-batch is one sample."""
    start: int
    stop: int


Bin = list[Piece]
"""The pieces of one micro-batch."""
Round = list[Bin]
"""The micro-batches that run at the same time, at most one a rank."""
SHARES = tuple(2.0 * 0.9**number for number in range(24))
"""Bounds of a piece's cost that are tried, in shares of what the slowest rank computes at least."""
MOST_FULL = 32
"""Bins without room that are passed over before there have to be more of them."""


def assign(trees: Sequence[Tree], budget: Budget) -> list[list[Microbatch]]:
    """The micro-batches of every rank: ``[rank][micro-batch] -> trees``. A rank may have none.

    Atoms are never split; other samples are pooled, so that prefixes common to several trees are found too, and a tree
    over a bound is cut along its depth-first order. Ranks wait for each other in every micro-batch (each gathers the
    weights of all), so the plan is the one in which the slowest ranks of all rounds take least. O(n log n).
    """
    line = Line(trees, budget)
    loads = [0.0] * budget.num_ranks
    ranks: list[list[Microbatch]] = [[] for _ in loads]
    for bins in line.rounds():
        # in each round the most to the rank that had least
        places = sorted(range(budget.num_ranks), key=loads.__getitem__)
        for rank, pieces in zip(places, sorted(bins, key=_cost, reverse=True), strict=False):
            ranks[rank] += line.microbatches(pieces)
            loads[rank] += _cost(pieces)
    return ranks


class Line:
    """The samples of a step in one line: those of each atom, then all others depth first.

    Neighbors have the longest common prefixes, so running sums give the tokens and the cost of any part.
    """

    def __init__(self, trees: Sequence[Tree], budget: Budget) -> None:
        pool = [sample for tree in trees if not tree.is_atom for sample in tree.samples]
        atoms = [tree.samples for tree in trees if tree.is_atom]
        assert not (atoms and budget.one_sample), "samples that run one at a time cannot be coupled"
        self.budget = budget
        self.most = 1 if budget.one_sample else budget.tokens_per_microbatch
        self.policy = PackPolicy(not budget.one_sample, budget.min_saved_tokens)
        self.samples: list[Sample] = []
        prefixes: list[int] = []
        for part in [*atoms, *([pool] if pool else [])]:
            order, shared = shared_prefixes(part, self.policy)
            self.samples += [part[index] for index in order]
            prefixes += shared
        self.num_coupled = len(self.samples) - len(pool)

        # sums over the samples before each place: distinct tokens, pairs, targets
        length = np.array([sample.num_tokens for sample in self.samples])
        prefix = np.array([*prefixes, 0])
        # what a part computes once more that begins inside a tree
        self.again = np.array([prefix, prefix * (prefix + 1) / 2, 0 * prefix])
        num_targets = [sample.num_targets for sample in self.samples]
        own = np.array([length, length * (length + 1) / 2, num_targets]) - self.again[:, :-1]
        self.sums = np.concatenate([np.zeros((3, 1)), np.cumsum(own, axis=1)], axis=1)

        # atoms, and the trees of the others
        first = np.cumsum([0, *(len(atom) for atom in atoms)])
        roots = np.flatnonzero(prefix == 0)
        roots = roots[roots >= self.num_coupled]
        others = self.pieces(roots[:-1], roots[1:])
        self.trees = self.pieces(first[:-1], first[1:]) + others[:: 1 if budget.one_sample else -1]

    def pieces(self, start: IntArray, stop: IntArray) -> list[Piece]:
        """The parts between these places."""
        work = self.sums[:, stop] - self.sums[:, start] + self.again[:, start]
        size = stop - start if self.budget.one_sample else work[0].astype(int)
        return [*map(Piece, self.cost(work).tolist(), size.tolist(), start.tolist(), stop.tolist())]

    def cost(self, work: FloatArray) -> FloatArray:
        """The predicted cost of tokens, pairs and targets."""
        parts = np.array(self.budget.cost)[:, None] * work
        cost: FloatArray = parts[0] + parts[1] + parts[2]
        return cost

    def rounds(self) -> list[Round]:
        """The micro-batches of all ranks."""
        num_ranks = self.budget.num_ranks
        pieces = self.cut(np.inf)
        if num_ranks == 1:
            bins = _first_fit([piece.size for piece in pieces], self.most)
            return [[[pieces[index] for index in indices]] for indices in bins]
        places = np.arange(len(self.samples))
        largest = max((it.cost for it in self.pieces(places, places + 1)), default=0.0)
        floor = max(_cost(pieces) / num_ranks, largest)
        # Finer pieces balance better and share less: take them only where they save more than 2%.
        best = _by_rounds(pieces, self.most, num_ranks)
        least = _lockstep(best)
        for share in SHARES:
            before, pieces = pieces, self.cut(share * floor)
            if max(floor, _cost(pieces) / num_ranks) > 0.98 * least:
                break
            if pieces != before:
                rounds = _by_rounds(pieces, self.most, num_ranks)
                if (lockstep := _lockstep(rounds)) < 0.98 * least:
                    best, least = rounds, lockstep
        return best

    def cut(self, most_cost: float) -> list[Piece]:
        """Pieces within the budget of at most this cost, the largest cost first. A sample or atom may be over both."""
        whole, start, stop = [], list[int](), list[int]()
        tokens, cost = self.sums[0].tolist(), self.cost(self.sums).tolist()
        again = self.again[0].tolist(), self.cost(self.again).tolist()
        for tree in self.trees:
            is_within = tree.size <= self.most and tree.cost <= most_cost
            if is_within or tree.stop - tree.start == 1 or tree.start < self.num_coupled:
                whole.append(tree)
                continue
            at = tree.start
            while at < tree.stop:
                limits = tokens[at] + self.most - again[0][at], cost[at] + most_cost - again[1][at]
                end = min(
                    bisect_right(tokens, limits[0], at + 2, tree.stop + 1) - 1,
                    bisect_right(cost, limits[1], at + 2, tree.stop + 1) - 1,
                )
                start.append(at)
                stop.append(end)
                at = end
        pieces = whole + self.pieces(np.array(start, np.int64), np.array(stop, np.int64))
        return sorted(pieces, key=lambda piece: -piece.cost)

    def microbatches(self, pieces: Bin) -> list[Microbatch]:
        """The micro-batch of these pieces; rarely several, where so little of a prefix is left to share in a part, or
        beside a prefix that all share, that they need more tokens together than apart.
        """
        trees = tuple(
            Tree(tuple(self.samples[it.start : it.stop]), it.start < self.num_coupled)
            for it in pieces
        )
        samples = samples_of(trees)
        is_whole = len(trees) == 1 and (trees[0].is_atom or len(samples) == 1)
        # where prefixes part, fewer tokens are computed again than are worth sharing
        again = (len(samples) - 1) * max(0, self.budget.min_saved_tokens - 1)
        if (
            is_whole
            or sum(piece.size for piece in pieces) + again <= self.most
            or sum(sample.num_tokens for sample in samples) <= self.most
            or num_distinct_tokens(samples, self.policy) <= self.most
        ):
            return [trees]
        if len(pieces) == 1:
            (_, _, start, stop) = pieces[0]
            bounds = np.array([start, (start + stop) // 2, stop])
            pieces = self.pieces(bounds[:-1], bounds[1:])
        return [some for piece in pieces for some in self.microbatches([piece])]


def _cost(pieces: Bin) -> float:
    return sum(piece.cost for piece in pieces)


def _lockstep(rounds: Sequence[Round]) -> float:
    """The sum over rounds of the largest cost, which is first in a round."""
    return sum(_cost(bins[0]) for bins in rounds)


def _by_rounds(pieces: Sequence[Piece], most: int, num_ranks: int) -> list[Round]:
    """Bins of about equal cost, as many to all ranks as the budget requires; those of a round are neighbors by cost."""
    least = max(-(-sum(it.size for it in pieces) // most), sum(2 * it.size > most for it in pieces))
    num_rounds = -(-least // num_ranks)
    while (bins := _leveled(pieces, most, num_rounds * num_ranks)) is None:
        num_rounds += 1 + num_rounds // 8
    bins = sorted(filter(None, bins), key=_cost, reverse=True)
    return [bins[at : at + num_ranks] for at in range(0, len(bins), num_ranks)]


def _leveled(pieces: Sequence[Piece], most: float, num_bins: int) -> list[Bin] | None:
    """Each piece in turn to the bin of least cost that has room; None if there is none among those of least cost."""
    bins: list[Bin] = [[] for _ in range(num_bins)]
    heap = [(0.0, 0, number) for number in range(num_bins)]
    for piece in pieces:
        full: list[tuple[float, int, int]] = []
        while heap[0][1] and heap[0][1] + piece.size > most:
            full.append(heappop(heap))
            if not heap or len(full) > MOST_FULL:
                return None
        cost, size, number = heap[0]
        bins[number].append(piece)
        heapreplace(heap, (cost + piece.cost, size + piece.size, number))
        for item in full:
            heappush(heap, item)
    return bins


def _first_fit(sizes: Sequence[int], most: int) -> list[list[int]]:
    """First fit, the largest first: the indices in each bin. What is over the budget gets a bin of its own."""
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    over = [[index] for index in order if sizes[index] > most]
    bins: list[list[int]] = [[] for _ in order]
    # a binary tree over the bins: the most room below each node
    width = 1 << len(bins).bit_length()
    room = [most] * (2 * width)
    for index in order[len(over) :]:
        node = 1
        while node < width:
            node = 2 * node + (room[2 * node] < sizes[index])
        bins[node - width].append(index)
        room[node] -= sizes[index]
        while node := node // 2:
            room[node] = max(room[2 * node], room[2 * node + 1])
    return over + [indices for indices in bins if indices]


def samples_of(trees: Sequence[Tree]) -> list[Sample]:
    """The samples of trees."""
    return [sample for tree in trees for sample in tree.samples]


def layouts(trees: Microbatch, policy: PackPolicy, tokens: int) -> list[Packed]:
    """The layouts of one planned micro-batch: one, or several within the budget where prefixes are not shared."""
    return [pack(samples, policy) for samples in divide(trees, policy, tokens)]


def divide(trees: Microbatch, policy: PackPolicy, tokens: int) -> list[list[Sample]]:
    """The samples of each layout of a planned micro-batch. An atom stays in one layout either way."""
    if policy.share_prefixes:
        return [samples_of(trees)]
    units = [
        unit
        for tree in trees
        for unit in ([tree] if tree.is_atom else [Tree((sample,)) for sample in tree.samples])
    ]
    bins = _first_fit([sum(s.num_tokens for s in unit.samples) for unit in units], tokens)
    return [samples_of([units[index] for index in indices]) for indices in bins]


# -- trees of a data set


@dataclass(frozen=True, eq=False)
class Rows:
    """The trees of a data set by index: one a sample, to be cut and pooled as the budget requires; or one a row whose
    answers are compared, which is never cut (``Sample.group`` ties its samples)."""

    data: Dataset
    are_answers: bool = False
    """Whether the samples of a row are compared with each other."""
    has_targets: bool = True
    """False: no token is predicted; a scalar head is read."""

    def __len__(self) -> int:
        return self.data.num_groups if self.are_answers else len(self.data)

    def order(self, batch: BatchConfig, seed: int, samples_per_step: int) -> Order:
        """The order of the trees. Raises ConfigError where there are too many for groups or steps of tokens."""
        parts = self.data.parts
        counts = tuple(part.num_groups if self.are_answers else part.num_samples for part in parts)
        # Groups and steps of tokens are arrays over the samples.
        setting = remedy = ""
        if batch.group_prefixes:
            setting, remedy = "batch.group_prefixes=true", "batch.group_prefixes=false"
        elif batch.tokens_per_step is not None:
            setting = f"batch.tokens_per_step={batch.tokens_per_step}"
            remedy = "batch.samples_per_step"
        if setting and is_large(counts):
            raise ConfigError(
                f"{setting}, and data.train has {sum(counts):,} samples; expected at most {MOST_IN_ARRAYS:,}, since "
                f"it reads all of them at the start; set {remedy}"
            )
        groups = self.prefix_groups(batch.group_min_tokens) if batch.group_prefixes else None
        weights = tuple(part.weight for part in parts)
        limit = None
        if batch.tokens_per_step is not None:
            limit = TokenLimit(batch.tokens_per_step, self.lengths())
        return Order(counts, weights, seed, samples_per_step, batch.shuffle, groups, limit)

    def lengths(self) -> IntArray:
        """The tokens of each tree; a prefix that its samples share counts for each of them."""
        sizes = self.data.sizes("tokens", rows=self.are_answers)
        return np.concatenate([np.zeros(0, np.int64), *sizes])

    def expect(self, steps: Iterable[Sequence[int]]) -> None:
        """Fetch ahead the shards of these trees, which the next steps have (``Dataset.expect``)."""
        self.data.expect(steps, rows=self.are_answers)

    def trees(self, indices: Sequence[int]) -> list[Tree]:
        """The trees of a step. Their groups are numbered in this order."""
        rows = [list[Sample]()] * len(indices)
        for place in np.argsort(indices, kind="stable").tolist():  # each shard is opened once
            rows[place] = self.samples(indices[place])
        return self.trees_of(rows)

    def trees_of(self, rows: Sequence[Sequence[Sample]]) -> list[Tree]:
        """The trees of rows with these samples."""
        trees = []
        for number, samples in enumerate(rows):
            if not self.has_targets:
                samples = [sample.without_targets() for sample in samples]
            if self.are_answers:
                samples = [replace(sample, group=number) for sample in samples]
            trees.append(Tree(tuple(samples), is_atom=self.are_answers))
        return trees

    def mismatched(self, indices: Sequence[int], max_length: int) -> list[Tree]:
        """Each sample's prompt with the answer of the sample after it, cut at ``max_length`` tokens: KTO's reference
        point is taken over these. A sample that comes after itself takes the answer of the next one in the data. Every
        token of the answer is a target, except those of images (of a question inside it).
        """
        trees = []
        for index, following in zip(indices, [*indices[1:], indices[0]], strict=True):
            other_index = (index + 1) % len(self.data) if index == following else following
            sample, other = self.data[index], self.data[other_index]
            # The other answer, cut to the room after this prompt, but not inside an image.
            begin, first = int(sample.target_at_N[0]), int(other.target_at_N[0])
            longest = first + max(1, max_length - begin)
            stop = min(other.num_tokens, uncut(other.media, longest))
            ids_T = np.concatenate([sample.ids_T[:begin], other.ids_T[first:stop]])
            images = [
                replace(image, start=image.start + begin, stop=image.stop + begin)
                for image in within(other.media, first, stop)
            ]
            at_N = begin + np.flatnonzero(outside(images, ids_T.size)[begin:])
            media = (*within(sample.media, 0, begin), *images)
            name = f"{sample.id} with the answer of {other.id}"
            spliced = Sample(name, ids_T, at_N, np.ones(at_N.size), media, values=sample.values)
            trees.append(Tree((spliced,)))
        return trees

    def prefix_groups(self, min_tokens: int) -> IntArray:
        """The document number of each tree (``prefix_groups``)."""
        first = [self.samples(index)[0] for index in range(len(self))]
        return prefix_groups(first if self.are_answers else self.data, min_tokens)

    def samples(self, index: int) -> list[Sample]:
        """The samples of a tree, unchanged."""
        if not self.are_answers:
            return [self.data[index]]
        own = self.data.row(index)
        return self.data[own.start : own.stop]


@dataclass(frozen=True, eq=False)
class PreferredAnswers(Samples):
    """The preferred answer of each row: the best of compared answers, or the first of several best ones."""

    rows: Rows

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, index: int) -> Sample:
        samples = self.rows.samples(index)
        return max(samples, key=lambda sample: sample.values.get("preference", 0.0))


# -- sizes of a step


@dataclass(frozen=True)
class StepPlan:
    """Sizes of a step before it is computed, over all ranks."""

    step: int
    num_samples: int
    num_targets: int
    padded: int
    """Number of tokens if every sample were padded to the longest of the step."""
    unshared: int
    """Number of tokens of the samples."""
    computed: int
    """Number of tokens computed, with the prefixes that the policy shares."""
    num_microbatches: int


def lay_out(trees: Sequence[Tree], budget: Budget, policy: PackPolicy) -> list[Packed]:
    """The micro-batches of a step's trees, over all ranks, as training lays them out."""
    return [
        packed
        for rank in assign(trees, budget)
        for planned in rank
        for packed in layouts(planned, policy, budget.tokens_per_microbatch)
    ]


def step_plan(step: int, trees: Sequence[Tree], packs: Sequence[Packed]) -> StepPlan:
    """The sizes of a step that was laid out."""
    lengths = [sample.num_tokens for sample in samples_of(trees)]
    return StepPlan(
        step=step,
        num_samples=len(lengths),
        num_targets=sum(packed.num_targets for packed in packs),
        padded=len(lengths) * max(lengths),
        unshared=sum(lengths),
        computed=sum(packed.num_tokens for packed in packs),
        num_microbatches=len(packs),
    )
