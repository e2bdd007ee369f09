"""An epoch of any size without an array over it: the sample at a position follows from the position.

Samples of sources with one weight are a pool. Which pool a position belongs to is a rule that keeps every beginning of
the epoch close to the pools' shares. A pool is gone through as often as its weight says, each time in another keyed
permutation: blocks of neighboring samples are permuted, and the samples of a window of blocks are permuted among
themselves. So a stretch of steps reads a bounded number of places, wherever the samples lie. What is left of a weight
after whole rounds is the beginning of one more: a fraction takes blocks, others in each epoch.

Time is in proportion to the positions asked for, memory to them and the sources. ``order.py`` says when it is used.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from taut.types import IntArray

BLOCK = 2**16
"""Neighboring samples that stay in one window."""
WINDOW = 64
"""Blocks whose samples are permuted among themselves."""
ROUNDS = 6
"""Rounds of a permutation's Feistel network; an even number."""
WIDTH = 8
"""Least number of bits that a permutation works on: fewer have too few permutations."""
Bits: TypeAlias = NDArray[Any]
"""Numbers of 64 bits without a sign."""


@dataclass(frozen=True)
class LargeEpoch:
    """The samples of an epoch, by position."""

    counts: tuple[int, ...]
    """Samples of each source."""
    weights: tuple[float, ...]
    """How many times an epoch has each sample of a source; fractions are drawn again each epoch."""
    seed: int
    epoch: int
    is_shuffled: bool

    def indices(self, start: int, stop: int) -> IntArray:
        """The sample indices at the positions from ``start`` to ``stop``."""
        if not self.is_shuffled:
            positions = range(start, stop)
            return np.array([self._in_file_order(at) for at in positions], dtype=np.int64)
        pools = [pool for pool in self._pools if pool.quota]
        number_S, at_S = _deal(np.arange(start, stop).astype(object), [it.quota for it in pools])
        found_S = np.empty(stop - start, dtype=np.int64)
        for number in np.unique(number_S).tolist():
            is_own_S, pool = number_S == number, pools[number]
            # A pool is gone through several times, each time in another order.
            round_S, within_S = np.divmod(at_S[is_own_S].astype(np.int64), pool.size)
            for again in np.unique(round_S).tolist():
                is_now = round_S == again
                key = [self.seed, self.epoch, number, again]
                within_S[is_now] = _shuffled(within_S[is_now], pool.size, key)
            # From the number in the pool to the index among all samples.
            sources = np.array(pool.sources)
            begins = np.cumsum([0, *(self.counts[source] for source in pool.sources)])
            member_S = np.searchsorted(begins, within_S, side="right") - 1
            found_S[is_own_S] = self._starts[sources[member_S]] + within_S - begins[member_S]
        return found_S

    @cached_property
    def _pools(self) -> list[Pool]:
        return pools_of(self.counts, self.weights)

    @cached_property
    def _starts(self) -> IntArray:
        """The first sample of each source, and the end."""
        return np.cumsum([0, *self.counts])

    # -- the order of the files

    @cached_property
    def _shares(self) -> list[tuple[int, int]]:
        """For each source, how often an epoch has all its samples, and how many of them once more."""
        shares = [(0, 0)] * len(self.counts)
        for pool in self._pools:
            times, rest = divmod(pool.quota, pool.size)
            seen = 0
            for source in pool.sources:
                before, seen = seen, seen + self.counts[source]
                more = rest * seen // pool.size - rest * before // pool.size
                shares[source] = (times, more)
        return shares

    @cached_property
    def _ends(self) -> list[int]:
        """The position after the last of each source."""
        sizes = (
            times * count + more
            for count, (times, more) in zip(self.counts, self._shares, strict=True)
        )
        return list(accumulate(sizes))

    def _in_file_order(self, at: int) -> int:
        """The sample at a position. Those that come once more are one of each stretch of equal length."""
        source = bisect_right(self._ends, at)
        at -= self._ends[source - 1] if source else 0
        (times, more), count = self._shares[source], self.counts[source]
        first = int(self._starts[source])
        if not more:
            return first + at // times

        def begin(stretch: int) -> int:
            return stretch * count // more

        # The stretch that has the position: the quotient may be one too small, as each begins at a whole sample.
        stretch = at * more // (times * count + more)
        if times * begin(stretch + 1) + stretch + 1 <= at:
            stretch += 1
        at -= times * begin(stretch) + stretch
        # One sample of the stretch comes once more than the others.
        key = [self.seed, self.epoch, source, stretch]
        chosen = _number(key) % (begin(stretch + 1) - begin(stretch))
        if chosen * times <= at <= (chosen + 1) * times:
            within = chosen
        else:
            within = (at - (at > chosen * times)) // times
        return first + begin(stretch) + within


