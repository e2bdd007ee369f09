"""A run that was killed (SIGKILL) and resumed leaves what the uninterrupted one leaves, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.helpers.chat_runs import column, events
from tests.helpers.kill_points import Operation, point
from tests.helpers.killed_runs import kill, resume, shuffled_mixture, whole
from tests.helpers.run_directories import Left, left, require_equal
from tests.helpers.slow_cases import slow_except

KINDS: dict[str, dict[str, Any]] = {
    "full": {"dtype": "float32", "eval.every": 2, "eval.best": "loss"},
    "lora": {"dtype": "bfloat16", "lora.rank": 4, "lora.dropout": 0.2, "noise.neftune_alpha": 5.0},
    "few bits": {"dtype": "float32", "optim.name": "muon", "optim.state": "bf16"},
}


class Whole(NamedTuple):
    """An uninterrupted run."""

    keys: dict[str, Any]
    operations: list[Operation]
    left: Left


class Wholes(dict[str, Whole]):
    """Each kind of run, uninterrupted; made when it is first asked for."""

    def __init__(self, place: Path, model: Path) -> None:
        super().__init__()
        self.place, self.common = place, shuffled_mixture(place, model)

    def __missing__(self, kind: str) -> Whole:
        keys, out = {**self.common, **KINDS[kind]}, self.place / kind
        self[kind] = Whole(keys, whole(out, keys), left(out))
        return self[kind]


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Wholes:
    return Wholes(tmp_path_factory.mktemp("whole"), model)


@pytest.mark.parametrize(
    ("kind", "operation", "within", "share"),
    slow_except(
        [
            ("full", "checkpoint", "step-000006", 0.8),
            ("lora", "backward", "", 0.7),
        ],
        [
            ("full", "checkpoint", "step-000003", 0.5),
            ("full", "checkpoint", "step-000006", 0.8),
            ("full", "export", "", 0.4),
            ("full", "update", "", 0.6),
            ("lora", "checkpoint", "step-000006", 0.3),
            ("lora", "checkpoint", "latest", 0.7),
            ("lora", "export", "adapter", 0.5),
            ("lora", "backward", "", 0.7),
            ("few bits", "checkpoint", "step-000006", 0.8),
        ],
    ),
)
def test_killed_and_resumed_equals_uninterrupted(
    kind: str, operation: str, within: str, share: float, wholes: Wholes, tmp_path: Path
) -> None:
    run, out = wholes[kind], tmp_path / "out"
    kill(out, run.keys, point(run.operations, operation, share, within))
    resume(out, run.keys, is_fresh=within == "adapter")
    require_equal(out, run.left)


def test_killed_twice(wholes: Wholes, tmp_path: Path) -> None:
    """In the second checkpoint, and in the final export of what was resumed."""
    run, out = wholes["full"], tmp_path / "out"
    kill(out, run.keys, point(run.operations, "checkpoint", 0.5, "step-000006"))
    kill(out, run.keys, point(run.operations, "export", 0.6))
    resume(out, run.keys)
    require_equal(out, run.left)
    assert [event["from_step"] for event in events(out, "resume")] == [0, 3, 7]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "within", "share"),
    [("cache", "", 0.5), ("record", "resolved", 0.5), ("checkpoint", "step-000003", 0.1)],
)
def test_killed_before_the_first_complete_checkpoint_starts_at_step_one(
    operation: str, within: str, share: float, wholes: Wholes, tmp_path: Path
) -> None:
    run, out = wholes["full"], tmp_path / "out"
    kill(out, run.keys, point(run.operations, operation, share, within))
    resume(out, run.keys)
    require_equal(out, run.left)
    assert events(out, "resume")[-1]["from_step"] == 0
    assert column(out, "step") == list(range(1, 8))


def test_power_lost(wholes: Wholes, tmp_path: Path) -> None:
    """Whatever was not forced to the disk is gone; the steps a checkpoint stands for are not."""
    run, out = wholes["full"], tmp_path / "out"
    at = point(run.operations, "checkpoint", 1.0, "latest")
    kill(out, run.keys, at, is_power_lost=True)
    resume(out, run.keys)
    require_equal(out, run.left)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.35, 0.7])
def test_killed_while_the_best_is_written(share: float, wholes: Wholes, tmp_path: Path) -> None:
    run, out = wholes["full"], tmp_path / "out"
    kill(out, run.keys, point(run.operations, "best", share))
    resume(out, run.keys)
    require_equal(out, run.left)
