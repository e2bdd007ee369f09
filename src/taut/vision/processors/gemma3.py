"""Gemma 3 (arXiv:2503.19786): every picture is scaled to one square and is image_seq_length tokens, which see each
other both ways. Pan and scan, which adds crops of long pictures, is refused: the library's processor leaves it out
unless it is asked for in a call.
"""

from __future__ import annotations

from collections.abc import Mapping

from PIL import Image
from torch import Tensor

from taut.vision.placeholders import Shape
from taut.vision.processors.family import Family, ModelFiles, sides


class Gemma3(Family):
    """Pictures in one square."""

    is_two_way = True

    def __init__(self, files: ModelFiles) -> None:
        start, end = files.named_token("boi_token"), files.named_token("eoi_token")
        image = files.named_token("image_token")
        super().__init__(files, start, image, (end,))
        files.require_setting("do_pan_and_scan", False)
        config, size = files.config, files.images.size
        square = sides(config.vision_config.image_size)
        files.require_same("size", (size.height, size.width), square)
        num_tokens = files.own_number("image_seq_length", 256)
        files.require_same("image_seq_length", num_tokens, config.mm_tokens_per_image)
        self._shape = Shape(f"\n\n{start}{image * num_tokens}{end}\n\n", num_tokens)

    def shape(self, width: int, height: int, num_pictures: int) -> Shape:
        return self._shape

    def tensors(self, image: Image.Image, num_pictures: int) -> Mapping[str, Tensor]:
        """pixel_values [1, 3, height, width]."""
        return {"pixel_values": self._process(image, do_pan_and_scan=False)["pixel_values"]}
