"""Which samples each step has: a pure function of the data's sizes, the seed and the step.

It does not depend on ranks, micro-batches or a restart. Data of at most ``MOST_IN_ARRAYS`` samples are permuted as one
array each epoch; above, no array over the samples is made (``large_epoch.py``), and the order is another. Does not know
what a sample is, or how a step is divided (``batching.py``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from taut.data.large_epoch import LargeEpoch, pools_of
from taut.types import IntArray

MOST_IN_ARRAYS = 10_000_000
"""Samples up to which an epoch is an array."""


def is_large(counts: Sequence[int]) -> bool:
    """Whether sources with so many samples have an order without an array over the samples."""
    return sum(counts) > MOST_IN_ARRAYS


class Cursor(NamedTuple):
    """Progress of a run: the number of samples seen after ``step``."""

    step: int = 0
    samples: int = 0


START = Cursor()


@dataclass(frozen=True, eq=False)
class TokenLimit:
    """Steps of tokens: a step takes the next samples of the order as long as all of them together have at most
    ``most`` tokens, and at least one."""

    most: int
    length_S: IntArray
    """The tokens of each sample."""


@dataclass(frozen=True)
class Order:
    """The samples of each step. Epochs follow each other without a gap, so a step may span two."""

    counts: tuple[int, ...]
    """Samples of each source."""
    weights: tuple[float, ...]
    """How many times an epoch has each sample of a source; fractions are drawn again each epoch."""
    seed: int
    samples_per_step: int
    is_shuffled: bool = True
    groups: IntArray | None = None
    """The group of each sample; None: every sample is shuffled by itself (always so where ``is_large``)."""
    tokens: TokenLimit | None = None
    """Steps end by tokens; None: they have ``samples_per_step`` samples."""
    origin: Cursor = START
    """The cursor from which all steps are full: the start, or the end of a run that ended on a small step and was then
    extended."""

    @property
    def is_large(self) -> bool:
        """Whether there is no array over the samples."""
        return is_large(self.counts)

    @cached_property
    def epoch_size(self) -> int:
        """Samples in an epoch, the same for every epoch."""
        return sum(pool.quota for pool in pools_of(self.counts, self.weights))

    def num_steps(self, epochs: float) -> int:
        """Number of steps in ``epochs``; the last may be smaller."""
        last = self._num_samples(epochs)
        if self.tokens is not None:
            while self._begins[-1] < last:
                self._begins.append(self._end_of(self._begins[-1], self.tokens))
            return self.origin.step + bisect_left(self._begins, last)
        return self.origin.step + max(0, -(-(last - self.origin.samples) // self.samples_per_step))

    def cursor(self, step: int, epochs: float | None = None) -> Cursor:
        """Progress of a run after a step."""
        samples = self._begin(step + 1)
        return Cursor(step, samples if epochs is None else min(samples, self._num_samples(epochs)))

    def continue_from(self, cursor: Cursor, epochs: float | None) -> Order:
        """The order of a run that continues after ``cursor``: no sample is left out or seen twice."""
        is_within = epochs is None or cursor.step <= self.num_steps(epochs)
        if is_within and self.cursor(cursor.step, epochs) == cursor:
            return self
        return replace(self, origin=cursor)

    def step(self, step: int, epochs: float | None = None) -> list[int]:
        """Sample indices of a step (counted from 1). ``epochs``: where the data end; None: they repeat without end."""
        start, stop = self._begin(step), self._begin(step + 1)
        if epochs is not None:
            stop = min(stop, self._num_samples(epochs))
        chosen: list[int] = []
        while start < stop:
            epoch, offset = divmod(start, self.epoch_size)
            part = self._part(epoch, offset, min(offset + stop - start, self.epoch_size))
            chosen.extend(part.tolist())
            start += part.size
        return chosen

    def epoch(self, epoch: int) -> IntArray:
        """All sample indices of an epoch (counted from 0), in order: one array, whatever the size."""
        return self._part(epoch, 0, self.epoch_size)

    def _part(self, epoch: int, start: int, stop: int) -> IntArray:
        """The sample indices at some positions of an epoch."""
        if self.is_large:
            assert self.groups is None, "groups are an array over the samples"
            large = LargeEpoch(self.counts, self.weights, self.seed, epoch, self.is_shuffled)
            return large.indices(start, stop)
        cached = self.__dict__.get("_epoch")
        if cached is None or cached[0] != epoch:
            cached = (epoch, self._make_epoch(epoch))
            self.__dict__["_epoch"] = cached
        order: IntArray = cached[1]
        return order[start:stop]

    def _make_epoch(self, epoch: int) -> IntArray:
        random = np.random.default_rng([self.seed, epoch])
        starts = np.cumsum([0, *self.counts])
        members = []
        for pool in pools_of(self.counts, self.weights):
            ranges = [np.arange(starts[own], starts[own + 1]) for own in pool.sources]
            rows, (times, rest) = np.concatenate(ranges), divmod(pool.quota, pool.size)
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
        groups = np.split(chosen, np.flatnonzero(np.diff(self.groups[chosen])) + 1)
        begun = epoch * self.epoch_size % self.samples_per_step
        return np.concatenate(fit_groups_to_steps(groups, self.samples_per_step, begun))

    def _begin(self, step: int) -> int:
        """The samples before a step."""
        number = step - 1 - self.origin.step
        if self.tokens is None:
            return self.origin.samples + number * self.samples_per_step
        while len(self._begins) <= number:
            self._begins.append(self._end_of(self._begins[-1], self.tokens))
        return self._begins[max(0, number)]

    @cached_property
    def _begins(self) -> list[int]:
        """The samples before each step of tokens from the origin on, as far as they are known."""
        return [self.origin.samples]

    def _end_of(self, start: int, limit: TokenLimit) -> int:
        """The samples after a step of tokens that begins after ``start`` samples."""
        stop, room = start, limit.most
        while True:
            epoch, offset = divmod(stop, self.epoch_size)
            upto_S = self._tokens_upto(epoch, limit)
            end = int(np.searchsorted(upto_S, upto_S[offset] + room, side="right")) - 1
            room -= int(upto_S[end] - upto_S[offset])
            stop += end - offset
            if end < self.epoch_size:
                return max(stop, start + 1)

    def _tokens_upto(self, epoch: int, limit: TokenLimit) -> IntArray:
        """The tokens of the samples of an epoch before each of its positions."""
        cached = self.__dict__.get("_upto")
        if cached is None or cached[0] != epoch:
            tokens_S = limit.length_S[self._part(epoch, 0, self.epoch_size)]
            cached = (epoch, np.concatenate([[0], np.cumsum(tokens_S)]))
            self.__dict__["_upto"] = cached
        upto_S: IntArray = cached[1]
        return upto_S

    def _num_samples(self, epochs: float) -> int:
        return max(1, round(epochs * self.epoch_size))


def fit_groups_to_steps(groups: list[IntArray], step_size: int, begun: int) -> list[IntArray]:
    """Sort the groups so that steps cut few of them: a step with room left takes the next group that fits whole.

    A group is cut only where none fits, or where it is larger than a step. ``begun``: samples that the first step
    already has.
    """
    waiting: dict[int, deque[int]] = {}
    for number, group in enumerate(groups):
        waiting.setdefault(group.size, deque()).append(number)
    sorted_groups, room = [], step_size - begun
    while waiting:
        first = min(queue[0] for queue in waiting.values())
        fitting = [queue[0] for size, queue in waiting.items() if size <= room]
        is_too_large = groups[first].size > step_size
        chosen = groups[first if is_too_large else min(fitting, default=first)]
        waiting[chosen.size].popleft()
        if not waiting[chosen.size]:
            del waiting[chosen.size]
        sorted_groups.append(chosen)
        room = (room - chosen.size) % step_size or step_size
    return sorted_groups
