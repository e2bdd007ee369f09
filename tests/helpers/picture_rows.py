"""Rows about small pictures: boxes of a few colors and sizes, several questions each, and rows of text among them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

COLORS = ("red", "green", "blue")
SIZES = ((16, 16), (32, 16), (16, 16), (24, 40))


def draw(path: Path, number: int) -> Path:
    """A picture that no other number has."""
    image = Image.new("RGB", SIZES[number % len(SIZES)], "white")
    pen = ImageDraw.Draw(image)
    pen.rectangle([3, 3, 9 + number, 12], fill=COLORS[number % len(COLORS)])
    image.save(path)
    return path


def chats_with_pictures(folder: Path, num_pictures: int = 4) -> list[dict[str, Any]]:
    """Conversations: two about each picture, and as many of text as there are pictures."""
    rows = []
    for number in range(num_pictures):
        path = draw(folder / f"{number}.png", number)
        picture = {"type": "image", "image": str(path)}
        asked = {"which colour?": COLORS[number % len(COLORS)], "what is it?": "a box"}
        rows += [
            _chat([picture, {"type": "text", "text": question}], answer)
            for question, answer in asked.items()
        ]
        rows.append(_chat(f"say the number {number}", f"the cat says {number}"))
    return rows


def _chat(content: Any, answer: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": content},
            {"role": "assistant", "content": answer},
        ]
    }
