"""Quantities of a whole step: sums over micro-batches and ranks, and statistics that a loss uses as constants.

A loss defines its observations of a micro-batch and the statistics of all observations (losses/loss.py). A statistic
whose name ends in ``_S`` or ``_P`` has an entry for each sample or pair of the step, in the order of ranks and
micro-batches; each micro-batch gets its own entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from taut.losses.loss import Loss
from taut.train.distributed import Ranks
from taut.types import Packed, to_host

Planned = Sequence[tuple[Packed, bool]]
"""Micro-batches, and whether each counts."""


def compute_statistics(
    loss: Loss, observed: Sequence[Mapping[str, Tensor]], ranks: Ranks
) -> dict[str, Tensor]:
    """The loss's statistics of the observations of all ranks, on the CPU."""
    read = iter(to_host([value for values in observed for value in values.values()]))
    mine = [{name: next(read) for name in values} for values in observed]
    gathered = [values for rank in ranks.of_shares(ranks.gather_in_step(mine)) for values in rank]
    assert gathered, "a step without micro-batches"
    joined = {name: torch.cat([values[name] for values in gathered]) for name in gathered[0]}
    return loss.statistics(joined)


def attach_statistics(
    planned: Planned, stats: Mapping[str, Tensor], ranks: Ranks
) -> list[tuple[Packed, bool]]:
    """The micro-batches, each with its entries of the statistics; zeros for one that does not count."""
    # where this rank's samples and pairs begin among all
    counted = [packed for packed, is_real in planned if is_real]
    num_mine = [sum(p.num_samples for p in counted), sum(p.num_pairs for p in counted)]
    before = ranks.of_shares(ranks.gather_in_step(num_mine))[: ranks.share]
    begins = {suffix: sum(num[i] for num in before) for i, suffix in enumerate(("_S", "_P"))}

    # each micro-batch takes the next entries
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


class Totals(NamedTuple):
    """The numbers of ``Sums`` over all ranks."""

    sums: dict[str, Sum]
    largest: dict[str, float]
    others: list[float]
    """Numbers that are the same on every rank, read from the device together with the sums."""
    notes: list[Any]
    """The note of each rank."""


class Sums:
    """Named sums with their counts, and largest values, over micro-batches and then over ranks. They stay on their
    device until ``totals`` reads all of them at once.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor | float, Tensor | float]] = {}
        self._largest: dict[str, Tensor | float] = {}

    def add(self, name: str, total: Tensor | float, count: Tensor | float = 0.0) -> None:
        before, over = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = before + _number(total), over + _number(count)

    def add_largest(self, name: str, value: Tensor) -> None:
        number, before = _number(value), self._largest.get(name)
        if before is None:
            self._largest[name] = number
        elif isinstance(number, Tensor) and isinstance(before, Tensor):
            self._largest[name] = torch.maximum(before, number)
        else:
            self._largest[name] = _larger(float(before), float(number))

    def totals(
        self,
        ranks: Ranks,
        others: Sequence[Tensor] = (),
        own: Sequence[Tensor] = (),
        note: Callable[[Sequence[Tensor]], Any] = lambda _: None,
    ) -> Totals:
        """Sum over all ranks, for every name that any rank has, in one collective. Every rank calls it.

        ``others``: numbers that are the same on every rank. ``own``: tensors of this rank that are read with the rest
        and handed to ``note``; what ``note`` returns travels with the sums.
        """
        # one read of the device
        flat = [value for pair in self._sums.values() for value in pair]
        read = _read([*flat, *self._largest.values(), *others, *own])
        of_this_rank = [
            value for value in read[len(read) - len(own) :] if isinstance(value, Tensor)
        ]
        numbers = map(float, read[: len(read) - len(own)])
        mine = {name: Sum(next(numbers), next(numbers)) for name in self._sums}
        my_largest = {name: next(numbers) for name in self._largest}

        # one collective
        sums: dict[str, Sum] = {}
        largest: dict[str, float] = {}
        said = ranks.gather_in_step((mine, my_largest, note(of_this_rank)))
        for of_sums, of_largest, _ in ranks.of_shares(said):
            for name, (total, count) in of_sums.items():
                before = sums.get(name, Sum(0.0, 0.0))
                sums[name] = Sum(before.total + total, before.over + count)
            for name, value in of_largest.items():
                largest[name] = _larger(largest.get(name, -math.inf), value)
        notes = [note for *_, note in said]
        return Totals(
            dict(sorted(sums.items())), dict(sorted(largest.items())), list(numbers), notes
        )

    def means(self, ranks: Ranks) -> dict[str, float]:
        """Means over all ranks, for the names with a count above 0."""
        return {name: part.mean for name, part in self.totals(ranks).sums.items() if part.over}


def _larger(one: float, other: float) -> float:
    """The larger of two numbers; NaN if one is NaN."""
    return one if one > other or math.isnan(one) else other


def _number(value: Tensor | float) -> Tensor | float:
    """A float, or a float64 tensor where the value is on a device."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return value.detach().double()
    return float(value)


def _read(values: Sequence[Tensor | float]) -> list[Tensor | float]:
    """The values in host memory, read from the device at once."""
    read = iter(to_host([value for value in values if isinstance(value, Tensor)]))
    return [next(read) if isinstance(value, Tensor) else value for value in values]
