"""Trees in a checkpoint, as JSON-able values and to the last bit: an array is its dtype, its shape and its bytes,
compressed, as base64; no pickled object.
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

from taut.rl.advantages import as_tuple
from taut.types import Media, Sample, Tree

if TYPE_CHECKING:
    from taut.vision.image_store import ImageStore

DTYPES = ("|b1", "|u1", "<i4", "<i8", "<f4", "<f8")
"""Dtypes of the arrays of a sample."""

Array = Annotated[tuple[str, list[int], str], BeforeValidator(as_tuple)]
KeptMedia = Annotated[
    tuple[str, str, int, int, int, list[int] | None, bool], BeforeValidator(as_tuple)
]


class _KeptSample(TypedDict):
    """A sample in a checkpoint."""

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


def _require_readable(kept: Any) -> Any:
    """Check that a sample without its pictures can be made of ``kept``: the asserts of Sample hold."""
    _decode_sample({**kept, "media": ()}, None)
    return kept


class KeptTree(TypedDict):
    """A tree in a checkpoint: what ``encode_tree`` returns."""

    samples: list[Annotated[_KeptSample, AfterValidator(_require_readable)]]
    is_atom: bool


def encode_tree(tree: Tree) -> dict[str, Any]:
    """A tree as JSON-able values."""
    samples = [
        {
            "id": sample.id,
            "ids_T": _encode_array(sample.ids_T),
            "target_at_N": _encode_array(sample.target_at_N),
            "weight_N": _encode_array(sample.weight_N),
            "media": [
                [
                    media.picture.source,
                    media.picture.content,
                    media.picture.num_pictures,
                    media.start,
                    media.stop,
                    media.grid,
                    media.is_two_way,
                ]
                for media in sample.media
            ],
            "streams": {name: _encode_array(value) for name, value in sample.streams.items()},
            "values": {name: float(value).hex() for name, value in sample.values.items()},
            "read_at_R": None if sample.read_at_R is None else _encode_array(sample.read_at_R),
            "read_values": {
                name: _encode_array(value) for name, value in sample.read_values.items()
            },
            "group": sample.group,
        }
        for sample in tree.samples
    ]
    return {"samples": samples, "is_atom": tree.is_atom}


def decode_tree(kept: Mapping[str, Any], image_store: ImageStore | None) -> Tree:
    """The tree that was encoded. ``image_store``: the store of its pictures."""
    return Tree(tuple(_decode_sample(s, image_store) for s in kept["samples"]), kept["is_atom"])


def _decode_sample(kept: Mapping[str, Any], image_store: ImageStore | None) -> Sample:
    all_media = []
    for source, content, num_pictures, start, stop, grid, is_two_way in kept["media"]:
        assert image_store is not None, "pictures are kept where the model takes them"
        picture = image_store.picture(source, content, num_pictures, kept["id"])
        all_media.append(Media(picture, start, stop, tuple(grid) if grid else None, is_two_way))
    read_at = kept["read_at_R"]
    return Sample(
        id=kept["id"],
        ids_T=_decode_array(kept["ids_T"]),
        target_at_N=_decode_array(kept["target_at_N"]),
        weight_N=_decode_array(kept["weight_N"]),
        media=tuple(all_media),
        streams={name: _decode_array(value) for name, value in kept["streams"].items()},
        values={name: float.fromhex(value) for name, value in kept["values"].items()},
        read_at_R=None if read_at is None else _decode_array(read_at),
        read_values={name: _decode_array(value) for name, value in kept["read_values"].items()},
        group=kept["group"],
    )


def _encode_array(value: NDArray[Any]) -> list[Any]:
    text = base64.b64encode(zlib.compress(np.ascontiguousarray(value).tobytes(), 1)).decode()
    return [value.dtype.str, list(value.shape), text]


def _decode_array(kept: Sequence[Any]) -> NDArray[Any]:
    """The array. Raises ValueError where ``kept`` is no encoded array."""
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
