"""What the run of this folder begins with: pictures, questions about them, and a small random vision-language model.

    python examples/vision/make.py DIR

    DIR/model           a Qwen2.5-VL of 1M parameters, with its tokenizer and image processor
    DIR/pictures/       PNG files of three sizes, a colored shape in each
    DIR/train.jsonl     four questions a picture, with answers
    DIR/eval.jsonl      the same for held-out pictures

All of it is the same for the same seed. The vocabulary is bytes, and the words that questions and answers are made of.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

Row = dict[str, Any]

COLORS = {
    "red": (205, 40, 35),
    "green": (35, 150, 60),
    "blue": (40, 70, 205),
    "yellow": (225, 195, 30),
}
SHAPES = ("ring", "square", "cross")
SCALES = {"small": (0.23, 0.29), "large": (0.37, 0.47)}
"""How far a shape reaches from its middle, as a part of the picture's shorter side."""
SIZES = ((64, 64), (96, 64), (96, 96))
"""(width, height) of pictures."""
COUNTS = {"train": 3000, "eval": 250}
"""Pictures."""

END, USER, ASSISTANT, PAD = "<|im_end|>", "<|user|>", "<|assistant|>", "<|endoftext|>"
BEFORE, IMAGE, AFTER, VIDEO = (
    "<|vision_start|>",
    "<|image_pad|>",
    "<|vision_end|>",
    "<|video_pad|>",
)
SPECIALS = (END, USER, ASSISTANT, PAD, BEFORE, IMAGE, AFTER, VIDEO)
WORDS = (
    "Which ",
    "color",
    "shape",
    "size",
    " is it",
    "Is it a ",
    *COLORS,
    *SHAPES,
    *SCALES,
    "yes",
    "no",
)
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class Scene(NamedTuple):
    """What is in a picture."""

    color: str
    shape: str
    scale: str


def make_scene(draw: random.Random) -> Scene:
    return Scene(draw.choice([*COLORS]), draw.choice(SHAPES), draw.choice([*SCALES]))


def paint(scene: Scene, draw: random.Random) -> Image.Image:
    """The scene: size, place and shade of the shape are drawn at random."""
    width, height = draw.choice(SIZES)
    paper = draw.randint(215, 255)
    image = Image.new("RGB", (width, height), (paper, paper, paper))
    canvas = ImageDraw.Draw(image)
    radius = draw.uniform(*SCALES[scene.scale]) * min(width, height)
    x, y = draw.uniform(radius, width - radius), draw.uniform(radius, height - radius)
    red, green, blue = (shade + draw.randint(-25, 25) for shade in COLORS[scene.color])
    fill = (red, green, blue)
    left, top, right, bottom = x - radius, y - radius, x + radius, y + radius
    third = radius / 3
    if scene.shape == "ring":
        canvas.ellipse((left, top, right, bottom), outline=fill, width=round(radius / 2))
    elif scene.shape == "square":
        canvas.rectangle((left, top, right, bottom), fill)
    else:
        canvas.rectangle((left, y - third, right, y + third), fill)
        canvas.rectangle((x - third, top, x + third, bottom), fill)
    return image


def questions(scene: Scene, draw: random.Random) -> list[tuple[str, str]]:
    """Four, with their answers; every answer to a question is as likely as the others."""
    is_right = draw.random() < 0.5
    asked = scene
    while not is_right and asked[:2] == scene[:2]:
        asked = make_scene(draw)
    return [
        ("Which colour is it?", scene.color),
        ("Which shape is it?", scene.shape),
        ("Which size is it?", scene.scale),
        (f"Is it a {asked.color} {asked.shape}?", "yes" if is_right else "no"),
    ]


def write_rows(directory: Path, name: str, draw: random.Random) -> None:
    """The pictures of a file, and its rows."""
    rows: list[Row] = []
    for number in range(COUNTS[name]):
        scene = make_scene(draw)
        place = f"pictures/{name}-{number}.png"
        paint(scene, draw).save(directory / place)
        for question, answer in questions(scene, draw):
            asked = [{"type": "image", "image": place}, {"type": "text", "text": question}]
            messages = [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": answer},
            ]
            rows.append({"messages": messages})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    fast.chat_template = TEMPLATE
    return fast


def make_model(directory: Path, seed: int = 0) -> None:
    """A random model with its tokenizer and image processor, as transformers loads them."""
    tokenizer = make_tokenizer()
    ids = dict(zip(SPECIALS, tokenizer.convert_tokens_to_ids(list(SPECIALS)), strict=True))
    text = {
        "vocab_size": len(tokenizer),
        "initializer_range": 0.08,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": ids[END],
        "pad_token_id": ids[PAD],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 6, 6],
        },
    }
    vision = {
        "depth": 2,
        "initializer_range": 0.08,
        "hidden_size": 96,
        "out_hidden_size": 128,
        "intermediate_size": 192,
        "num_heads": 4,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids[IMAGE],
        video_token_id=ids[VIDEO],
        vision_start_token_id=ids[BEFORE],
        vision_end_token_id=ids[AFTER],
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    AutoTokenizer.from_pretrained(directory).save_pretrained(directory)
    pictures = Qwen2VLImageProcessorPil(
        patch_size=8,
        temporal_patch_size=2,
        merge_size=2,
        size={"shortest_edge": 32 * 32, "longest_edge": 256 * 256},
    )
    pictures.save_pretrained(directory)


def main(directory: Path) -> None:
    """Write it all."""
    (directory / "pictures").mkdir(parents=True, exist_ok=True)
    make_model(directory / "model")
    draw = random.Random(0)
    for name in COUNTS:
        write_rows(directory, name, draw)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
