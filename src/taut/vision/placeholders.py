"""What a family of vision-language models does with a picture before the model: how many tokens it is, the text that
stands for it, and the tensors the vision tower is given.

One implementation a family (``vision/processors``), each held to the library's own processor. ``shape`` needs a
picture's size only, so data are tokenised without a pixel being scaled. Imported by album, data and whoever loads a
model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image
from torch import Tensor

from taut.types import IntArray, Media


class Shape(NamedTuple):
    """What becomes of a picture of a certain size."""

    text: str
    """What stands in the place of the placeholder that the chat template writes."""
    num_tokens: int
    """How often ``image_id`` is in that text: one for each feature."""
    grid: tuple[int, int, int] | None = None
    """See ``types.Media``; then ``num_tokens`` is their product and nothing else is between them."""


class Processor(Protocol):
    """A family's way with pictures, with the settings of one model."""

    placeholder: str
    """What the chat template writes where a picture is."""
    image_id: int
    """The token that a feature takes the place of."""
    reserved: tuple[str, ...]
    """Words that stand for pictures or sound, which no text may contain."""
    is_two_way: bool
    """Whether a picture's tokens see each other both ways."""
    minds_company: bool
    """Whether what becomes of a picture depends on how many its row has."""
    template: str | None
    """A chat template that lies beside the processor's files: the library prefers it to the tokenizer's."""

    def shape(self, width: int, height: int, num_pictures: int) -> Shape:
        """Of a picture of so many pixels, in a row that has ``num_pictures`` of them. Raises DataError for a size that
        the family cannot take.
        """

    def tensors(self, image: Image.Image, num_pictures: int) -> Mapping[str, Tensor]:
        """What the tower is given of an RGB picture; no batch axis but what one picture needs."""

    def identity(self) -> str:
        """Changes whenever shape or tensors of some picture could."""


# --------------------------------------------------------------------------------------------------
# Position ids of a sample with pictures, per sample and before packing.
#
# Where a model numbers pictures in three dimensions (M-RoPE, arXiv:2409.12191), a text token has one number on all
# axes, one more than the largest before it; the placeholders of a picture that begins at p have
#
#     (p + t, p + h, p + w)        for (t, h, w) in its grid, w the fastest
#
# and the next token has p + max(grid). Elsewhere, and without pictures, position is depth. May import types.


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
