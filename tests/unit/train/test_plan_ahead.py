"""The next step is planned while this one runs: no sooner than its trees are known, and never at this one's cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.tiny_samples import nested_family
from tests.helpers.tiny_trainers import Fixed, make

from taut.errors import DataError
from taut.train import trainer as loop
from taut.train.trainer import Trainer, run_steps, train_step
from taut.types import Tree

TREES = [Tree((sample,)) for sample in nested_family(97)]


@dataclass(frozen=True)
class Watched(Fixed):
    """Notes in ``seen`` which step's trees are asked for; step ``bad`` has none."""

    seen: Sequence[Any] = ()
    known: Sequence[int] = range(99)
    bad: int = 0

    def is_known(self, step: int) -> bool:
        return step in self.known

    def prepare(self, step: int) -> list[Tree]:
        self.seen.append(step)  # type: ignore[attr-defined]
        if step == self.bad:
            raise DataError(f"found a bad row for step {step}")
        return super().prepare(step)


def prepared(place: Path, **given: Any) -> tuple[Trainer, list[Any]]:
    """A trainer that takes four steps, and what it does: the steps it asks for, and what ``noted`` adds."""
    seen: list[Any] = []
    trainer = make(place)[0].trainer
    trainer.source, trainer.monitors, trainer.num_steps = Watched(TREES, seen=seen, **given), (), 4
    return trainer, seen


def note(seen: list[Any], name: str, patch: pytest.MonkeyPatch) -> None:
    """Have each call of a function of the loop noted."""
    real = getattr(loop, name)

    def noted(*given: Any) -> Any:
        seen.append(name)
        return real(*given)

    patch.setattr(loop, name, noted)


def test_it_is_planned_after_the_last_backward_and_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, seen = prepared(tmp_path)
    for name in ("backward", "plan_microbatches", "summarize"):
        note(seen, name, monkeypatch)
    run_steps(trainer)
    first = [1, "plan_microbatches", "backward"]
    assert seen == [
        *first,
        *(
            part
            for step in (2, 3, 4)
            for part in (step, "plan_microbatches", "summarize", "backward")
        ),
        "summarize",
    ]
    assert not trainer.plans


def test_what_is_wrong_with_it_is_said_when_it_begins(tmp_path: Path) -> None:
    trainer, seen = prepared(tmp_path, bad=3)
    after: list[int] = []
    with pytest.raises(DataError, match="for step 3"):
        run_steps(trainer, [after.append])
    assert (trainer.done, after, seen) == (2, [1, 2], [1, 2, 3])


def test_it_waits_for_weights_that_its_trees_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, seen = prepared(tmp_path, known=(2, 4))
    note(seen, "summarize", monkeypatch)
    run_steps(trainer)
    assert seen == [1, 2, "summarize", "summarize", 3, 4, "summarize", "summarize"]


def test_with_another_budget_it_is_planned_again(tmp_path: Path) -> None:
    trainer, seen = prepared(tmp_path)
    train_step(trainer, 1)
    trainer.budget = trainer.budget._replace(tokens_per_microbatch=40)
    assert len(train_step(trainer, 2).scored) > 1
    assert seen == [1, 2, 2, 3]
    assert [step for step, _ in trainer.plans] == [3]
