"""Moments in few bits move between meshes bit for bit: a checkpoint of one process goes on in two ranks, and one of two
ranks in one process.

An update computes with what is stored, in full precision, and rounds what it stores. So a run that goes on elsewhere
after step 2 has the losses of steps 3 and 4 to rounding only if it read the same moments. From then on the stochastic
rounding of bf16 differs, by the step of the format; int8 rounds to the nearest value, on every mesh alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.chat_runs import QUIET, chats, column, events, save_model, write_rows
from tests.invariants.test_ranks import LIMIT, by_ranks

import taut

pytestmark = pytest.mark.parallel

BEFORE, STEPS = 2, 6
OPTIMIZERS: dict[str, dict[str, Any]] = {
    f"{name}, {state}": {"optim.name": name, "optim.state": state}
    for name in ("adamw", "muon")
    for state in ("bf16", "int8")
}
MESHES = (1, 2)


def train(place: Path, todo: list[dict[str, Any]], num_ranks: int) -> None:
    if num_ranks > 1:
        by_ranks(place, todo, num_ranks)
        return
    for keys in todo:
        taut.sft(**{key: value for key, value in keys.items() if key != "method"})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On each mesh every run whole, and one that ends early and goes on on the other mesh."""
    place = tmp_path_factory.mktemp("moments")
    fixed = {
        **QUIET,
        "method": "sft",
        "model": str(save_model(place / "model", "llama", dtype=torch.float64)),
        "data.train": str(write_rows(place / "train.jsonl", chats(11))),
        "dtype": "float64",
        "check": "off",
        "contract.prompts": 0,
        "checkpoint.every": BEFORE,
        "optim.schedule": "constant",
        "optim.warmup_steps": 0,
        "optim.learning_rate": 1e-3,
    }

    def keys_of(name: str, folder: str, steps: int, **more: Any) -> dict[str, Any]:
        out = str(place / folder / name)
        return {**fixed, **OPTIMIZERS[name], "out": out, "steps": steps, **more}

    for mesh in MESHES:
        whole = [keys_of(name, f"whole-{mesh}", STEPS) for name in OPTIMIZERS]
        begun = [keys_of(name, f"from-{mesh}", BEFORE) for name in OPTIMIZERS]
        train(place, [*whole, *begun], mesh)
    for mesh, other in (MESHES, MESHES[::-1]):
        moved = [keys_of(name, f"from-{mesh}", STEPS, resume=True) for name in OPTIMIZERS]
        train(place, moved, other)
    return place


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_go_on_on_another_mesh(name: str, mesh: int, place: Path) -> None:
    whole, moved = place / f"whole-{mesh}" / name, place / f"from-{mesh}" / name
    assert events(moved, "resume")[0]["from_step"] == BEFORE
    expected, found = column(whole, "loss"), column(moved, "loss")
    exact = BEFORE + 2 if OPTIMIZERS[name]["optim.state"] == "bf16" else STEPS
    assert found[:exact] == pytest.approx(expected[:exact], rel=LIMIT)
    assert found == pytest.approx(expected, rel=2**-8)
    assert len(found) == STEPS
