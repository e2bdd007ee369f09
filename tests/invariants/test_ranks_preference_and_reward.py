"""Two gloo ranks are one process where answers are judged: references, statistics of the step, scalar heads.

All runs of two ranks are made one after another in one process group.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.chat_runs import column, events, largest_difference, save_model, weights
from tests.helpers.judged_runs import keys_of, train
from tests.helpers.run_directories import read_checkpoint
from tests.invariants.test_ranks import LIMIT, by_ranks

UNEVEN = {"batch.samples_per_step": 5, "batch.tokens_per_microbatch": 90, "steps": 3}
"""The ranks have different numbers of micro-batches."""
ALONE = {"batch.samples_per_step": 1, "steps": 2}
"""A rank has none, and runs a backward that counts for nothing."""
MOVING = {"reference.update_every": 2, "reference.update_mix": 0.5, "checkpoint.every": 2}

# make test has test_ranks.py and test_ranks_online.py, which hold the same mechanism.
pytestmark = pytest.mark.slow

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("dpo", UNEVEN),
    "a reference that moves": ("dpo", {**UNEVEN, **MOVING}),
    "lora": ("dpo", {**UNEVEN, "lora.rank": 4, "reference.file": "kept"}),
    "order and mean of the step": (
        "dpo",
        {**UNEVEN, "dpo.loss": ["aot", "bco", "aot_unpaired"], "dpo.sft_weight": 0.5},
    ),
    "a rank without": (
        "dpo",
        {**ALONE, "dpo.loss": ["sigmoid", "bco"], "activation_checkpointing": True},
    ),
    "another model": ("dpo", {**UNEVEN, "reference.model": "beside"}),
    "kto": ("kto", {**UNEVEN, "lora.rank": 4}),
    "reward": ("reward", {**UNEVEN, "reward.centering_coef": 0.1}),
    "steps, a rank without": ("process", ALONE),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every run by one process, and then by two ranks."""
    place = tmp_path_factory.mktemp("judged")
    model = save_model(place / "model", "llama", dtype=torch.float64)
    save_model(place / "beside", "llama", seed=1, dtype=torch.float64)
    todo = []
    for name, (method, given) in RUNS.items():
        for number in ("one", "two"):
            keys = keys_of(method, model, place / "data", **given)
            keys |= {"out": str(place / number / name), "contract.prompts": 0}
            if "reference.file" in keys:
                keys["reference.file"] = str(place / number / "kept")
            if "reference.model" in keys:
                keys["reference.model"] = str(place / "beside")
            if number == "one":
                train(keys)
            else:
                todo.append(keys)
    by_ranks(place, todo)
    return place


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_equal_one_process(name: str, place: Path) -> None:
    one, two = place / "one" / name, place / "two" / name
    assert events(two, "start")[0]["num_ranks"] == 2
    for field in ("loss", "grad_norm"):
        assert column(two, field) == pytest.approx(column(one, field), rel=LIMIT)
    for field in ("sample_ids", "num_targets", "num_tokens_unshared"):
        assert column(two, field) == column(one, field)
    for kind in ("step", "eval"):
        for found, wanted in zip(events(two, kind), events(one, kind), strict=True):
            told = {k: v for k, v in wanted.items() if "/" in k or k in ("loss", "kl", "z0")}
            if wanted["step"] == 1:  # margins are 0 to rounding, and on either side of it
                told.pop("rewards/accuracy", None)
            assert told
            assert {key: found[key] for key in told} == pytest.approx(told, rel=1e-8, abs=LIMIT)
    assert largest_difference(weights(two / "model"), weights(one / "model")) < LIMIT


def test_the_reference_of_two_ranks_is_in_their_checkpoint(place: Path) -> None:
    found = [
        read_checkpoint(place / number / "a reference that moves" / "checkpoints" / "step-000002")
        for number in ("one", "two")
    ]
    names = [name for name in found[0] if "reference.tensor" in name]
    assert len(names) > 10
    assert largest_difference(found[1], found[0]) < LIMIT
