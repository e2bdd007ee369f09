"""Samples of a step to trees, and trees to micro-batches: pure functions of the samples.

``Rows`` makes the trees of a step by index: one tree a sample, or one a row whose answers are compared. ``assign``
divides a step's trees among ranks and micro-batches within a token budget, balanced by predicted cost; it does not
depend on the step. Neither depends on whether prefixes are shared in the end, on a restart, or on any randomness.

Tokens are counted as distinct tokens (a shared prefix once), since that is what a micro-batch holds. With
``batch.share_prefixes=false`` the same micro-batches are laid out in as many parts as the budget requires.

Does not say which samples a step has (``order.py``), and does not lay out tokens (``packing.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from taut.data.dataset import Dataset, Samples
from taut.data.order import MOST_IN_ARRAYS, Order, TokenLimit, is_large
from taut.data.packing import PackPolicy, pack, prefix_order, shared_prefixes
from taut.data.packing import common_prefix as common_prefix_of
from taut.data.render.images import outside, uncut, within
from taut.data.settings import BatchConfig
from taut.errors import ConfigError
from taut.types import IntArray, Packed, Sample, Tree


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


Microbatch = tuple[Tree, ...]
"""Trees that are computed together."""


class Piece(NamedTuple):
    """A tree that stays in one micro-batch, with its distinct tokens and predicted cost."""

    tree: Tree
    num_tokens: int
    cost: float


def assign(trees: Sequence[Tree], budget: Budget) -> list[list[Microbatch]]:
    """The micro-batches of every rank: ``[rank][micro-batch] -> trees``. A rank may have none.

    Atoms are never split; other samples are pooled, so that prefixes common to several trees are found too.
    """
    pool = [sample for tree in trees if not tree.is_atom for sample in tree.samples]
    atoms = [_piece(tree.samples, budget, is_atom=True) for tree in trees if tree.is_atom]
    assert not (atoms and budget.one_sample), "samples that run one at a time cannot be coupled"
    total = sum(piece.cost for piece in atoms) + _piece(pool, budget).cost
    # Finer pieces balance better and share less: take them only where they save more than 3%.
    best: list[list[Piece]] = []
    least = np.inf
    for share in (1.0, 0.5, 0.25) if budget.num_ranks > 1 else (np.inf,):
        pieces = atoms + _pieces(pool, budget, max_cost=share * total / budget.num_ranks)
        ranks: list[list[Piece]] = [[] for _ in range(budget.num_ranks)]
        loads = [0.0] * budget.num_ranks
        for piece in sorted(pieces, key=lambda piece: -piece.cost):
            rank = loads.index(min(loads))  # the largest first, to the least loaded rank
            ranks[rank].append(piece)
            loads[rank] += piece.cost
        if max(loads) < 0.97 * least:
            best, least = ranks, max(loads)
    return [_fill(pieces, budget) for pieces in best]


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
    sized = [Piece(unit, sum(s.num_tokens for s in unit.samples), 0.0) for unit in units]
    bins = _first_fit(sized, tokens)
    return [samples_of([piece.tree for piece in pieces]) for pieces in bins]


def _piece(samples: Sequence[Sample], budget: Budget, *, is_atom: bool = False) -> Piece:
    """The tree of samples that are laid out together, with their tokens and cost."""
    order, shared = shared_prefixes(samples, PackPolicy(True, budget.min_saved_tokens))
    lengths = np.array([samples[index].num_tokens for index in order])
    prefixes = np.array(shared)
    num_tokens = int((lengths - prefixes).sum())
    pairs = (lengths * (lengths + 1) - prefixes * (prefixes + 1)).sum() / 2
    num_targets = sum(sample.num_targets for sample in samples)
    rates = budget.cost
    cost = rates.per_token * num_tokens + rates.per_pair * pairs + rates.per_target * num_targets
    tree = Tree(tuple(samples[index] for index in order), is_atom)
    return Piece(tree, num_tokens, float(cost))


def _pieces(pool: Sequence[Sample], budget: Budget, max_cost: float) -> list[Piece]:
    """Groups of samples with common prefixes, cut where the shared prefix is shortest until all fit."""
    if not pool:
        return []
    if budget.one_sample:
        return [_piece([sample], budget) for sample in pool]
    order, shared = shared_prefixes(pool, PackPolicy(True, budget.min_saved_tokens))
    starts = [i for i, prefix in enumerate(shared) if prefix == 0]
    todo = [list(range(a, b)) for a, b in zip(starts, [*starts[1:], len(order)], strict=True)]
    done: list[Piece] = []
    while todo:
        run = todo.pop()
        piece = _piece([pool[order[i]] for i in run], budget)
        fits = piece.num_tokens <= budget.tokens_per_microbatch and piece.cost <= max_cost
        if fits or len(run) == 1:
            done.append(piece)
            continue
        # Cut it where the samples share least, and as near to the middle as that allows.
        middle = len(run) / 2
        cut = min(range(1, len(run)), key=lambda i: (shared[run[i]], abs(i - middle)))
        todo += [run[cut:], run[:cut]]
    return done


def _fill(pieces: Sequence[Piece], budget: Budget) -> list[Microbatch]:
    """The micro-batches of a rank's pieces."""
    if budget.one_sample:
        return [(piece.tree,) for piece in pieces]
    filled: list[Microbatch] = []
    for group in _first_fit(pieces, budget.tokens_per_microbatch):
        trees = tuple(piece.tree for piece in group)
        # Rarely a prefix that all trees share makes the longer prefixes of some save too little to be shared, and the
        # trees need more tokens together than apart.
        fits = _piece(samples_of(trees), budget).num_tokens <= budget.tokens_per_microbatch
        filled += [trees] if fits else [(tree,) for tree in trees]
    return filled


def _first_fit(pieces: Sequence[Piece], tokens: int) -> list[list[Piece]]:
    """First fit, longest first. A piece over the budget gets a bin of its own."""
    bins: list[list[Piece]] = []
    room: list[int] = []
    for piece in sorted(pieces, key=lambda piece: -piece.num_tokens):
        fitting = (index for index, free in enumerate(room) if free >= piece.num_tokens)
        index = next(fitting, None)
        if index is None:
            bins.append([])
            room.append(tokens)
            index = len(bins) - 1
        bins[index].append(piece)
        room[index] -= piece.num_tokens
    return bins


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
