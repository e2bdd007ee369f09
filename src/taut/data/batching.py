"""Who goes in which step, rank and micro-batch: pure functions of the data, the seed and the step.

``Order`` says which samples a step has; it knows nothing of ranks or micro-batches. ``assign`` divides a step's trees
among ranks and micro-batches within a token budget, balanced by predicted cost; it knows nothing of steps. Neither
depends on whether prefixes are shared in the end, on a restart, or on anything random but the seed.

Tokens are counted as distinct tokens (a shared prefix once): that is what a micro-batch holds. With
``batch.share_prefixes=false`` the same micro-batches are laid out in as many parts as the budget asks for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Annotated, NamedTuple, overload

import numpy as np
from pydantic import Field

from taut.config import configclass
from taut.data.dataset import Dataset
from taut.data.images import uncut, within
from taut.data.packing import PackPolicy, pack, prefix_order, shared_prefixes
from taut.data.packing import common_prefix as common_prefix_of
from taut.errors import ConfigError
from taut.types import FloatArray, IntArray, Packed, Sample, Tree


@configclass
class BatchConfig:
    """What makes up an optimizer step, and how it is cut to fit."""

    samples_per_step: Annotated[int, Field(ge=1)] = 32
    """Samples in an optimizer step, over all ranks and micro-batches. Where answers are compared, a row is one."""
    tokens_per_microbatch: Annotated[int, Field(ge=1)] = 8192
    """Most tokens computed at a time on one rank; a single longer sample gets a micro-batch of its own."""
    halve_when_out_of_memory: bool = False
    """Where a micro-batch does not fit into memory, begin the step again with half the tokens, for the rest of the run.
    Changes numbers by rounding only; each time is recorded, and done again on resume. One rank only."""
    share_prefixes: bool = True
    """Compute a prefix that samples of a micro-batch have in common once. Never changes the plan or the numbers."""
    min_saved_tokens: Annotated[int, Field(ge=1)] = 16
    """Merge a prefix where that saves at least so many tokens."""
    group_prefixes: bool = False
    """Keep samples with a long common prefix (a document's questions) in one step: the shuffle moves whole groups.
    One is cut only where no whole one fills a step. Needs shuffle."""
    group_min_tokens: Annotated[int, Field(ge=1)] = 64
    """How long a common prefix has to be for group_prefixes; a picture counts as long enough."""
    shuffle: bool = True
    """Shuffle the samples anew in each epoch; false: the order of the data files."""

    def __post_init__(self) -> None:
        if self.group_prefixes and not self.shuffle:
            raise ConfigError(
                "batch.group_prefixes=true and batch.shuffle=false contradict each other: grouping moves samples and "
                "shuffle=false keeps the order of the files; keep one"
            )


class Cursor(NamedTuple):
    """How far a run has come: after ``step``, so many samples had been seen."""

    step: int = 0
    samples: int = 0


START = Cursor()


@dataclass(frozen=True)
class Order:
    """Which samples each step has. Epochs follow each other without a gap, so a step may span two."""

    weights: FloatArray
    """Per sample: how many times an epoch has it; fractions are chosen anew each epoch. Equal within a source."""
    seed: int
    samples_per_step: int
    is_shuffled: bool = True
    groups: IntArray | None = None
    """Per sample the group it is kept with; None: every sample moves alone."""
    origin: Cursor = START
    """From where steps are full ones. Not the start where a run ended on a small step and then was made longer."""

    @cached_property
    def epoch_size(self) -> int:
        """Samples in an epoch, the same for every epoch."""
        return sum(self._quota(weight) for weight in np.unique(self.weights))

    def num_steps(self, epochs: float) -> int:
        """Steps in so many epochs; the last may be smaller."""
        left = self._num_samples(epochs) - self.origin.samples
        return self.origin.step + max(0, -(-left // self.samples_per_step))

    def cursor(self, step: int, epochs: float | None = None) -> Cursor:
        """How far a run is after a step."""
        samples = self._begin(step + 1)
        return Cursor(step, samples if epochs is None else min(samples, self._num_samples(epochs)))

    def going_on_from(self, cursor: Cursor, epochs: float | None) -> Order:
        """The order of a run that has come this far: no sample is left out, or seen twice."""
        is_there = epochs is None or cursor.step <= self.num_steps(epochs)
        if is_there and self.cursor(cursor.step, epochs) == cursor:
            return self
        return replace(self, origin=cursor)

    def step(self, step: int, epochs: float | None = None) -> list[int]:
        """Sample indices of a step (counted from 1). ``epochs``: where the data end; None: they go round and round."""
        start = self._begin(step)
        stop = start + self.samples_per_step
        if epochs is not None:
            stop = min(stop, self._num_samples(epochs))
        chosen: list[int] = []
        while start < stop:
            epoch, offset = divmod(start, self.epoch_size)
            part = self.epoch(epoch)[offset : offset + stop - start]
            chosen.extend(part.tolist())
            start += part.size
        return chosen

    def epoch(self, epoch: int) -> IntArray:
        """All sample indices of an epoch (counted from 0), in order."""
        cached = self.__dict__.get("_epoch")
        if cached is None or cached[0] != epoch:
            cached = (epoch, self._make_epoch(epoch))
            self.__dict__["_epoch"] = cached
        order: IntArray = cached[1]
        return order

    def _make_epoch(self, epoch: int) -> IntArray:
        random = np.random.default_rng([self.seed, epoch])
        members = []
        for weight in np.unique(self.weights):
            rows = np.flatnonzero(self.weights == weight)
            times, rest = divmod(self._quota(weight), rows.size)
            members.append(np.tile(rows, times))
            if rest:
                members.append(random.permutation(rows)[:rest])
        chosen = np.sort(np.concatenate(members))
        if not self.is_shuffled:
            return chosen
        chosen = random.permutation(chosen)
        if self.groups is None:
            return chosen
        rank_of_group = random.permutation(int(self.groups.max()) + 1)
        chosen = chosen[np.argsort(rank_of_group[self.groups[chosen]], kind="stable")]
        documents = np.split(chosen, np.flatnonzero(np.diff(self.groups[chosen])) + 1)
        begun = epoch * self.epoch_size % self.samples_per_step
        return np.concatenate(_settle(documents, self.samples_per_step, begun))

    def _begin(self, step: int) -> int:
        return self.origin.samples + (step - 1 - self.origin.step) * self.samples_per_step

    def _num_samples(self, epochs: float) -> int:
        return max(1, round(epochs * self.epoch_size))

    def _quota(self, weight: float) -> int:
        return round(float(weight) * int((self.weights == weight).sum()))


def _settle(documents: list[IntArray], step_size: int, begun: int) -> list[IntArray]:
    """The documents in their order, but a step that has room left takes the next that fits it whole.

    One is cut only where none fits, or where it is larger than a step. ``begun``: samples the first step has already.
    """
    waiting: dict[int, deque[int]] = {}
    for number, document in enumerate(documents):
        waiting.setdefault(document.size, deque()).append(number)
    settled, room = [], step_size - begun
    while waiting:
        first = min(queue[0] for queue in waiting.values())
        fitting = [queue[0] for size, queue in waiting.items() if size <= room]
        is_too_large = documents[first].size > step_size
        chosen = documents[first if is_too_large else min(fitting, default=first)]
        waiting[chosen.size].popleft()
        if not waiting[chosen.size]:
            del waiting[chosen.size]
        settled.append(chosen)
        room = (room - chosen.size) % step_size or step_size
    return settled


def prefix_groups(samples: Sequence[Sample], min_tokens: int) -> IntArray:
    """For each sample the number of the group it belongs to: samples that share a document.

    A group is a run of at least two samples with a common prefix of ``min_tokens`` in which no smaller run shares
    ``min_tokens`` more: a system prompt common to all does not make one group of everything. A picture has the weight
    of ``min_tokens`` at least.
    """
    order = prefix_order(samples)
    shared = [common_prefix_of(samples[a], samples[b]) for a, b in pairwise(order)]
    common = [0, *(_weight(samples[a], n, min_tokens) for a, n in zip(order, shared, strict=False))]
    group_of = np.full(len(samples), -1, dtype=np.int64)
    num_groups = 0
    runs = [(0, len(order))]
    while runs:
        start, stop = runs.pop()
        shortest = min(common[start + 1 : stop], default=0)
        inner = _runs_above(common, start, stop, shortest + min_tokens)
        if inner:
            runs.extend(inner)
        elif shortest >= min_tokens:
            group_of[order[start:stop]] = num_groups
            num_groups += 1
    alone = group_of < 0
    group_of[alone] = np.arange(num_groups, num_groups + int(alone.sum()))
    return group_of


def _weight(sample: Sample, size: int, least: int) -> int:
    """Of a sample's first tokens: their number, and what the pictures among them lack of ``least``."""
    pictures = [one for one in sample.media if one.stop <= size]
    return size + sum(max(0, least - (one.stop - one.start)) for one in pictures)


def _runs_above(common: list[int], start: int, stop: int, least: int) -> list[tuple[int, int]]:
    """Maximal runs of two or more neighbours inside [start, stop) that share at least ``least`` tokens."""
    runs, at = [], start
    for i in range(start + 1, stop + 1):
        if i == stop or common[i] < least:
            if i - at > 1:
                runs.append((at, i))
            at = i
    return runs


class CostModel(NamedTuple):
    """Predicted cost of a micro-batch, in FLOPs: per token, per visible pair of tokens, per target."""

    per_token: float = 1.0
    per_pair: float = 0.0
    per_target: float = 0.0


class Budget(NamedTuple):
    """How a step is divided."""

    tokens_per_microbatch: int
    num_ranks: int = 1
    cost: CostModel = CostModel()
    min_saved_tokens: int = 16
    one_sample: bool = False
    """Every micro-batch is one sample: for models with state across tokens."""


Microbatch = tuple[Tree, ...]
"""What is computed together, as planned."""


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
    best: list[list[Piece]] = []
    for share in (1.0, 0.5, 0.25) if budget.num_ranks > 1 else (np.inf,):
        pieces = atoms + _pieces(pool, budget, max_cost=share * total / budget.num_ranks)
        ranks = _balance(pieces, budget.num_ranks)
        if not best or _largest_cost(ranks) < 0.97 * _largest_cost(best):
            best = ranks
    return [_fill(pieces, budget) for pieces in best]


def samples_of(trees: Sequence[Tree]) -> list[Sample]:
    """The samples of a micro-batch, or of any trees."""
    return [sample for tree in trees for sample in tree.samples]


def imbalance(ranks: Sequence[Sequence[Microbatch]], budget: Budget) -> float:
    """Largest over mean predicted cost of the ranks."""
    costs = [sum(_piece(samples_of(trees), budget).cost for trees in rank) for rank in ranks]
    return max(costs) / (sum(costs) / len(costs))


def layouts(trees: Microbatch, policy: PackPolicy, tokens: int) -> list[Packed]:
    """One planned micro-batch as it is computed: one layout, or several within the budget where sharing is off.

    An atom stays in one layout either way.
    """
    if policy.share_prefixes:
        return [pack(samples_of(trees), policy)]
    units = [
        unit
        for tree in trees
        for unit in ([tree] if tree.is_atom else [Tree((sample,)) for sample in tree.samples])
    ]
    sized = [Piece(unit, sum(s.num_tokens for s in unit.samples), 0.0) for unit in units]
    bins = _first_fit(sized, tokens)
    return [pack(samples_of([piece.tree for piece in some]), policy) for some in bins]


def _piece(samples: Sequence[Sample], budget: Budget, *, is_atom: bool = False) -> Piece:
    """Samples laid out together."""
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
    """Samples with common prefixes together, cut where the shared prefix is shortest until all fit."""
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
        middle = len(run) / 2
        cut = min(range(1, len(run)), key=lambda i: (shared[run[i]], abs(i - middle)))
        todo += [run[cut:], run[:cut]]
    return done


def _balance(pieces: Sequence[Piece], num_ranks: int) -> list[list[Piece]]:
    """Largest first, to the rank with the least cost so far."""
    ranks: list[list[Piece]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for piece in sorted(pieces, key=lambda piece: -piece.cost):
        rank = loads.index(min(loads))
        ranks[rank].append(piece)
        loads[rank] += piece.cost
    return ranks


def _largest_cost(ranks: Sequence[Sequence[Piece]]) -> float:
    return max(sum(piece.cost for piece in rank) for rank in ranks)


def _fill(pieces: Sequence[Piece], budget: Budget) -> list[Microbatch]:
    """A rank's pieces in micro-batches."""
    if budget.one_sample:
        return [(piece.tree,) for piece in pieces]
    filled: list[Microbatch] = []
    for some in _first_fit(pieces, budget.tokens_per_microbatch):
        trees = tuple(piece.tree for piece in some)
        # Rarely a short prefix common to all leaves too little to save further down for it to be merged there.
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


# --------------------------------------------------------------------------------------------------
# A data set as the trees that a step is made of, by index: one a sample, or one a row whose answers are compared.
#
#     samples    each sample is a tree of its own, to be cut and pooled as the budget asks
#     answers    the samples of a row are one tree that is never cut; ``Sample.group`` ties them
#
# ``mismatched`` puts each sample's prompt before the next one's answer: what KTO's reference point is taken over.
#
# Knows no steps and no order (data/plan.py), and makes no layout (data/pack.py). Methods and evals import it.


@dataclass(frozen=True, eq=False)
class Rows:
    """Trees by index."""

    data: Dataset
    are_answers: bool = False
    """Whether the samples of a row are compared with each other."""
    has_targets: bool = True
    """False: nothing is predicted; a scalar head is read."""

    def __len__(self) -> int:
        return len(self.data.rows) - 1 if self.are_answers else len(self.data)

    @property
    def weights(self) -> FloatArray:
        """How many times each is seen per epoch."""
        return self.data.row_weights if self.are_answers else self.data.weights

    def trees(self, indices: Sequence[int]) -> list[Tree]:
        """The trees of a step: their groups are numbered in this order."""
        return self.trees_of([self.samples(index) for index in indices])

    def trees_of(self, rows: Sequence[Sequence[Sample]]) -> list[Tree]:
        """The trees that rows of these samples make."""
        return [self._tree(samples, number) for number, samples in enumerate(rows)]

    def mismatched(self, indices: Sequence[int], max_length: int) -> list[Tree]:
        """Each sample's prompt with the answer of the one after it, cut at ``max_length`` tokens. A sample that comes
        after itself takes the answer of the next of the data.
        """
        pairs = zip(indices, [*indices[1:], indices[0]], strict=True)
        others = [(one + 1) % len(self.data) if one == other else other for one, other in pairs]
        return [
            Tree((_spliced(self.data[one], self.data[other], max_length),))
            for one, other in zip(indices, others, strict=True)
        ]

    def prefix_groups(self, min_tokens: int) -> IntArray:
        """For each tree the number of the document it belongs to (plan.prefix_groups)."""
        first = [self.samples(index)[0] for index in range(len(self))]
        return prefix_groups(first if self.are_answers else self.data, min_tokens)

    def samples(self, index: int) -> list[Sample]:
        """The samples of a tree, as the data have them."""
        if not self.are_answers:
            return [self.data[index]]
        start, stop = self.data.rows[index : index + 2]
        return self.data[int(start) : int(stop)]

    def _tree(self, samples: Sequence[Sample], number: int) -> Tree:
        if not self.has_targets:
            samples = [sample.without_targets() for sample in samples]
        if not self.are_answers:
            return Tree(tuple(samples))
        return Tree(tuple(replace(s, group=number) for s in samples), is_atom=True)


@dataclass(frozen=True, eq=False)
class Good(Sequence[Sample]):
    """Of each row the answer that is wanted: of those compared the best, the first of equals."""

    rows: Rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        samples = self.rows.samples(index)
        return max(samples, key=lambda one: one.values.get("preference", 0.0))


def _spliced(one: Sample, other: Sample, max_length: int) -> Sample:
    """The prompt of one sample and the answer of another, each with its pictures: ids as they are, every token of the
    answer a target but those of pictures (of a question asked in the midst of it).
    """
    begin, first = int(one.target_at_N[0]), int(other.target_at_N[0])
    longest = first + max(1, max_length - begin)
    stop = min(other.num_tokens, uncut(other.media, longest))
    ids_T = np.concatenate([one.ids_T[:begin], other.ids_T[first:stop]])
    asked = [
        replace(it, start=it.start + begin, stop=it.stop + begin)
        for it in within(other.media, first, stop)
    ]
    is_target = np.arange(ids_T.size) >= begin
    for it in asked:
        is_target[it.start : it.stop] = False
    at_N = np.flatnonzero(is_target)
    name, media = f"{one.id} with the answer of {other.id}", within(one.media, 0, begin)
    return Sample(name, ids_T, at_N, np.ones(at_N.size), (*media, *asked), values=one.values)


# --------------------------------------------------------------------------------------------------
# The micro-batches of a step as training makes them, and what they save: tokens, before anything is computed.
#
# Imported by ``taut.commands.show`` and by checks.


@dataclass(frozen=True)
class StepPlan:
    """What a step would compute, over all ranks."""

    step: int
    num_samples: int
    num_targets: int
    padded: int
    """Tokens, were every sample padded to the longest of the step."""
    unshared: int
    """Tokens the samples have."""
    computed: int
    """Tokens computed, prefixes shared where the policy says so."""
    num_microbatches: int


def lay_out(trees: Sequence[Tree], budget: Budget, policy: PackPolicy) -> list[Packed]:
    """The micro-batches of a step's trees, over all ranks."""
    return [
        packed
        for rank in assign(trees, budget)
        for planned in rank
        for packed in layouts(planned, policy, budget.tokens_per_microbatch)
    ]


def step_plan(step: int, trees: Sequence[Tree], packs: Sequence[Packed]) -> StepPlan:
    """The numbers of a step that was laid out."""
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
