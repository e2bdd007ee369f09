"""Gemma 4: a picture keeps its shape, is scaled to as many patches as its budget holds, and is one token a square of
pooling_kernel_size x pooling_kernel_size patches.

In the larger models the tokens of a picture see each other both ways in layers with a window, and in those alone, which
no backend of attention here does: their pictures are refused, their texts are not.
"""

from __future__ import annotations

from collections.abc import Mapping

from PIL import Image
from torch import Tensor
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

from taut.errors import DataError, ModelError
from taut.vision.placeholders import Shape
from taut.vision.processors.family import Family, ModelFiles


class Gemma4(Family):
    """Pictures of any shape, of about one number of tokens."""

    def __init__(self, files: ModelFiles) -> None:
        self._start, self._end = files.named_token("boi_token"), files.named_token("eoi_token")
        image = files.named_token("image_token")
        sound = (
            files.named_token(name, name) for name in ("audio_token", "boa_token", "eoa_token")
        )
        super().__init__(files, image, image, (self._start, self._end, "<|video|>", *sound))
        vision, images = files.config.vision_config, files.images
        files.require_same("patch_size", images.patch_size, vision.patch_size)
        files.require_same(
            "pooling_kernel_size", images.pooling_kernel_size, vision.pooling_kernel_size
        )
        self._patch_size, self._pooled = images.patch_size, images.pooling_kernel_size
        self._num_patches = images.max_soft_tokens * images.pooling_kernel_size**2
        text = files.config.get_text_config()
        # the model reads a picture's places as padding besides their features
        files.require_same("pad_token_id", files.tokenizer.pad_token_id, text.pad_token_id)
        self._sees_both_ways = text.use_bidirectional_attention == "vision"
        self._path = files.path

    def shape(self, width: int, height: int, num_pictures: int) -> Shape:
        if self._sees_both_ways:
            raise ModelError(
                f"model={self._path}: the tokens of a picture see each other both ways; expected "
                "use_bidirectional_attention none (E2B, E4B); take such a model, or leave the pictures out"
            )
        try:
            rows, columns = get_aspect_ratio_preserving_size(
                height, width, self._patch_size, self._num_patches, self._pooled
            )
        except ValueError as error:
            raise DataError(
                f"a picture of {width}x{height} pixels, which the model cannot scale ({error}); expected another "
                "shape; crop it"
            ) from error
        num_tokens = rows * columns // (self._patch_size * self._pooled) ** 2
        return Shape(f"{self._start}{self.placeholder * num_tokens}{self._end}", num_tokens)

    def tensors(self, image: Image.Image, num_pictures: int) -> Mapping[str, Tensor]:
        """pixel_values [1, patches, values of a patch] and image_position_ids [1, patches, 2] (-1: no patch)."""
        made = self._process(image)
        return {name: made[name] for name in ("pixel_values", "image_position_ids")}
