"""How a family of vision-language models turns an image into tokens: their number and text, and their position ids.

``Processor`` has one implementation per family (``vision/processors``), each compared with the library's own processor
in tests. ``shape`` needs an image's size only, so data are tokenized without scaling a pixel.

``positions_of`` numbers the tokens of one sample, before packing. Where a model numbers images in three dimensions
(M-RoPE, arXiv:2409.12191), a text token has one number on all axes, one more than the largest before it; the
placeholders of an image that begins at p have

    (p + t, p + h, p + w)        for (t, h, w) in its grid, w the fastest

and the next token has p + max(grid). In other models, and without images, the position is the depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image
from torch import Tensor

from taut.types import IntArray, Media


class Shape(NamedTuple):
    """The text and tokens of an image of a certain size."""

    text: str
    """The text that replaces the placeholder of the chat template."""
    num_tokens: int
    """Number of tokens ``image_id`` in that text: one for each feature."""
    grid: tuple[int, int, int] | None = None
    """See ``types.Media``. ``num_tokens`` is their product, and no other tokens lie between the placeholders."""


class Processor(Protocol):
    """The image processor of one model."""

    placeholder: str
    """The text that the chat template writes for an image."""
    image_id: int
    """The token that a feature replaces."""
    reserved: tuple[str, ...]
    """Words that stand for images or audio, which no text may contain."""
    is_two_way: bool
    """Whether attention among an image's tokens is bidirectional."""
    depends_on_count: bool
    """Whether the shape and tensors of an image depend on the number of images in its row."""
    template: str | None
    """The chat template of the processor's files, which takes precedence over the tokenizer's, as in the library."""

    def shape(self, width: int, height: int, num_pictures: int) -> Shape:
        """The shape of an image of this size, in a row of ``num_pictures`` images. Raises DataError for a size that the
        family does not take.
        """

    def tensors(self, image: Image.Image, num_pictures: int) -> Mapping[str, Tensor]:
        """The tower's inputs for an RGB image, without a batch axis unless one image needs it."""

    def identity(self) -> str:
        """A digest that changes whenever shape or tensors of some image could."""


# -- position ids


def positions_of(num_tokens: int, media: Sequence[Media]) -> IntArray | None:
    """int64 [3, T] of a sample's tokens; None: the depth, on every axis."""
    if not any(image.grid for image in media):
        return None
    pieces, at, number = [], 0, 0
    for image in media:
        assert image.grid is not None, "a model numbers all its pictures alike"
        num_placeholders = image.stop - image.start
        assert num_placeholders == np.prod(image.grid), "a place in the grid for each placeholder"
        pieces.append(np.tile(np.arange(number, number + image.start - at), (3, 1)))
        number += image.start - at
        pieces.append(number + np.indices(image.grid).reshape(3, -1))
        number += max(image.grid)
        at = image.stop
    pieces.append(np.tile(np.arange(number, number + num_tokens - at), (3, 1)))
    return np.concatenate(pieces, axis=1)


def next_position(num_tokens: int, media: Sequence[Media]) -> int:
    """The position of the token after ``num_tokens`` tokens that contain these images."""
    return num_tokens + sum(
        max(image.grid) - (image.stop - image.start) for image in media if image.grid is not None
    )
