"""Idefics3 (arXiv:2408.12637) and SmolVLM (arXiv:2504.05299): a picture is scaled to whole square tiles and cut into
them, row by row, with a small view of the whole after them; each tile is image_seq_len tokens behind words that say
where it was.

Tiles are full squares, so the mask of padding that the library's image processor makes, all ones, is left out. Imported
by the registry.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from transformers.models.idefics3.image_processing_pil_idefics3 import get_resize_output_image_size

from taut.errors import ModelError
from taut.vision.placeholders import Shape
from taut.vision.processors.family import Family, ModelFiles, sides

_PLACE = re.compile(r"<row_\d+_col_\d+>")


class Idefics3(Family):
    """Pictures in tiles, each with its place."""

    def __init__(self, files: ModelFiles) -> None:
        image = files.named_token("image_token", "<image>")
        self._around = files.named_token("fake_image_token", "<fake_token_around_image>")
        self._whole = files.named_token("global_image_token", "<global-img>")
        places = filter(_PLACE.fullmatch, files.tokenizer.get_added_vocab())
        others = (self._around, self._whole, "<video>", *sorted(places))
        super().__init__(files, image, image, others)
        files.require_setting("do_pad", True)
        images, config = files.images, files.config
        self._longest = _longest_edge(files, "size")
        self._tile = _longest_edge(files, "max_image_size")
        self._is_cut = bool(images.do_image_splitting)
        num_patches = (self._tile // sides(config.vision_config.patch_size)[0]) ** 2
        num_tokens = files.own_number("image_seq_len", 169)
        files.require_same("image_seq_len", num_tokens, int(num_patches / config.scale_factor**2))
        self._num_tokens, self._features = num_tokens, image * num_tokens

    def shape(self, width: int, height: int, num_pictures: int) -> Shape:
        rows, columns = self._grid(width, height)
        whole = f"{self._around}{self._whole}{self._features}{self._around}"
        if not rows:
            return Shape(whole, self._num_tokens)
        lines = [
            "".join(
                f"{self._around}<row_{row}_col_{column}>{self._features}"
                for column in range(1, columns + 1)
            )
            for row in range(1, rows + 1)
        ]
        return Shape("\n".join([*lines, "", whole]), (rows * columns + 1) * self._num_tokens)

    def tensors(self, image: Image.Image, num_pictures: int) -> Mapping[str, Tensor]:
        """pixel_values [tiles, 3, height, width]."""
        return {"pixel_values": self._process(image)["pixel_values"][0]}

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tiles; (0, 0): the picture is one tile."""
        if not self._is_cut:
            return 0, 0
        stand_in: Any = np.broadcast_to(np.uint8(0), (3, height, width))  # asked for its shape
        height, width = get_resize_output_image_size(stand_in, self._longest)
        ratio = width / height
        if width >= height:
            columns = math.ceil(width / self._tile)
            rows = math.ceil(int(columns * self._tile / ratio) / self._tile)
        else:
            rows = math.ceil(height / self._tile)
            columns = math.ceil(int(rows * self._tile * ratio) / self._tile)
        return (0, 0) if rows == columns == 1 else (rows, columns)


def _longest_edge(files: ModelFiles, name: str) -> int:
    size = getattr(files.images, name)
    edge = size.get("longest_edge") if isinstance(size, dict) else size.longest_edge
    if not edge:
        raise ModelError(
            f"model={files.path}: found {name}={size} in preprocessor_config.json; expected longest_edge; copy the "
            "file from the base model"
        )
    return int(edge)
