"""When something is due: by steps, epochs and minutes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from taut.config import load
from taut.data.order import Cursor
from taut.errors import ConfigError
from taut.methods.settings import EvalConfig
from taut.train.cadence import Cadence
from taut.train.settings import CheckpointConfig
from taut.train.trainer import Trainer

Gather = Callable[[Any], list[Any]]


def trainer(
    samples_per_step: int = 2, epoch_size: int = 7, gather: Gather = lambda value: [value]
) -> Trainer:
    """A trainer on so many samples."""
    source = SimpleNamespace(
        cursor=lambda step: Cursor(step, step * samples_per_step), epoch_size=epoch_size
    )
    ranks = SimpleNamespace(gather_in_step=gather)
    return cast(Trainer, SimpleNamespace(source=source, ranks=ranks))


def due(cadence: Cadence, num_steps: int = 14) -> list[int]:
    return [step for step in range(1, num_steps + 1) if cadence.is_due(step)]


@pytest.mark.parametrize(
    ("every", "steps"),
    [
        (0, []),
        (5, [5, 10]),
        ("1 epoch", [4, 7, 11, 14]),  # 2 of 7 samples a step: over 7, 14, 21 and 28 after these
        ("1epoch", [4, 7, 11, 14]),
        ("2 epochs", [7, 14]),
        ("0.5 epochs", [2, 4, 6, 7, 9, 11, 13, 14]),
        ("0.1 epochs", list(range(1, 15))),
    ],
)
def test_steps_and_epochs_are_functions_of_the_step(every: int | str, steps: list[int]) -> None:
    assert due(Cadence(every, trainer())) == steps
    later = Cadence(every, trainer())  # as after a resume
    assert [step for step in range(8, 15) if later.is_due(step)] == [s for s in steps if s > 7]


def test_a_share_of_an_epoch_is_exact() -> None:
    """0.1 * 30 is above 3 in floating point."""
    assert due(Cadence("0.1 epochs", trainer(3, 30)), 5) == [1, 2, 3, 4, 5]


def test_minutes_are_counted_from_the_last_time() -> None:
    now = iter([0.0, 59.0, 60.5, 61.0, 120.0, 121.0, 122.0, 300.0, 301.0, 302.0])
    cadence = Cadence("1 minute", trainer(), clock=lambda: next(now))
    # asked at 59, 60.5 (due, from 61 on), 120, 121 (due, from 122 on), 300 (due, from 301 on), 302
    assert due(cadence, 6) == [2, 4, 5]


def test_the_clock_of_the_writer_decides() -> None:
    now = iter([0.0, 1.0, 2.0, 3.0, 4.0])
    told: list[bool] = []

    def gather(mine: bool) -> list[bool]:
        told.append(mine)
        return [True, mine]

    cadence = Cadence("0.5 minutes", trainer(gather=gather), clock=lambda: next(now))
    assert due(cadence, 2) == [1, 2]
    assert told == [False, False]


@pytest.mark.parametrize("text", ["0 epochs", "1 hour", "epoch", "-1 epochs", "0.5", "1.5 steps"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"0\.5 epochs or 30 minutes") as caught:
        load(EvalConfig, None, [f"every={text}"])
    assert caught.value.code == "invalid-value"
    assert load(EvalConfig, None, ["every=0.25 epochs"]).every == "0.25 epochs"


def test_checkpoints_that_are_kept_at_a_time() -> None:
    assert CheckpointConfig(every=10).max_count(20) == 2
    assert CheckpointConfig(every="1 minute").max_count(20) == 3
    assert CheckpointConfig(every="1 minute").saves_before(1)
    assert not CheckpointConfig(every=20).saves_before(20)
