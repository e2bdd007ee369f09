"""Models that take pictures, and samples with drawn pictures for them, without a file.

seeing = Seeing.of("qwen2_vl", directory)
seeing.sample("a", ["What is it? ", Drawn(0, 20, 12), " A cat."])
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from tests.helpers.vision_models import pictures_of, vision_model, vision_tokenizer
from tests.helpers.vision_processors import save_processor
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.models import recurrent_layers
from taut.models.attention_backends import PREFIX
from taut.models.load import set_attention
from taut.models.scorer import Scorer
from taut.types import Media, Sample
from taut.vision.placeholders import Processor
from taut.vision.processors import open_processor


class Drawn(NamedTuple):
    """A picture of noise."""

    seed: int
    width: int
    height: int

    @property
    def image(self) -> Image.Image:
        noise = np.random.default_rng(self.seed).integers(0, 256, (self.height, self.width, 3))
        return Image.fromarray(noise.astype(np.uint8))


@dataclass(frozen=True)
class Handle:
    """What an image store would give for it."""

    drawn: Drawn
    processor: Processor
    num_pictures: int

    @property
    def source(self) -> str:
        return f"{self.drawn}"

    @property
    def content(self) -> str:
        return hashlib.sha256(self.source.encode()).hexdigest()

    @property
    def digest(self) -> str:
        company = self.num_pictures if self.processor.depends_on_count else 0
        return hashlib.sha256(f"{self.content} {company}".encode()).hexdigest()

    def expect(self) -> None: ...

    def tensors(self) -> Mapping[str, Tensor]:
        return self._made

    @cached_property
    def _made(self) -> Mapping[str, Tensor]:
        return self.processor.tensors(self.drawn.image, self.num_pictures)


@dataclass(frozen=True)
class Seeing:
    """A model of a family in float64 with taut's attention, and what makes samples for it."""

    kind: str
    processor: Processor
    tokenizer: PreTrainedTokenizerBase

    @staticmethod
    def of(kind: str, directory: Path) -> Seeing:
        save_processor(pictures_of(kind), directory)
        tokenizer = vision_tokenizer(kind)
        processor = open_processor(str(directory), vision_model(kind).config, tokenizer)
        assert processor is not None, "a family that takes pictures"
        return Seeing(kind, processor, tokenizer)

    @cached_property
    def scorer(self) -> Scorer:
        model = vision_model(self.kind)
        set_attention(model, PREFIX + "reference")
        recurrent_layers.install(model)
        return Scorer(model)

    def sample(self, name: str, pieces: Sequence[str | Drawn]) -> Sample:
        """Every token of a text is a target, but the first of all."""
        ids: list[int] = []
        at: list[int] = []
        media: list[Media] = []
        num_pictures = sum(isinstance(piece, Drawn) for piece in pieces)
        for piece in pieces:
            start = len(ids)
            if isinstance(piece, str):
                ids += self.ids(piece)
                at += range(max(1, start), len(ids))
                continue
            shape = self.processor.shape(piece.width, piece.height, num_pictures)
            text = self.ids(shape.text)
            where = [start + i for i, one in enumerate(text) if one == self.processor.image_id]
            handle = Handle(piece, self.processor, num_pictures)
            two_way = self.processor.is_two_way
            media.append(Media(handle, where[0], where[-1] + 1, shape.grid, two_way))
            ids += text
        return Sample(name, np.array(ids), np.array(at), np.ones(len(at)), media=tuple(media))

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids
