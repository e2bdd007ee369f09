"""InternVL (arXiv:2504.10479) in the library's form: a picture is cut into up to max_patches square tiles in the grid
nearest to its shape, with a small view of the whole after them where there are several; each tile is image_seq_length
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from PIL import Image
from torch import Tensor

from taut.vision.placeholders import Shape
from taut.vision.processors.family import Family, ModelFiles, sides

_CUT = {"crop_to_patches": True}
"""Settings that the library's processor sets, whatever preprocessor_config.json says."""


class InternVL(Family):
    """The processor of InternVL: each picture is cut into square tiles, with a small view of the whole."""

    def __init__(self, files: ModelFiles) -> None:
        image = files.named_token("context_image_token")
        self._start = files.named_token("start_image_token")
        self._end = files.named_token("end_image_token")
        others = (self._start, self._end, files.named_token("video_token", "<video>"))
        super().__init__(files, image, image, others)
        config, size = files.config, files.images.size
        tile = sides(config.vision_config.image_size)
        files.require_same("size", (size.height, size.width), tile)
        patch = sides(config.vision_config.patch_size)
        num_patches = (tile[0] // patch[0]) * (tile[1] // patch[1])
        self._tokens = files.own_number("image_seq_length", 256)
        files.require_same(
            "image_seq_length", self._tokens, int(num_patches * config.downsample_ratio**2)
        )

    def shape(self, width: int, height: int, num_pictures: int) -> Shape:
        num_tiles = self._images.get_number_of_image_patches(height, width, dict(_CUT))
        num_tokens = num_tiles * self._tokens
        return Shape(f"{self._start}{self.placeholder * num_tokens}{self._end}", num_tokens)

    def tensors(self, image: Image.Image, num_pictures: int) -> Mapping[str, Tensor]:
        """pixel_values [tiles, 3, height, width]."""
        return {"pixel_values": self._process(image, **_CUT)["pixel_values"]}
