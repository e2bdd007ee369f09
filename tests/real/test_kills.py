"""A run killed at two hundred random points, at some of them twice: resumed, it is the uninterrupted one to the bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.helpers.chat_runs import save_model
from tests.helpers.kill_points import Operation, Point, point
from tests.helpers.killed_runs import kill, kill_if_reached, resume, shuffled_mixture, whole
from tests.helpers.run_directories import Left, left, require_equal

pytestmark = [pytest.mark.real, pytest.mark.slow]

SEED = 20261121
NUM_POINTS, CHUNK = 200, 10
TWICE = 0.25
"""How often the resumed run is killed too, somewhere."""
POWER = 0.25
"""How often what was not synced is lost."""
WEIGHTS = {
    "checkpoint": 8,
    "export": 4,
    "best": 2,
    "record": 2,
    "cache": 1,
    "forward": 1,
    "backward": 1,
    "update": 1,
}
"""How likely a point is to be of a kind."""
KINDS: dict[str, dict[str, Any]] = {
    "full": {"dtype": "float32", "checkpoint.keep": 1},
    "full, best": {"dtype": "bfloat16", "eval.every": 2, "eval.best": "loss"},
    "lora, noise": {
        "dtype": "float32",
        "lora.rank": 4,
        "lora.dropout": 0.2,
        "noise.neftune_alpha": 5.0,
    },
    "lora, rows": {
        "dtype": "bfloat16",
        "lora.rank": 4,
        "lora.train_token_rows": "always",
        "checkpoint.every": 2,
        "stop_check.prompts": 2,
        "stop_check.max_new_tokens": 4,
    },
}


class Whole(NamedTuple):
    """An uninterrupted run."""

    keys: dict[str, Any]
    operations: list[Operation]
    left: Left


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Whole]:
    """Each kind of run, uninterrupted."""
    place = tmp_path_factory.mktemp("whole")
    common = shuffled_mixture(place, save_model(place / "qwen2", dtype=torch.float64))
    made = {}
    for kind, given in KINDS.items():
        keys, out = {**common, **given}, place / kind
        made[kind] = Whole(keys, whole(out, keys), left(out))
    return made


def drawn(draw: random.Random, operations: Sequence[Operation]) -> Point:
    """A point of a run: its kind first, then where."""
    there = {operation.kind for operation in operations}
    kinds = [kind for kind in WEIGHTS if kind in there]
    (kind,) = draw.choices(kinds, [WEIGHTS[kind] for kind in kinds])
    return point(operations, kind, draw.random())


@pytest.mark.parametrize("chunk", range(NUM_POINTS // CHUNK))
def test_killed_anywhere_and_resumed_equals_uninterrupted(
    chunk: int, wholes: dict[str, Whole], tmp_path: Path
) -> None:
    draw = random.Random(f"{SEED}-{chunk}")
    kind = list(KINDS)[chunk % len(KINDS)]
    run = wholes[kind]
    for number in range(CHUNK):
        out, at = tmp_path / str(number), drawn(draw, run.operations)
        is_power_lost = draw.random() < POWER
        print(f"seed {SEED}, {kind}, {chunk}/{number}: {at}, power lost: {is_power_lost}")
        kill(out, run.keys, at, is_power_lost=is_power_lost)
        is_done = False
        if draw.random() < TWICE:
            again = drawn(draw, run.operations)
            print(f"  and {again}")
            is_done = not kill_if_reached(out, run.keys, again)
        if not is_done:
            resume(out, run.keys)
        require_equal(out, run.left)
