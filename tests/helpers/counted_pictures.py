"""Rows with pictures for tests of rendering: an image store whose made-up processor's tokens can be counted by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tests.helpers import vision_templates as templates
from tests.helpers.tiny_tokenizers import tiny_tokenizer

from taut.data.render.render import Renderer
from taut.data.rows.messages import Conversation, Message
from taut.data.settings import Targets
from taut.errors import DataError
from taut.types import Media, Sample
from taut.vision.content import ImageRef
from taut.vision.image_store import ImageStore
from taut.vision.placeholders import Shape
from taut.vision.settings import ImagesConfig

WORDS = {
    "<image>": ("<image>", "<fake_token_around_image>", "<row>"),
    "<|image_pad|>": ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
}
TEMPLATES = {
    "qwen2_vl": templates.QWEN2_VL,
    "idefics": "{{ bos_token }}" + templates.IDEFICS3.removeprefix("<|begin_of_text|>"),
    "llava": templates.LLAVA_ONEVISION.replace("message['role'] + ' '", "message['role']"),
    "internvl": templates.INTERNVL.replace("<IMG_CONTEXT>", "<image>"),
}


class Tiles:
    """A processor: a token for each 2x2 pixels, in rows; in company, one for the whole."""

    is_two_way, depends_on_count, template = False, True, None

    def __init__(self, placeholder: str, image_id: int) -> None:
        self.placeholder, self.image_id = placeholder, image_id
        self.reserved = WORDS[placeholder]

    def shape(self, width: int, height: int, num_pictures: int) -> Shape:
        if width < 2:
            raise DataError(f"the picture is {width}x{height}; expected 2 pixels or more")
        if self.placeholder == "<|image_pad|>":
            grid = (1, height // 2, width // 2)
            return Shape(self.placeholder * (grid[1] * grid[2]), grid[1] * grid[2], grid)
        edge = "<fake_token_around_image>"
        if num_pictures > 2:
            return Shape(f"{edge}<image>{edge}", 1)
        rows = "".join("<row>" + "<image>" * (width // 2) for _ in range(height // 2))
        return Shape(edge + rows + edge, (width // 2) * (height // 2))

    def tensors(self, image: Image.Image, num_pictures: int) -> Mapping[str, torch.Tensor]:
        return {"pixels": torch.from_numpy(np.array(image))}

    def identity(self) -> str:
        return f"tiles {self.placeholder}"


def renderer(
    directory: Path, template: str = "qwen2_vl", targets: Targets = "assistant", **keys: Any
) -> Renderer:
    placeholder = "<|image_pad|>" if template == "qwen2_vl" else "<image>"
    ends = ["<end_of_utterance>"] if template == "idefics" else []
    tokenizer = tiny_tokenizer("chatml", eos=ends[0] if ends else None)
    words = [*WORDS[placeholder], *ends]
    tokenizer.add_special_tokens({"bos_token": "<bos>", "additional_special_tokens": words})
    tokenizer.chat_template = TEMPLATES[template]
    processor = Tiles(placeholder, tokenizer.convert_tokens_to_ids(placeholder))
    image_store = ImageStore(processor, ImagesConfig(**keys), directory / "blobs")
    return Renderer(tokenizer, None, targets, image_store=image_store)


def picture(directory: Path, name: str, width: int = 4, height: int = 4, color: int = 0) -> Message:
    path = directory / f"{name}.png"
    Image.new("RGB", (width, height), (color, 0, 0)).save(path)
    return {"type": "image", "image": ImageRef("file", str(path))}


def text(words: str) -> Message:
    return {"type": "text", "text": words}


def said(role: str, *parts: str | Message) -> Message:
    if all(isinstance(part, str) for part in parts):
        return {"role": role, "content": "".join(parts)}  # type: ignore[arg-type]
    return {"role": role, "content": [text(p) if isinstance(p, str) else p for p in parts]}


def chat(*messages: Message, place: str = "f.jsonl:1") -> Conversation:
    learned = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    return Conversation(place, tuple(messages), tuple(learned))


def learned(using: Renderer, sample: Sample) -> str:
    return using.template.decode(sample.ids_T[sample.target_at_N].tolist())


def spans(media: Sequence[Media]) -> list[tuple[int, int]]:
    return [(one.start, one.stop) for one in media]
