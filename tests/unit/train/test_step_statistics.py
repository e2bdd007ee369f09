"""Statistics and sums of a whole step: joined in the order of ranks and micro-batches, each given its own part back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.helpers.preference_rows import ONE, plain_pairs
from torch import Tensor

from taut.losses.loss import Loss
from taut.train.distributed import Ranks
from taut.train.step_statistics import Sums, attach_statistics, compute_statistics
from taut.types import LossSum, Packed, Scores

FIRST, SECOND, THIRD = plain_pairs([(2, 1)]), plain_pairs([(1, 1), (3, 2)]), plain_pairs([(1, 2)])


@dataclass(frozen=True)
class Numbered(Loss):
    """Its statistics number the pairs and samples of the step."""

    def __call__(self, scores: Scores, packed: Packed) -> LossSum:
        raise NotImplementedError

    def statistics(self, observed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        num_pairs, num_samples = observed["pair"].numel(), observed["sample"].numel()
        return {
            "all": observed["pair"],
            "at_P": torch.arange(num_pairs),
            "at_S": torch.arange(num_samples),
        }


class Rank(Ranks):
    """One of several ranks: what the others have for each collective, in the order of the calls."""

    def __init__(self, rank: int, *calls: list[Any]) -> None:
        super().__init__(rank, len(calls[0]) + 1, torch.device("cpu"))
        self.__dict__["calls"] = list(calls)

    def gather_in_step(self, value: Any) -> list[Any]:
        others = self.__dict__["calls"].pop(0)
        return [*others[: self.rank], value, *others[self.rank :]]

    def sum(self, values: Sequence[float]) -> list[float]:
        return [sum(each) for each in zip(*self.gather_in_step(values), strict=True)]


def ranks(rank: int, *calls: list[Any]) -> Ranks:
    return Rank(rank, *calls)


def seen(packed: Packed, number: float) -> dict[str, Tensor]:
    pair, sample = torch.full((packed.num_pairs,), number), torch.zeros(packed.num_samples)
    return {"pair": pair, "sample": sample}


def test_what_is_observed_is_joined_in_the_order_of_ranks_and_microbatches() -> None:
    mine = [seen(FIRST, 1.0), seen(SECOND, 2.0)]
    found = compute_statistics(Numbered(), mine, ONE)
    assert found["all"].tolist() == [1.0, 2.0, 2.0]
    theirs = [seen(THIRD, 3.0)]
    assert compute_statistics(Numbered(), mine, ranks(0, [theirs]))["all"].tolist() == [1, 2, 2, 3]
    assert compute_statistics(Numbered(), mine, ranks(1, [theirs]))["all"].tolist() == [3, 1, 2, 2]
    assert compute_statistics(Numbered(), [], ranks(1, [theirs]))["all"].tolist() == [3]


@pytest.mark.parametrize(("rank", "begin"), [(0, 0), (1, 1), (2, 3)])
def test_each_microbatch_is_given_its_own_pairs_and_samples(rank: int, begin: int) -> None:
    """Ranks before this one have 1 and then 2 pairs; a micro-batch that does not count lies between."""
    others = [1, 2, 1]
    sizes = [[2 * count, count] for count in others[:rank] + others[rank + 1 :]]
    stats = {"all": torch.tensor(5.0), "at_P": torch.arange(10), "at_S": torch.arange(20)}
    planned = [(FIRST, True), (THIRD, False), (SECOND, True)]
    given = attach_statistics(planned, stats, ranks(rank, sizes))
    assert [is_real for _, is_real in given] == [True, False, True]
    found = [(p.stats["at_P"].tolist(), p.stats["at_S"].tolist()) for p, _ in given]
    assert found == [
        ([begin], [2 * begin, 2 * begin + 1]),
        ([0], [0, 0]),
        ([begin + 1, begin + 2], list(range(2 * begin + 2, 2 * begin + 6))),
    ]
    assert [p.stats["all"].item() for p, _ in given] == [5.0] * 3


def test_sums_and_means_over_ranks_have_every_name_that_any_rank_has() -> None:
    sums = Sums()
    sums.add("loss", torch.tensor(3.0), 2)
    sums.add("loss", 1.0, torch.tensor(2.0))
    assert sums.means(ONE) == {"loss": 1.0}
    theirs = [({"loss": (6.0, 1.0), "other": (4.0, 0.0)}, {}, "theirs")]
    totals = sums.totals(ranks(0, theirs), note=lambda _: "mine")
    assert totals.sums == {"loss": (10.0, 5.0), "other": (4.0, 0.0)}
    assert totals.notes == ["mine", "theirs"]
    assert sums.means(ranks(0, theirs)) == {"loss": 2.0}, "nothing was counted of the other"


def test_the_largest_of_all_microbatches_and_numbers_that_all_ranks_have() -> None:
    sums = Sums()
    for value in (1.0, 3.0, 2.0):
        sums.add_largest("gap", torch.tensor(value))
    totals = sums.totals(ONE, [torch.tensor(0.5)])
    assert totals == ({}, {"gap": 3.0}, [0.5], [None])
    theirs = {"gap": 2.0, "other": math.nan}
    assert sums.totals(ranks(0, [({}, theirs, None)])).largest["gap"] == 3.0
    assert math.isnan(sums.totals(ranks(1, [({}, {"gap": math.nan}, None)])).largest["gap"])
