"""The real model on several ranks: each reads its part, and none has the whole model to save it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.rank_memory import memory_of_ranks

pytestmark = pytest.mark.real


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_reads_its_part(num_ranks: int, real_model: Path, tmp_path: Path) -> None:
    """In float32: 513 MiB in all, of which the embedding is 108."""
    rest = 16 * 2**20
    for rank, seen in enumerate(memory_of_ranks(real_model, tmp_path, num_ranks)):
        assert seen["all"] > 500 * 2**20
        assert seen["reading"] < seen["all"] / num_ranks + seen["largest"] + rest
        assert seen["saving"] < (1.5 * seen["group"] if rank == 0 else 0) + rest
