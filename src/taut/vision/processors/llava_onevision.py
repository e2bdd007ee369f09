"""LLaVA-OneVision (arXiv:2408.03326): the only picture of a row is scaled into the best of a list of resolutions and
cut into square tiles, behind a view of the whole; its features lose what is padding and get one more at the end of each
line. A picture with company is put into one square instead, so what it becomes depends on how many its row has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from PIL import Image
from torch import Tensor
from transformers.image_processing_utils import select_best_resolution

from taut.errors import DataError, ModelError
from taut.vision.placeholders import Shape
from taut.vision.processors.family import Family, ModelFiles, sides

_MAX_SIDE = 8192
"""A picture with company is padded to a square of its longer side before it is scaled: 200 MB for this."""
_SHRINKS_ABOVE = 1.1


class LlavaOnevision(Family):
    """One picture in tiles, or several in a square each."""

    depends_on_count = True

    def __init__(self, files: ModelFiles) -> None:
        settings, config, images = files.own, files.config, files.images
        image = files.named_token("image_token", settings.get("image_token", "<image>"))
        video = files.named_token("video_token", settings.get("video_token", "<video>"))
        super().__init__(files, image, image, (video,))
        files.require_setting("do_pad", True)
        files.require_setting("do_center_crop", False)
        self._tile, _ = tile = sides(config.vision_config.image_size)
        files.require_same("size", (images.size.height, images.size.width), tile)
        self._pinpoints = [list(point) for point in images.image_grid_pinpoints]
        model_points = [list(point) for point in config.image_grid_pinpoints or ()]
        files.require_same("image_grid_pinpoints", self._pinpoints, model_points)
        strategy = settings.get("vision_feature_select_strategy")
        files.require_same(
            "vision_feature_select_strategy", strategy, config.vision_feature_select_strategy
        )
        aspect = settings.get("vision_aspect_ratio", "anyres_max_9")
        files.require_same("vision_aspect_ratio", aspect, config.vision_aspect_ratio)
        max_tiles = re.fullmatch(r"anyres_max_(\d+)", str(aspect))
        if max_tiles is None:
            raise ModelError(
                f"model={files.path}: found vision_aspect_ratio={aspect}; expected anyres_max_ and a number; use "
                "another model"
            )
        self._max_tiles = int(max_tiles[1])
        self._side = self._tile // sides(config.vision_config.patch_size)[0]
        is_first_left_out = strategy == "default"
        files.require_same(
            "num_image_tokens",
            files.own_number("num_image_tokens"),
            self._side**2 + is_first_left_out,
        )

    def shape(self, width: int, height: int, num_pictures: int) -> Shape:
        num_tokens = self._side**2  # the view of the whole
        if num_pictures == 1:
            num_tokens += self._num_in_tiles(width, height)
        else:
            num_tokens += 1
            if max(width, height) > _MAX_SIDE:
                raise DataError(
                    f"a picture of {width}x{height} pixels in a row of {num_pictures}, put into a square; "
                    f"expected sides of at most {_MAX_SIDE}; scale it down (data.images.max_pixels)"
                )
        return Shape(self.placeholder * num_tokens, num_tokens)

    def tensors(self, image: Image.Image, num_pictures: int) -> Mapping[str, Tensor]:
        """pixel_values [tiles, 3, height, width], where one tile is a picture with company and more are one alone;
        image_sizes [1, 2], height and width.
        """
        company = [] if num_pictures == 1 else [Image.new("RGB", (1, 1))]
        made = self._process([[image, *company]])
        return {"pixel_values": made["pixel_values"][0], "image_sizes": made["image_sizes"][:1]}

    def _num_in_tiles(self, width: int, height: int) -> int:
        """Features of the tiles: those of the picture itself, and one for each line."""
        best: tuple[int, int] = select_best_resolution((height, width), self._pinpoints)
        rows, columns = (side // self._tile * self._side for side in best)
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        ratio = math.sqrt(rows * columns / (self._max_tiles * self._side**2))
        if ratio > _SHRINKS_ABOVE:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return rows * columns + rows
