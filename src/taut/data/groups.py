"""A data set as the trees that a step is made of, by index: one a sample, or one a row whose answers are compared.

    samples    each sample is a tree of its own, to be cut and pooled as the budget asks
    answers    the samples of a row are one tree that is never cut; ``Sample.group`` ties them

``mismatched`` puts each sample's prompt before the next one's answer: what KTO's reference point is taken over.

Knows no steps and no order (data/plan.py), and makes no layout (data/pack.py). Methods and evals import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np

from taut.data.dataset import Dataset
from taut.data.pictures import uncut, within
from taut.data.plan import prefix_groups
from taut.types import FloatArray, IntArray, Sample, Tree


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