@dataclass(frozen=True)
class Pool:
    """The sources of one weight."""

    sources: tuple[int, ...]
    size: int
    """Samples."""
    quota: int
    """Samples that an epoch takes."""


def pools_of(counts: Sequence[int], weights: Sequence[float]) -> list[Pool]:
    """The pools of an epoch, by weight."""
    pools = []
    for weight in sorted(set(weights)):
        sources = tuple(number for number, own in enumerate(weights) if own == weight)
        size = sum(counts[source] for source in sources)
        pools.append(Pool(sources, size, round(weight * size)))
    return pools


def _deal(at_S: NDArray[np.object_], quotas: Sequence[int]) -> tuple[IntArray, NDArray[np.object_]]:
    """The pool that each position belongs to, and its number in the pool.

    The pools are halved until one is left. At each halving the first p positions have the half's share of p, rounded
    down. Positions are Python integers: their products with quotas may have more than 64 bits.
    """
    if len(quotas) == 1:
        return np.zeros(at_S.size, dtype=np.int64), at_S
    middle, total = len(quotas) // 2, sum(quotas)
    left = sum(quotas[:middle])
    before_S = at_S * left // total
    is_left_S = ((at_S + 1) * left // total > before_S).astype(bool)
    number_S, within_S = np.empty(at_S.size, dtype=np.int64), np.empty(at_S.size, dtype=object)
    number_S[is_left_S], within_S[is_left_S] = _deal(before_S[is_left_S], quotas[:middle])
    others, within_S[~is_left_S] = _deal((at_S - before_S)[~is_left_S], quotas[middle:])
    number_S[~is_left_S] = others + middle
    return number_S, within_S


# -- permutations


def _shuffled(at_S: IntArray, size: int, key: Sequence[int]) -> IntArray:
    """The place of each position in the permutation of ``range(size)`` that ``key`` names.

    Blocks begin anywhere: the samples are a ring, turned by a number of the key. Those after the last whole block are
    in the last window.
    """
    span, num_blocks = BLOCK * WINDOW, size // BLOCK
    last = max(0, size // span - 1)
    # Permute the samples of each window.
    window_S, slot_S = np.minimum(at_S // span, last), np.empty_like(at_S)
    for window in np.unique(window_S).tolist():
        is_inside_S, begin = window_S == window, window * span
        width = size - begin if window == last else span
        place_S = at_S[is_inside_S] - begin
        slot_S[is_inside_S] = begin + keyed_permutation(place_S, width, [*key, 0, window])
    # Permute the blocks, and turn the ring.
    block_S, within_S = np.divmod(slot_S, BLOCK)
    is_whole_S = block_S < num_blocks
    block_S[is_whole_S] = keyed_permutation(block_S[is_whole_S], num_blocks, [*key, 1])
    return (block_S * BLOCK + within_S + _number([*key, 2]) % size) % size


def keyed_permutation(at_S: IntArray, size: int, key: Sequence[int]) -> IntArray:
    """The place of each position in the permutation of ``range(size)`` that ``key`` names.

    A Feistel network permutes a power of two that holds ``range(size)``; a number outside goes through it again until
    it is inside.
    """
    width = max(WIDTH, (size - 1).bit_length())
    keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)
    found_S = at_S.astype(np.uint64)
    is_out_S = np.ones(found_S.size, dtype=bool)
    while is_out_S.any():
        found_S[is_out_S] = _feistel(found_S[is_out_S], width, keys)
        is_out_S = found_S >= size
    return found_S.astype(np.int64)


def _feistel(number_S: Bits, width: int, keys: Bits) -> Bits:
    """A permutation of the numbers of ``width`` bits. The halves change places each round, with their widths."""
    left = width // 2
    for index in range(keys.size):
        right = width - left
        high_S, low_S = number_S >> right, number_S & ((1 << right) - 1)
        # The finalizer of splitmix64: every bit of the result depends on every bit of the number.
        mixed_S = low_S ^ keys[index : index + 1]
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            mixed_S = (mixed_S ^ (mixed_S >> shift)) * np.uint64(factor)
        number_S = (low_S << left) | (high_S ^ (mixed_S & ((1 << left) - 1)))
        left = right
    return number_S


def _number(key: Sequence[int]) -> int:
    """A number that ``key`` names."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
