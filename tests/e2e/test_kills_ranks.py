"""Killed on one process and resumed on two ranks, and back: the same samples, the same losses within the tolerance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import column, events, largest_difference, weights
from tests.helpers.kill_points import Operation, Point, point
from tests.helpers.killed_runs import kill, resume, shuffled_mixture, whole
from tests.helpers.online_runs import keys_of as online_keys
from tests.helpers.run_directories import Left, left, require_equal

from taut.run.fingerprint import TOLERANCE

KINDS: dict[str, dict[str, Any]] = {
    "full": {"dtype": "float32"},
    "lora": {"dtype": "float64", "lora.rank": 4, "lora.dropout": 0.2},
}


class Wholes:
    """Uninterrupted runs of a kind, on one process and on two ranks."""

    def __init__(self, place: Path, model: Path, kind: str) -> None:
        self.kind = kind
        self.keys = {**shuffled_mixture(place, model), **KINDS[kind]}
        self.operations: dict[int, list[Operation]] = {}
        self.left: dict[int, Left] = {}
        self.out: dict[int, Path] = {}
        for num_ranks in (1, 2):
            self.out[num_ranks] = out = place / f"{kind}-{num_ranks}"
            self.operations[num_ranks] = whole(out, self.keys, num_ranks=num_ranks)
            self.left[num_ranks] = left(out)


@pytest.fixture(scope="module", params=KINDS)
def wholes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Wholes:
    return Wholes(tmp_path_factory.mktemp("whole"), model, request.param)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_resumed_on_another_number_of_ranks(
    before: int, after: int, wholes: Wholes, tmp_path: Path
) -> None:
    out, limit = tmp_path / "out", TOLERANCE[wholes.keys["dtype"]]
    at = point(wholes.operations[before], "checkpoint", 0.5, "step-000006")
    kill(out, wholes.keys, at, num_ranks=before)
    resume(out, wholes.keys, num_ranks=after)
    assert [event["num_ranks"] for event in events(out, "start")] == [before, after]
    assert events(out, "resume")[-1]["from_step"] == 3
    for num_ranks in (before, after):
        uninterrupted = wholes.out[num_ranks]
        assert column(out, "sample_ids") == column(uninterrupted, "sample_ids")
        assert column(out, "step") == column(uninterrupted, "step")
        for name in ("loss", "grad_norm"):
            assert column(out, name) == pytest.approx(column(uninterrupted, name), rel=limit)
    assert column(out, "loss")[:3] == column(wholes.out[before], "loss")[:3]
    for folder in ("model", "adapter") if wholes.kind == "lora" else ("model",):
        found = [weights(place / folder) for place in (out, wholes.out[before])]
        assert largest_difference(*found) < limit


@pytest.mark.slow
def test_ranks_killed_and_resumed_equal_uninterrupted_ranks(wholes: Wholes, tmp_path: Path) -> None:
    """The writer dies inside a checkpoint, then the other rank in a step."""
    out, operations = tmp_path / "out", wholes.operations[2]
    kill(out, wholes.keys, point(operations, "checkpoint", 0.5, "step-000006"), num_ranks=2)
    kill(out, wholes.keys, Point("update", 2, rank=1), num_ranks=2)
    resume(out, wholes.keys, num_ranks=2)
    require_equal(out, wholes.left[2])


CHAINS: dict[str, dict[str, Any]] = {
    "sft, full": {"dtype": "float32"},
    "sft, lora": {"dtype": "float64", "lora.rank": 4},
    "grpo": {"dtype": "float64", "rollout.minibatches": 2},
}


@pytest.mark.parallel
@pytest.mark.parametrize("chain", CHAINS)
def test_killed_on_two_ranks_then_on_one_and_ended_on_two_replicas_of_two(
    chain: str, model: Path, tmp_path: Path
) -> None:
    """The same samples; losses and gradient norms within the tolerance that a resume tells of, in each step."""
    place, out, limit = tmp_path, tmp_path / "out", TOLERANCE[CHAINS[chain]["dtype"]]
    keys = shuffled_mixture(place, model)
    if chain == "grpo":
        keys = {**online_keys("grpo", model, place), "method": "grpo", "steps": 7}
    keys |= {**CHAINS[chain], "checkpoint.every": 2, "checkpoint.background": False}
    keys |= {"check": "off", "contract.prompts": 0}
    whole(place / "whole", keys)
    kill(out, keys, Point("update", 4, rank=1), num_ranks=2)
    kill(out, keys, Point("update", 4))
    resume(out, keys | {"parallel.replicas": 2}, num_ranks=4)
    assert [event["num_ranks"] for event in events(out, "start")] == [2, 1, 4]
    assert [event["from_step"] for event in events(out, "resume")] == [0, 2, 4]
    for name in ("step", "sample_ids"):
        assert column(out, name) == column(place / "whole", name)
    for name in ("loss", "grad_norm"):
        expected = column(place / "whole", name)
        assert column(out, name) == pytest.approx(expected, rel=limit, abs=limit)
    folder = "adapter" if "lora" in chain else "model"
    found = [weights(run / folder) for run in (out, place / "whole")]
    assert largest_difference(*found) < limit
