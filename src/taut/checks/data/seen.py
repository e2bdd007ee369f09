"""Samples told apart by what they show: equal words about different pictures are different samples. Imported by this
group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from taut.types import Sample

HASH = np.uint64(0x9E3779B97F4A7C15)
Hashes: TypeAlias = NDArray[np.uint64]


def seen_of(sample: Sample) -> Hashes:
    """A number for each token: its id, and which pictures were shown up to it."""
    shown = [(one.start, int(one.picture.content[:16], 16)) for one in sample.media]
    return seen_after(sample.ids_T, shown)


def seen_after(ids_T: NDArray[Any], shown: Iterable[tuple[int, int]]) -> Hashes:
    """The same; ``shown``: where each picture begins, and the first eight bytes of its SHA-256."""
    seen_T = ids_T.astype(np.uint64)
    for start, content in shown:
        seen_T[start:] *= HASH
        seen_T[start:] += np.uint64(content)
    return seen_T


def seen_in(arrays: Mapping[str, NDArray[Any]], index: int, ids_T: NDArray[Any]) -> Hashes:
    """The same, of a sample of a cache entry with pictures."""
    first, last = arrays["media.offsets"][index : index + 2]
    contents = arrays["picture.content"][arrays["media.picture"][first:last]]
    numbers = [int.from_bytes(content[:8].tobytes(), "big") for content in contents]
    return seen_after(ids_T, zip(arrays["media.at"][first:last, 0].tolist(), numbers, strict=True))
