"""What is taken over a whole step: sums over micro-batches and ranks, and statistics that a loss needs as constants.

A loss says what is gathered and what is made of it (losses/loss.py). A statistic whose name ends in ``_S`` or ``_P``
has an entry for each sample or pair of the step, in the order of ranks and micro-batches; a micro-batch is given its
own.

May import losses, parallel and types. loop and evals import it.
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


def statistics(
    loss: Loss, observed: Sequence[Mapping[str, Tensor]], ranks: Ranks
) -> dict[str, Tensor]:
    """What the loss makes of all that was observed, on the CPU, the same on every rank."""
    mine = [{name: value.cpu() for name, value in some.items()} for some in observed]
    every = [some for rank in ranks.gather(mine) for some in rank]
    assert every, "a step without micro-batches"
    joined = {name: torch.cat([some[name] for some in every]) for name in every[0]}
    return loss.statistics(joined)


def attached(
    planned: Planned, stats: Mapping[str, Tensor], ranks: Ranks
) -> list[tuple[Packed, bool]]:
    """The micro-batches, each with its part of the statistics; zeros where one does not count."""
    sizes = {
        "_S": [packed.num_samples for packed, is_real in planned if is_real],
        "_P": [packed.num_pairs for packed, is_real in planned if is_real],
    }
    begins = {end: sum(map(sum, ranks.gather(of)[: ranks.rank])) for end, of in sizes.items()}
    given: list[tuple[Packed, bool]] = []
    for packed, is_real in planned:
        own = {}
        for name, value in stats.items():
            size = {"_S": packed.num_samples, "_P": packed.num_pairs}.get(name[-2:])
            if size is not None:
                begin = begins[name[-2:]]
                value = value[begin : begin + size] if is_real else value.new_zeros(size)
            own[name] = value
        if is_real:
            begins["_S"] += packed.num_samples
            begins["_P"] += packed.num_pairs
        given.append((replace(packed, stats=own), is_real))
    return given


class Sum(NamedTuple):
    """A sum, and what it is divided by."""

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
        have = self._sums.get(name, Sum(0.0, 0.0))
        self._sums[name] = Sum(have.total + float(total), have.over + float(count))

    def totals(self, ranks: Ranks) -> dict[str, Sum]:
        """Every name that any rank has, all ranks together; every rank calls it."""
        names = sorted(set().union(*ranks.gather(set(self._sums))))
        flat = [value for name in names for value in self._sums.get(name, Sum(0.0, 0.0))]
        summed = ranks.sum(flat)
        pairs = zip(names, summed[::2], summed[1::2], strict=True)
        return {name: Sum(total, count) for name, total, count in pairs}

    def means(self, ranks: Ranks) -> dict[str, float]:
        """The same, each sum by its count, where anything was counted."""
        return {name: one.mean for name, one in self.totals(ranks).items() if one.over}
