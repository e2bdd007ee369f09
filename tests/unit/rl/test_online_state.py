"""Trees that a checkpoint keeps come back to the last bit."""

from __future__ import annotations

import base64
import json
import tracemalloc
import zlib
from dataclasses import fields
from typing import Any

import numpy as np
import pydantic
import pytest

from taut.config import first_problem
from taut.rl.saved_trees import KeptTree, decode_tree, encode_tree
from taut.types import Sample, Tree

BOMB = base64.b64encode(zlib.compress(bytes(2**24), 1)).decode()
"""16 MB of zeros, three times what reading them may take."""


def test_a_tree_comes_back_to_the_last_bit() -> None:
    random = np.random.default_rng(0)
    at_N = np.array([3, 4, 7])
    whole = Sample(
        id="train.jsonl:3#1 of rollout 2",
        ids_T=random.integers(0, 99, 9),
        target_at_N=at_N,
        weight_N=np.ones(3),
        streams={
            "advantage_N": random.normal(size=3),
            "engine_logp_N": np.array([np.nan, -0.1, -1e300]),
        },
        values={"preference": 0.1 + 0.2},
        read_at_R=at_N - 1,
        read_values={"return": random.normal(size=3)},
        group=4,
    )
    plain = Sample("b", np.arange(4), np.array([1]), np.ones(1))
    tree = Tree((whole, plain), is_atom=True)
    back = decode_tree(json.loads(json.dumps(encode_tree(tree))), None)
    assert back.is_atom
    for before, after in zip(tree.samples, back.samples, strict=True):
        for field in fields(Sample):
            np.testing.assert_equal(getattr(after, field.name), getattr(before, field.name))
        assert after.ids_T.dtype == before.ids_T.dtype


def kept(**changes: Any) -> dict[str, Any]:
    """A tree of one sample as a checkpoint keeps it, with other values of the sample."""
    tree: dict[str, Any] = json.loads(
        json.dumps(encode_tree(Tree((Sample("b", np.arange(4), np.array([1]), np.ones(1)),))))
    )
    tree["samples"][0] |= changes
    return tree


def packed(raw: bytes) -> str:
    return base64.b64encode(zlib.compress(raw)).decode()


TREES: dict[str, dict[str, Any]] = {
    "ids that are a number": {"ids_T": 5},
    "ids without data": {"ids_T": ["<i8", [4]]},
    "objects": {"ids_T": ["|O", [4], packed(bytes(32))]},
    "a dtype of any name": {"ids_T": ["M8[s]", [4], packed(bytes(32))]},
    "a shape below 0": {"ids_T": ["<i8", [-1], packed(bytes(32))]},
    "a huge shape": {"ids_T": ["<i8", [2**60], packed(bytes(32))]},
    "fewer bytes": {"ids_T": ["<i8", [4], packed(bytes(31))]},
    "many zeros": {"ids_T": ["<i8", [4], BOMB]},
    "no base64": {"ids_T": ["<i8", [4], "%"]},
    "nothing compressed": {"ids_T": ["<i8", [4], "AAAA"]},
    "a target outside": {"target_at_N": ["<i8", [1], packed((9).to_bytes(8, "little"))]},
    "a target too many": {"weight_N": ["<f8", [2], packed(bytes(16))]},
    "values of numbers": {"values": {"a": 0.5}},
    "values of no number": {"values": {"a": "x"}},
    "pictures of text": {"media": ["x"]},
    "a group of text": {"group": "x"},
}


@pytest.mark.parametrize("kind", TREES)
def test_a_damaged_tree_is_refused(kind: str) -> None:
    reader = pydantic.TypeAdapter(KeptTree)
    reader.validate_python(kept(), strict=True)
    tracemalloc.start()
    with pytest.raises(pydantic.ValidationError) as caught:
        reader.validate_python(kept(**TREES[kind]), strict=True)
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()
    assert len(first_problem(caught.value).splitlines()) == 1
