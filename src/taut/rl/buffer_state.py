"""Trees as JSON-able values and back, to the last bit: the part of a checkpoint that holds unused roll-outs.

An array is its dtype, its shape and its bytes, compressed, as base64; no pickled object.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator
from typing_extensions import TypedDict

from taut.types import Media, Sample, Tree

if TYPE_CHECKING:
    from taut.vision.image_store import ImageStore

DTYPES = ("|b1", "|u1", "<i4", "<i8", "<f4", "<f8")
"""Of the arrays of a sample."""


def as_tuple(value: Any) -> tuple[Any, ...]:
    """A JSON list in place of a tuple, for pydantic."""
    if type(value) is not list:
        raise ValueError("found something other than a list")
    return tuple(value)


def _require_readable(kept: Any) -> Any:
    """Check that a sample without its pictures can be made of ``kept``: the asserts of Sample hold."""
    _read({**kept, "media": ()}, None)
    return kept


Array = Annotated[tuple[str, list[int], str], BeforeValidator(as_tuple)]
KeptMedia = Annotated[
    tuple[str, str, int, int, int, list[int] | None, bool], BeforeValidator(as_tuple)
]


class _KeptSample(TypedDict):
    """What ``_sample`` returns."""

    id: str
    ids_T: Array
    target_at_N: Array
    weight_N: Array
    media: list[KeptMedia]
    streams: dict[str, Array]
    values: dict[str, str]
    read_at_R: Array | None
    read_values: dict[str, Array]
    group: int


class KeptTree(TypedDict):
    """What ``encoded`` returns."""

    samples: list[Annotated[_KeptSample, AfterValidator(_require_readable)]]
    is_atom: bool


def encoded(tree: Tree) -> dict[str, Any]:
    """A tree as JSON-able values."""
    return {"samples": [_sample(sample) for sample in tree.samples], "is_atom": tree.is_atom}


def decoded(kept: Mapping[str, Any], image_store: ImageStore | None) -> Tree:
    """The tree that ``encoded`` was given. ``image_store``: where its pictures are had from."""
    return Tree(tuple(_read(sample, image_store) for sample in kept["samples"]), kept["is_atom"])


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


def _read_media(kept: Sequence[Any], place: str, image_store: ImageStore | None) -> Media:
    source, content, num_pictures, start, stop, grid, is_two_way = kept
    assert image_store is not None, "pictures are kept where the model takes them"
    picture = image_store.picture(source, content, num_pictures, place)
    return Media(picture, start, stop, tuple(grid) if grid else None, is_two_way)


def _read(kept: Mapping[str, Any], image_store: ImageStore | None) -> Sample:
    read_at = kept["read_at_R"]
    return Sample(
        id=kept["id"],
        ids_T=_from(kept["ids_T"]),
        target_at_N=_from(kept["target_at_N"]),
        weight_N=_from(kept["weight_N"]),
        media=tuple(_read_media(one, kept["id"], image_store) for one in kept["media"]),
        streams={name: _from(value) for name, value in kept["streams"].items()},
        values={name: float.fromhex(value) for name, value in kept["values"].items()},
        read_at_R=None if read_at is None else _from(read_at),
        read_values={name: _from(value) for name, value in kept["read_values"].items()},
        group=kept["group"],
    )


def _array(value: NDArray[Any]) -> list[Any]:
    text = base64.b64encode(zlib.compress(np.ascontiguousarray(value).tobytes(), 1)).decode()
    return [value.dtype.str, list(value.shape), text]


def _from(kept: Sequence[Any]) -> NDArray[Any]:
    """The array. Raises ValueError where ``kept`` is not what ``_array`` returns."""
    dtype, shape, text = kept
    if dtype not in DTYPES or any(size < 0 for size in shape):
        raise ValueError(f"an array has the dtype {dtype[:20]!r} and the shape {shape[:8]}")
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size >= 2**40:
        raise ValueError(f"an array has the shape {shape[:8]}")
    unpacking = zlib.decompressobj()
    try:
        raw = unpacking.decompress(base64.b64decode(text, validate=True), size + 1)
    except zlib.error as error:
        raise ValueError(f"an array cannot be unpacked ({error})") from error
    if len(raw) != size or not unpacking.eof:
        raise ValueError(f"an array has not the {size:,} bytes of its shape")
    return np.frombuffer(raw, dtype=np.dtype(dtype)).reshape(shape).copy()
