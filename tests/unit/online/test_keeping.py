"""Trees that a checkpoint keeps come back to the last bit."""

from __future__ import annotations

import json
from dataclasses import fields

import numpy as np

from taut.online.keeping import decoded, encoded
from taut.types import Sample, Tree


def test_a_tree_comes_back_to_the_last_bit() -> None:
    random = np.random.default_rng(0)
    at_N = np.array([3, 4, 7])
    whole = Sample(
        id="train.jsonl:3#1 of roll-out 2",
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
    back = decoded(json.loads(json.dumps(encoded(tree))), None)
    assert back.is_atom
    for before, after in zip(tree.samples, back.samples, strict=True):
        for field in fields(Sample):
            np.testing.assert_equal(getattr(after, field.name), getattr(before, field.name))
        assert after.ids_T.dtype == before.ids_T.dtype
