"""Pictures with questions about them, and a vision-language model, generated from fixed seeds: nothing is downloaded.

A row is ``<bos>`` picture question ``<sep>`` answer ``<eos>`` over the words of ``data.py``; the four rows of a picture
are neighbors. Pictures are JPEG files of smooth noise, their sides multiples of 28 pixels (a token's), drawn evenly:
no size has to be changed for the model, for which libraries have filters that differ in the last digit.

The model is a random Qwen2.5-VL. Per picture token its tower has about as many operations as its language model, as in
Qwen2.5-VL-3B (32 layers of 1,280 on four patches a token, beside 36 layers of 2,048).

Run by ``benchmarks/vision.py`` and imported by nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

from data import BOS, EOS, PAD, SEP, draw_words, word, write_tokenizer

NUM_WORDS = 8192
MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
START, IMAGE, END, VIDEO = range(NUM_WORDS, NUM_WORDS + len(MARKS))
SIDE = 28
"""Pixels: a patch is 14 wide, and two by two of them become a token."""
QUESTIONS = 4
TEMPLATE = (
    "{{ '<bos>' }}{% for message in messages %}"
    "{% if message.content is string %}{{ ' ' + message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ ' ' + part.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ ' <sep>' if message.role == 'user' else ' <eos>' }}{% endfor %}"
)


@dataclass(frozen=True)
class Asked:
    """A picture's file name, its size in tokens, a question and its answer."""

    picture: str
    size: tuple[int, int]
    question: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """What the model is given."""
        seen = (START, *[IMAGE] * (self.size[0] * self.size[1]), END)
        return (BOS, *seen, *self.question, SEP, *self.answer, EOS)

    @property
    def num_targets(self) -> int:
        return len(self.answer) + 1


def make_rows(num_pictures: int, sides: tuple[int, int]) -> list[Asked]:
    """Four rows a picture, whose sides have from fewest to most tokens."""
    rng = np.random.default_rng(23)
    rows = []
    for number in range(num_pictures):
        width, height = (int(side) for side in rng.integers(sides[0], sides[1] + 1, 2))
        for _ in range(QUESTIONS):
            question = draw_words(rng, NUM_WORDS, int(rng.integers(8, 20)))
            answer = draw_words(rng, NUM_WORDS, int(rng.integers(3, 12)))
            place = f"{number}.jpg"
            rows.append(Asked(place, (width, height), tuple(question), tuple(answer)))
    return rows


def write_rows(rows: Sequence[Asked], folder: Path) -> None:
    """The pictures; ``messages.jsonl`` for taut, ``asked.jsonl`` for TRL, ``rows.jsonl``: the ids of each row."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, size) in enumerate({row.picture: row.size for row in rows}.items()):
        paint(size, number).save(folder / name, quality=90)
    files = {name: (folder / f"{name}.jsonl").open("w") for name in ("messages", "asked", "rows")}
    for row in rows:
        text, answer = " ".join(map(word, row.question)), " ".join(map(word, row.answer))
        parts: list[dict[str, Any]] = [{"type": "image", "image": row.picture}]
        user = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
        assistant = {"role": "assistant", "content": answer}
        asked = {
            "prompt": [{"role": "user", "content": text}],
            "completion": [assistant],
            "images": [row.picture],
        }
        record = {"ids": row.ids, "num_prompt": len(row.ids) - row.num_targets}
        for name, value in (
            ("messages", {"messages": [user, assistant]}),
            ("asked", asked),
            ("rows", record),
        ):
            files[name].write(json.dumps(value) + "\n")
    for file in files.values():
        file.close()


def paint(size: tuple[int, int], seed: int) -> Image.Image:
    """Noise of so many tokens' width and height, smooth within a token."""
    width, height = size
    noise = np.random.default_rng(seed).integers(0, 256, (height + 1, width + 1, 3), dtype=np.uint8)
    small = Image.fromarray(noise)
    return small.resize((SIDE * width, SIDE * height), Image.Resampling.BICUBIC)


def write_model(folder: Path) -> None:
    """The random model with its tokenizer, template and image processor, as a Hugging Face directory."""
    torch.manual_seed(0)
    hidden = 256
    text = {
        "vocab_size": NUM_WORDS + len(MARKS),
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [8, 12, 12],
        },
    }
    vision = {
        "depth": 4,
        "hidden_size": 160,
        "out_hidden_size": hidden,
        "intermediate_size": 432,
        "num_heads": 4,
        "fullatt_block_indexes": [3],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    write_tokenizer(folder, NUM_WORDS, MARKS, TEMPLATE)
    Qwen2VLImageProcessorPil(
        size={"shortest_edge": SIDE * SIDE, "longest_edge": 1280 * SIDE * SIDE}
    ).save_pretrained(folder)
