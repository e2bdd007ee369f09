"""The memory of a rank that shares a model with another is what ``taut plan`` says, and not more."""

from __future__ import annotations

import json

import pytest
from tests.helpers import sharded_memory
from tests.helpers.forked_processes import run
from tests.helpers.sharded_memory import CASES

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int, object]]:
    place = tmp_path_factory.mktemp("memory")
    sharded_memory.prepare(place)
    done = run("-m", "tests.helpers.sharded_memory", place, num_ranks=2)
    assert done.returncode == 0, done.stderr
    read: dict[str, tuple[int, int, object]] = json.loads((place / "found.json").read_text())
    return read


@pytest.mark.parametrize("case", CASES)
def test_a_rank_takes_what_is_predicted(
    case: str, found: dict[str, tuple[int, int, object]]
) -> None:
    measured, predicted, parts = found[case]
    assert 0.97 * measured <= predicted <= 1.3 * measured, parts
