"""How many samples have each number of tokens: what is asked of all lengths, without an array over all samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from taut.types import IntArray


@dataclass(frozen=True)
class LengthCounts:
    """The numbers of tokens that samples have, ascending, and the number of samples that have each."""

    pairs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, length_S: IntArray) -> LengthCounts:
        """Those of samples with these lengths."""
        sizes, counts = np.unique(length_S, return_counts=True)
        return cls(tuple(zip(sizes.tolist(), counts.tolist(), strict=True)))

    @classmethod
    def joined(cls, parts: Iterable[LengthCounts]) -> LengthCounts:
        """Those of the samples of all parts."""
        counts: Counter[int] = Counter()
        for part in parts:
            counts.update(dict(part.pairs))
        return cls(tuple(sorted(counts.items())))

    @cached_property
    def size_L(self) -> IntArray:
        """The numbers of tokens."""
        return np.array([size for size, _ in self.pairs], dtype=np.int64)

    @cached_property
    def count_L(self) -> IntArray:
        """The samples of each."""
        return np.array([count for _, count in self.pairs], dtype=np.int64)

    @property
    def shortest(self) -> int:
        return self.pairs[0][0]

    @property
    def longest(self) -> int:
        return self.pairs[-1][0]

    @property
    def median(self) -> int:
        """Rounded down."""
        upto_L = np.cumsum(self.count_L)
        middle = [(upto_L[-1] - 1) // 2, upto_L[-1] // 2]
        return int(self.size_L[np.searchsorted(upto_L, middle, side="right")].sum()) // 2

    def num_over(self, size: float) -> int:
        """Samples with more tokens."""
        return int(self.count_L[self.size_L > size].sum())
