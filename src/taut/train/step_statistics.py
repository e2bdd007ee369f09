"""Quantities of a whole step: sums over micro-batches and ranks, and the statistics that a loss uses as constants.

A loss defines what is gathered and which statistics are computed from it (losses/loss.py). A statistic whose name ends
in ``_S`` or ``_P`` has an entry for each sample or pair of the step, in the order of ranks and micro-batches; a
micro-batch gets its own entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from taut.losses import Loss
from taut.train.distributed import Ranks
from taut.types import Packed

Planned = Sequence[tuple[Packed, bool]]
"""Micro-batches, and whether each counts."""


def compute_statistics(
    loss: Loss, observed: Sequence[Mapping[str, Tensor]], ranks: Ranks
) -> dict[str, Tensor]:
    """The loss's statistics of all observations, on the CPU, the same on every rank."""
    mine = [{name: value.cpu() for name, value in values.items()} for values in observed]
    gathered = [values for rank in ranks.gather(mine) for values in rank]
    assert gathered, "a step without micro-batches"
    joined = {name: torch.cat([values[name] for values in gathered]) for name in gathered[0]}
    return loss.statistics(joined)


def attach_statistics(
    planned: Planned, stats: Mapping[str, Tensor], ranks: Ranks
) -> list[tuple[Packed, bool]]:
    """The micro-batches, each with its entries of the statistics; zeros where one does not count."""
    sizes = {
        "_S": [packed.num_samples for packed, is_real in planned if is_real],
        "_P": [packed.num_pairs for packed, is_real in planned if is_real],
    }
    begins = {
        suffix: sum(map(sum, ranks.gather(counts)[: ranks.rank]))
        for suffix, counts in sizes.items()
    }
    result: list[tuple[Packed, bool]] = []
    for packed, is_real in planned:
        stats_here = {}
        for name, value in stats.items():
            size = {"_S": packed.num_samples, "_P": packed.num_pairs}.get(name[-2:])
            if size is not None:
                begin = begins[name[-2:]]
                value = value[begin : begin + size] if is_real else value.new_zeros(size)
            stats_here[name] = value
        if is_real:
            begins["_S"] += packed.num_samples
            begins["_P"] += packed.num_pairs
        result.append((replace(packed, stats=stats_here), is_real))
    return result


class Sum(NamedTuple):
    """A sum and its denominator."""

    total: float
    over: float

    @property
    def mean(self) -> float:
        return self.total / self.over


class Sums:
    """Named sums with their counts, over micro-batches and then over ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, Sum] = {}

    def add(self, name: str, total: Tensor | float, count: Tensor | float = 0.0) -> None:
        before = self._sums.get(name, Sum(0.0, 0.0))
        self._sums[name] = Sum(before.total + float(total), before.over + float(count))

    def totals(self, ranks: Ranks) -> dict[str, Sum]:
        """The sums over all ranks, of every name that any rank has. Every rank calls it."""
        names = sorted(set().union(*ranks.gather(set(self._sums))))
        flat = [value for name in names for value in self._sums.get(name, Sum(0.0, 0.0))]
        summed = ranks.sum(flat)
        pairs = zip(names, summed[::2], summed[1::2], strict=True)
        return {name: Sum(total, count) for name, total, count in pairs}

    def means(self, ranks: Ranks) -> dict[str, float]:
        """The means over all ranks, of the names with a count above 0."""
        return {name: part.mean for name, part in self.totals(ranks).items() if part.over}
