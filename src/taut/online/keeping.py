"""Trees as JSON-able values and back, to the last bit: what a checkpoint keeps of roll-outs that are not used up.

An array is its dtype, its shape and its bytes, compressed, as base64; no pickled object.

May import types. online.method calls it.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from taut.types import Sample, Tree


def encoded(tree: Tree) -> dict[str, Any]:
    """A tree as JSON-able values."""
    return {"samples": [_sample(sample) for sample in tree.samples], "is_atom": tree.is_atom}


def decoded(kept: Mapping[str, Any]) -> Tree:
    """The tree that ``encoded`` was given."""
    return Tree(tuple(_read(sample) for sample in kept["samples"]), kept["is_atom"])


def _sample(sample: Sample) -> dict[str, Any]:
    return {
        "id": sample.id,
        "ids_T": _array(sample.ids_T),
        "target_at_N": _array(sample.target_at_N),
        "weight_N": _array(sample.weight_N),
        "positions": None if sample.positions is None else _array(sample.positions),
        "streams": {name: _array(value) for name, value in sample.streams.items()},
        "values": {name: float(value).hex() for name, value in sample.values.items()},
        "read_at_R": None if sample.read_at_R is None else _array(sample.read_at_R),
        "read_values": {name: _array(value) for name, value in sample.read_values.items()},
        "group": sample.group,
    }


def _read(kept: Mapping[str, Any]) -> Sample:
    positions, read_at = kept["positions"], kept["read_at_R"]
    return Sample(
        id=kept["id"],
        ids_T=_from(kept["ids_T"]),
        target_at_N=_from(kept["target_at_N"]),
        weight_N=_from(kept["weight_N"]),
        positions=None if positions is None else _from(positions),
        streams={name: _from(value) for name, value in kept["streams"].items()},
        values={name: float.fromhex(value) for name, value in kept["values"].items()},
        read_at_R=None if read_at is None else _from(read_at),
        read_values={name: _from(value) for name, value in kept["read_values"].items()},
        group=kept["group"],
    )


def _array(value: NDArray[Any]) -> list[Any]:
    text = base64.b64encode(zlib.compress(np.ascontiguousarray(value).tobytes(), 1)).decode()
    return [value.dtype.str, list(value.shape), text]


def _from(kept: list[Any]) -> NDArray[Any]:
    dtype, shape, text = kept
    raw = zlib.decompress(base64.b64decode(text))
    return np.frombuffer(raw, dtype=np.dtype(dtype)).reshape(shape).copy()
