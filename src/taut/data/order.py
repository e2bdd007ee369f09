"""Which samples each step has: a pure function of the data's sizes, the seed and the step.

It does not depend on ranks, micro-batches or a restart. Data of at most ``MOST_IN_ARRAYS`` samples are permuted as one
array each epoch; above, no array over the samples is made (``large_epoch.py``), and the order is another. Does not know
what a sample is, or how a step is divided (``batching.py``).
"""

from __future__ import annotations

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
    """The group of each sample; None: every sample moves alone, as it must where ``is_large``."""
    origin: Cursor = START
    """Where full steps begin. Not the start, if a run ended on a small step and was then extended."""

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
        left = self._num_samples(epochs) - self.origin.samples
        return self.origin.step + max(0, -(-left // self.samples_per_step))

    def cursor(self, step: int, epochs: float | None = None) -> Cursor:
        """Progress of a run after a step."""
        samples = self._begin(step + 1)
        return Cursor(step, samples if epochs is None else min(samples, self._num_samples(epochs)))

    def going_on_from(self, cursor: Cursor, epochs: float | None) -> Order:
        """The order of a run continued from ``cursor``: no sample is left out, or seen twice."""
        is_within = epochs is None or cursor.step <= self.num_steps(epochs)
        if is_within and self.cursor(cursor.step, epochs) == cursor:
            return self
        return replace(self, origin=cursor)

    def step(self, step: int, epochs: float | None = None) -> list[int]:
        """Sample indices of a step (counted from 1). ``epochs``: where the data end; None: they repeat without end."""
        start = self._begin(step)
        stop = start + self.samples_per_step
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
        documents = np.split(chosen, np.flatnonzero(np.diff(self.groups[chosen])) + 1)
        begun = epoch * self.epoch_size % self.samples_per_step
        return np.concatenate(_settle(documents, self.samples_per_step, begun))

    def _begin(self, step: int) -> int:
        return self.origin.samples + (step - 1 - self.origin.step) * self.samples_per_step

    def _num_samples(self, epochs: float) -> int:
        return max(1, round(epochs * self.epoch_size))


def _settle(documents: list[IntArray], step_size: int, begun: int) -> list[IntArray]:
    """The documents in their order, except that a step with room left takes the next document that fits it whole.

    A document is cut only where none fits, or where it is larger than a step. ``begun``: samples that the first step
    already has.
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
