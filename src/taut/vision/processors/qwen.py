"""Qwen2-VL (arXiv:2409.12191), Qwen2.5-VL (arXiv:2502.13923), Qwen3-VL and Qwen3.5: a picture keeps its shape, is
scaled to whole cells of merge_size x merge_size patches, and is one token a cell, numbered in three dimensions.

Videos are not passed as videos: their frames are pictures.
"""

from __future__ import annotations

from collections.abc import Mapping

from PIL import Image
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from taut.errors import DataError, ModelError
from taut.vision.placeholders import Shape
from taut.vision.processors.family import Family, ModelFiles

_MAX_RATIO = 200
"""The library refuses longer ones."""


class Qwen(Family):
    """Pictures of any shape."""

    def __init__(self, files: ModelFiles) -> None:
        image = files.named_token("image_token", "<|image_pad|>")
        others = (
            files.named_token("video_token", "<|video_pad|>"),
            files.named_token("vision_start_token", "<|vision_start|>"),
            files.named_token("vision_end_token", "<|vision_end|>"),
            "<|vision_pad|>",
        )
        super().__init__(files, image, image, others)
        vision, images = files.config.vision_config, files.images
        files.require_same("patch_size", images.patch_size, vision.patch_size)
        files.require_same("merge_size", images.merge_size, vision.spatial_merge_size)
        files.require_same(
            "temporal_patch_size", images.temporal_patch_size, vision.temporal_patch_size
        )
        self._cell = images.patch_size * images.merge_size
        self._min_pixels, self._max_pixels = images.size.shortest_edge, images.size.longest_edge
        if not self._min_pixels or not self._max_pixels:
            raise ModelError(
                f"model={files.path}: found size={images.size} in preprocessor_config.json; expected shortest_edge and "
                "longest_edge, in pixels; copy the file from the base model"
            )
        if self._min_pixels > self._max_pixels:
            raise ModelError(
                f"model={files.path}: found a lower limit of {self._min_pixels:,} pixels for pictures, and "
                f"{self._max_pixels:,} as their upper one; expected at most that; lower images.min_pixels"
            )

    def shape(self, width: int, height: int, num_pictures: int) -> Shape:
        if max(width, height) > _MAX_RATIO * min(width, height):
            raise DataError(
                f"a picture of {width}x{height} pixels; expected one side at most {_MAX_RATIO} times the other, which "
                "is all the model takes; crop it"
            )
        height, width = smart_resize(height, width, self._cell, self._min_pixels, self._max_pixels)
        rows, columns = height // self._cell, width // self._cell
        return Shape(self.placeholder * (rows * columns), rows * columns, (1, rows, columns))

    def tensors(self, image: Image.Image, num_pictures: int) -> Mapping[str, Tensor]:
        """pixel_values [patches, values of a patch] and image_grid_thw [1, 3], in patches."""
        made = self._process(image)
        return {name: made[name] for name in ("pixel_values", "image_grid_thw")}
