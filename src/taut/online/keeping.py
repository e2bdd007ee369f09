"""Trees as JSON-able values and back, to the last bit: what a checkpoint keeps of roll-outs that are not used up.

An array is its dtype, its shape and its bytes, compressed, as base64; no pickled object.

May import types and vision. online.method calls it.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from taut.types import Media, Sample, Tree

if TYPE_CHECKING:
    from taut.vision.album import Album


def encoded(tree: Tree) -> dict[str, Any]:
    """A tree as JSON-able values."""
    return {"samples": [_sample(sample) for sample in tree.samples], "is_atom": tree.is_atom}


def decoded(kept: Mapping[str, Any], album: Album | None) -> Tree:
    """The tree that ``encoded`` was given. ``album``: where its pictures are had from."""
    return Tree(tuple(_read(sample, album) for sample in kept["samples"]), kept["is_atom"])


def _sample(sample: Sample) -> dict[str, Any]:
    return {
        "id": sample.id,
        "ids_T": _array(sample.ids_T),
        "target_at_N": _array(sample.target_at_N),
        "weight_N": _array(sample.weight_N),
        "media": [_media(one) for one in sample.media],
        "streams": {name: _array(value) for name, value in sample.streams.items()},
        "values": {name: float(value).hex() for name, value in sample.values.items()},
        "read_at_R": None if sample.read_at_R is None else _array(sample.read_at_R),
        "read_values": {name: _array(value) for name, value in sample.read_values.items()},
        "group": sample.group,
    }


def _media(one: Media) -> list[Any]:
    its = one.picture
    return [
        its.source,
        its.content,
        its.num_pictures,
        one.start,
        one.stop,
        one.grid,
        one.is_two_way,
    ]


def _read_media(kept: Sequence[Any], place: str, album: Album | None) -> Media:
    source, content, num_pictures, start, stop, grid, is_two_way = kept
    assert album is not None, "pictures are kept where the model takes them"
    picture = album.picture(source, content, num_pictures, place)
    return Media(picture, start, stop, tuple(grid) if grid else None, is_two_way)


def _read(kept: Mapping[str, Any], album: Album | None) -> Sample:
    read_at = kept["read_at_R"]
    return Sample(
        id=kept["id"],
        ids_T=_from(kept["ids_T"]),
        target_at_N=_from(kept["target_at_N"]),
        weight_N=_from(kept["weight_N"]),
        media=tuple(_read_media(one, kept["id"], album) for one in kept["media"]),
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
