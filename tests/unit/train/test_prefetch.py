"""Which pictures are read ahead, and on which rank."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.helpers.picture_names import Named, illustrated

from taut.data.batching import Budget
from taut.data.packing import PackPolicy
from taut.models.settings import RouterConfig
from taut.train.distributed import Ranks
from taut.train.trainer import (
    Prefetch,
    Trainer,
    fill_streams,
    plan_ahead,
    plan_trees,
    take_plan,
)
from taut.types import Picture, Tree

GRID = (1, 2, 2)


class Expecting:
    """An image store that notes what it is told to expect."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def expect(self, pictures: Iterable[Picture]) -> None:
        self.names += [picture.source for picture in pictures]


def job_of(rank: int, size: int) -> Any:
    ranks = Ranks(rank, size, torch.device("cpu"))
    source = SimpleNamespace(
        prepare=prepare,
        observed=lambda step: None,
        loss=SimpleNamespace(needs=(), is_silent=lambda sample: False),
    )
    return SimpleNamespace(
        source=source,
        num_steps=3,
        ranks=ranks,
        budget=Budget(100, num_ranks=size),
        policy=PackPolicy(),
        roles=(),
        router=RouterConfig(),
        plans={},
    )


def prepare(step: int) -> list[Tree]:
    """Two samples with a picture each, one that both have, and one without."""
    mine = [illustrated(f"{step}{n}", [(f"{step}{n}", GRID), ("all", GRID), n]) for n in range(2)]
    return [Tree((sample,)) for sample in [*mine, illustrated(f"{step}t", [1, 2])]]


def expected(step: int, rank: int = 0, size: int = 1) -> list[str]:
    image_store = Expecting()
    Prefetch(image_store.expect)(step, cast(Trainer, job_of(rank, size)))
    return image_store.names


def test_a_step_and_the_next_are_expected_in_this_order() -> None:
    found = expected(1)
    assert sorted(found[:4]) == ["10", "11", "all", "all"]
    assert sorted(found[4:]) == ["20", "21", "all", "all"]


def test_after_the_last_step_there_is_nothing() -> None:
    assert sorted(set(expected(3))) == ["30", "31", "all"]


def test_a_rank_expects_its_own() -> None:
    own = [{name for name in expected(3, rank, 2) if name != "all"} for rank in range(2)]
    assert own[0] | own[1] == {"30", "31"}
    assert not own[0] & own[1]


def test_whatever_is_planned_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out rows, for one, which no step comes before."""
    names: list[str] = []
    monkeypatch.setattr(Named, "expect", lambda self: names.append(self.source))
    job = job_of(0, 1)
    fill_streams(job, plan_trees(job, prepare(1)), "held-out loss")
    assert sorted(set(names)) == ["10", "11", "all"]


def test_a_step_that_is_expected_is_not_planned_again() -> None:
    planned: list[int] = []
    trainer = job_of(0, 1)
    trainer.source.prepare = lambda step: planned.append(step) or prepare(step)
    prefetch = Prefetch(Expecting().expect)
    for step in (2, 3):
        prefetch(step, cast(Trainer, trainer))
    assert planned == [2, 3]


def test_an_error_in_the_next_step_waits_for_it() -> None:
    """The step in front of it is planned, and trains."""
    job = job_of(0, 1)

    def fail_at_two(step: int) -> list[Tree]:
        if step == 2:
            raise ValueError("a row of step 2")
        return prepare(step)

    job.source.prepare = fail_at_two
    job.source.is_known = lambda step: True
    job.before_planning = [Prefetch(Expecting().expect)]
    plan_ahead(job, 1)
    assert take_plan(job, 1).trees
    with pytest.raises(ValueError, match="a row of step 2"):
        take_plan(job, 2)
