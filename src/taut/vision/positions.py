"""Position ids of a sample with pictures, per sample and before packing.

Where a model numbers pictures in three dimensions (M-RoPE, arXiv:2409.12191), a text token has one number on all axes,
one more than the largest before it; the placeholders of a picture that begins at p have

    (p + t, p + h, p + w)        for (t, h, w) in its grid, w the fastest

and the next token has p + max(grid). Elsewhere, and without pictures, position is depth. May import types.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from taut.types import IntArray, Media


def positions_of(num_tokens: int, media: Sequence[Media]) -> IntArray | None:
    """int64 [3, T] of a sample's tokens; None: the depth, on every axis."""
    if not any(one.grid for one in media):
        return None
    pieces, at, number = [], 0, 0
    for one in media:
        assert one.grid is not None, "a model numbers all its pictures alike"
        assert one.stop - one.start == np.prod(one.grid), "a place in the grid for each placeholder"
        pieces.append(np.tile(np.arange(number, number + one.start - at), (3, 1)))
        number += one.start - at
        pieces.append(number + np.indices(one.grid).reshape(3, -1))
        number += max(one.grid)
        at = one.stop
    pieces.append(np.tile(np.arange(number, number + num_tokens - at), (3, 1)))
    return np.concatenate(pieces, axis=1)


def next_position(num_tokens: int, media: Sequence[Media]) -> int:
    """The number of the token that follows ``num_tokens`` with these pictures among them, all before it."""
    return num_tokens + sum(
        max(one.grid) - (one.stop - one.start) for one in media if one.grid is not None
    )
