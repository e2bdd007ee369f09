"""Small runs on rows with pictures: a tiny vision-language model, a few drawn pictures, several rows about each.

``keys_of`` names a run of any method on them, ``train`` trains it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from tests.helpers.chat_runs import QUIET, write_rows

import taut

COLORS = ("red", "green", "blue", "white")
SIZES = ((16, 16), (32, 16), (24, 40), (16, 16))
QUESTIONS = {"which colour?": "", "what is it?": "a box", "is it one?": "yes it is"}
ONLINE = ("grpo", "ppo")

Rows = list[dict[str, Any]]


def draw(directory: Path, number: int) -> str:
    """The name of a file in ``directory`` with a picture."""
    image = Image.new("RGB", SIZES[number % 4], "grey")
    ImageDraw.Draw(image).rectangle([4, 4, 12, 12], fill=COLORS[number % 4])
    image.save(directory / f"{number}.png")
    return f"{number}.png"


def conversations(directory: Path, num_pictures: int = 4) -> Rows:
    """Three questions about each picture, which stands beside the rows, and one row of text in four."""
    rows = []
    for number in range(num_pictures):
        name = draw(directory, number)
        for question, answer in QUESTIONS.items():
            seen = [{"type": "image", "image": name}, {"type": "text", "text": question}]
            rows.append(_conversation(seen, answer or COLORS[number % 4]))
        rows.append(_conversation(f"hi {number}", "hello there"))
    return rows


def _conversation(asked: Any, answer: str) -> dict[str, Any]:
    """Whoever generates reads the answer as the one to be given."""
    said = {"role": "assistant", "content": answer}
    return {"messages": [{"role": "user", "content": asked}, said]}


def pairs(directory: Path) -> Rows:
    """The same questions with a better and a worse answer, which begin alike."""
    return [
        {
            "prompt": row["messages"][:-1],
            "chosen": row["messages"][-1:],
            "rejected": [{"role": "assistant", "content": f"{row['messages'][-1]['content']} dog"}],
        }
        for row in conversations(directory)
    ]


def labels(directory: Path) -> Rows:
    """The same with one answer each, good or bad."""
    return [
        {"prompt": row["prompt"], "completion": row[("rejected", "chosen")[i % 2]], "label": bool(i % 2)}
        for i, row in enumerate(pairs(directory))
    ]  # fmt: skip


ROWS = {"sft": conversations, "dpo": pairs, "orpo": pairs, "reward": pairs, "kto": labels}


def keys_of(method: str, model: Path, place: Path, **keys: Any) -> dict[str, Any]:
    """Keys of a quiet run in float64 of two steps, unchecked; ``__`` stands for a dot, None takes a key out."""
    place.mkdir(parents=True, exist_ok=True)
    rows = ROWS.get(method, conversations)(place)
    fixed = {
        **QUIET,
        "method": method,
        "model": str(model),
        "data.train": str(write_rows(place / f"{method}.jsonl", rows)),
        "data.max_length": None,
        "out": str(place / "out" / method),
        "check": "off",
        "contract.prompts": 0,
        "steps": 2,
        "batch.samples_per_step": 8,
    }
    if method in ONLINE:
        fixed |= {
            "batch.samples_per_step": 3,
            "rollout.n": 2,
            "rollout.max_new_tokens": 4,
            "rewards": [{"name": "length_target", "options": {"target": 3}}],
        }
    given = fixed | {key.replace("__", "."): value for key, value in keys.items()}
    return {key: value for key, value in given.items() if value is not None}


def train(keys: Mapping[str, Any]) -> taut.Result:
    """A run of the method that the keys name."""
    result: taut.Result = getattr(taut, keys["method"])(**keys)
    return result
