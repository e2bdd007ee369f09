"""Settings that take less memory: those that the run lacks and may have, in the order of what they cost, by the
planner's arithmetic.
"""

from __future__ import annotations

from typing import Any

import pytest

from taut.config import from_mapping, replace, to_dict
from taut.errors import ConfigError
from taut.methods.method import RunConfig
from taut.plan import memory_options
from taut.plan.memory_options import SETTINGS, SPARE, Setting, settings_that_help

GIB = 2**30
SIZES = {"optim.state": 60, "batch.tokens_per_microbatch": 50, "activation_checkpointing": 40}
"""GiB of a run with a setting; what lacks them takes 80."""


def run_of(**keys: Any) -> RunConfig:
    return from_mapping(RunConfig, {"model": "m", "data.train": "x", "method": "sft", **keys})


class Table:
    """A memory in which each setting takes what ``SIZES`` says, and several a part of each other's."""

    packed = type("Packed", (), {"num_tokens": 1000})

    def __init__(self, size: int) -> None:
        self.size, self.limit = size * GIB, int(size * GIB * (1 - SPARE))

    def peak(self, run: RunConfig) -> int:
        if run.lora.is_on:
            raise ConfigError("refused")
        found = [
            SIZES["optim.state"] if run.optim.state == "int8" else 80,
            SIZES["batch.tokens_per_microbatch"] if run.batch.tokens_per_microbatch == 500 else 80,
            SIZES["activation_checkpointing"] if run.activation_checkpointing is True else 80,
        ]
        share = 80.0
        for size in found:
            share *= size / 80
        return int(share * GIB)


def helped(size: int, **keys: Any) -> str:
    return settings_that_help(run_of(**keys), Table(size))  # type: ignore[arg-type]


def test_they_come_by_their_cost_each_with_what_it_takes() -> None:
    assert helped(60) == (
        "by plan a rank takes 80 GiB of 60; with, in the order of what they cost, optim.state=int8: 60 GiB (rounded "
        "moments; a new run); batch.tokens_per_microbatch=500: 50 GiB, fits (more micro-batches); "
        "activation_checkpointing=true: 40 GiB, fits (a third more products)"
    )


def test_what_the_run_has_is_left_out() -> None:
    assert "activation_checkpointing" not in helped(60, activation_checkpointing=True)


def test_where_none_is_enough_alone_they_are_added_up() -> None:
    assert helped(40).endswith("; all of them together: 18.8 GiB, which fits")
    assert helped(10).endswith("18.8 GiB, which does not fit: take more ranks, or a smaller model")


def test_nothing_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_options, "SETTINGS", ())
    assert helped(40).endswith("no setting makes it smaller: take more ranks, or a smaller model")


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: " ".join(setting.keys))
def test_every_row_is_a_setting_of_some_run(setting: Setting) -> None:
    keys = {name: 5 if value == "half" else value for name, value in setting.keys.items()}
    run = run_of(**{"lora.rank": 2} if keys.keys() & {"quantize", "frozen_dtype"} else {})
    assert to_dict(replace(run, keys)) != to_dict(run)
