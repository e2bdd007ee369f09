"""Gemma 3 (arXiv:2503.19786): every picture is scaled to one square and is image_seq_length tokens, which see each
other both ways. Pan and scan, which adds crops of long pictures, is refused: the library's processor leaves it out
unless it is asked for in a call. Imported by the registry.
"""

from __future__ import annotations

from collections.abc import Mapping

from PIL import Image
from torch import Tensor

from taut.vision.placeholders import Shape
from taut.vision.processors.family import Family, Given, sides


class Gemma3(Family):
    """Pictures in one square."""

    is_two_way = True

    def __init__(self, given: Given) -> None:
        start, end = given.named_token("boi_token"), given.named_token("eoi_token")
        image = given.named_token("image_token")
        super().__init__(given, start, image, (end,))
        given.require_setting("do_pan_and_scan", False)
        config, size = given.config, given.images.size
        square = sides(config.vision_config.image_size)
        given.require_same("size", (size.height, size.width), square)
        num_tokens = given.own_number("image_seq_length", 256)
        given.require_same("image_seq_length", num_tokens, config.mm_tokens_per_image)
        self._shape = Shape(f"\n\n{start}{image * num_tokens}{end}\n\n", num_tokens)

    def shape(self, width: int, height: int, num_pictures: int) -> Shape:
        return self._shape

    def tensors(self, image: Image.Image, num_pictures: int) -> Mapping[str, Tensor]:
        """pixel_values [1, 3, height, width]."""
        return {"pixel_values": self._process(image, do_pan_and_scan=False)["pixel_values"]}
