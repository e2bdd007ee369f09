"""What ranks send each other comes out equal to the last bit, in as few bytes as its numbers need."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from taut.io import narrow

RANDOM = np.random.default_rng(0)
SIGNALING = np.array([0x7FF0000000000001, 0x7FF8000000000001], np.int64).view(np.float64)
ARRAYS: dict[str, tuple[Any, float]] = {
    "positions": (np.arange(100, 8100), 0.1),
    "positions of turns": (np.concatenate([np.arange(a, a + 90) for a in range(0, 9000, 100)]), 1),
    "versions": (np.repeat([3, 4], 4000), 0.1),
    "ids": (RANDOM.integers(0, 150_000, 8000), 4.1),
    "ids of a small vocabulary": (RANDOM.integers(0, 50_000, 8000), 2.1),
    "below 0": (RANDOM.integers(-5, 300, 8000), 4.1),
    "far apart": (RANDOM.choice(np.array([-(2**63), 2**63 - 1, 0]), 1000), 8.5),
    "steps that overflow": (np.array([2**63 - 1, -(2**63)] * 100), 8.9),
    "logprobs of float32": (
        RANDOM.standard_normal(8000).astype(np.float32).astype(np.float64),
        4.1,
    ),
    "logprobs of float64": (RANDOM.standard_normal(8000), 8.1),
    "without logprobs": (np.full(8000, np.nan), 4.1),
    "too large for float32": (np.array([1e300, -0.0, np.nan, np.inf]), 80),
    "signaling": (SIGNALING, 80),
    "none": (np.zeros(0, np.int64), 80),
    "one": (np.array([7]), 300),
    "matrix": (np.arange(12).reshape(3, 4), 80),
    "not contiguous": (np.arange(4000)[::2], 0.3),
    "other types": (RANDOM.standard_normal(100).astype(np.float32), 10),
}
"""With the bytes that an element takes at most."""


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_is_the_same_to_the_last_bit(name: str) -> None:
    array, most = ARRAYS[name]
    content = narrow.packed({"array": array, "again": array, "text": "x"})
    found = narrow.unpacked(bytes(content))
    again = found["array"]
    assert (again.dtype, again.shape, again.tobytes()) == (
        array.dtype,
        array.shape,
        array.tobytes(),
    )
    assert again is found["again"] and again.flags.writeable
    assert len(content) <= most * array.size + 200


def test_no_array_takes_more_than_pickled() -> None:
    for array, _ in ARRAYS.values():
        assert len(narrow.packed(array)) <= len(pickle.dumps(array)) + 120
