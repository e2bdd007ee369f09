"""Preferences of one kind: of two correct answers to a question, the shorter one.

    python examples/shorter/pairs.py DIR     writes DIR/train.jsonl (400 pairs) and DIR/eval.jsonl (100 pairs)

Both answers are made from the same numbers and words, so both are right; no question of one file is in the other. The
column ``answer`` is for ``taut eval``.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

Triple = tuple[str, str, str]
"""A question, a short answer, a long one."""

WORDS = [
    "apple",
    "bridge",
    "candle",
    "desert",
    "engine",
    "forest",
    "garden",
    "hammer",
    "island",
    "jacket",
    "kettle",
    "ladder",
    "mirror",
    "needle",
    "orange",
    "pencil",
    "quarry",
    "ribbon",
    "saddle",
    "tunnel",
    "umbrella",
    "violin",
    "window",
    "yellow",
    "zipper",
    "anchor",
    "basket",
    "copper",
    "donkey",
    "feather",
]


def addition(draw: random.Random) -> Triple:
    a, b = draw.randint(2, 99), draw.randint(2, 99)
    long = (
        f"To find the sum, we add the two numbers together. We begin with {a} and add {b} to it, which gives us "
        f"{a + b}. So the answer to your question is {a + b}."
    )
    return f"What is {a} + {b}?", f"{a + b}", long


def larger(draw: random.Random) -> Triple:
    a, b = draw.sample(range(2, 999), 2)
    most = max(a, b)
    long = (
        f"That is a good question. To decide it we compare {a} with {b}. Since {most} is greater than {min(a, b)}, the "
        f"larger of the two numbers is {most}."
    )
    return f"Which number is larger, {a} or {b}?", f"{most}", long


def first_letter(draw: random.Random) -> Triple:
    word = draw.choice(WORDS) + draw.choice(["", "s"])
    long = (
        f'Let us look at the word "{word}" one letter at a time. The very first letter that we come to is '
        f'"{word[0]}", so the word begins with the letter "{word[0]}".'
    )
    return f'Which letter does the word "{word}" begin with?', word[0], long


def number_of_letters(draw: random.Random) -> Triple:
    word = draw.choice(WORDS) + draw.choice(["", "s"])
    long = (
        f'To answer this, we can spell the word "{word}" and count its letters: {"-".join(word)}. Counting them all '
        f"from the first to the last, we find that there are {len(word)} letters."
    )
    return f'How many letters are in the word "{word}"?', f"{len(word)}", long


FAMILIES: tuple[Callable[[random.Random], Triple], ...] = (
    addition,
    larger,
    first_letter,
    number_of_letters,
)


def make(count: int, seed: int = 0) -> list[dict[str, object]]:
    """Rows with different questions."""
    draw, seen, rows = random.Random(seed), set[str](), []
    while len(rows) < count:
        question, short, long = draw.choice(FAMILIES)(draw)
        if question in seen:
            continue
        seen.add(question)
        rows.append(
            {
                "prompt": [{"role": "user", "content": question}],
                "chosen": [{"role": "assistant", "content": f"{short}."}],
                "rejected": [{"role": "assistant", "content": long}],
                "answer": short,
            }
        )
    return rows


def main(directory: Path) -> None:
    rows = make(500)
    directory.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", rows[:400]), ("eval", rows[400:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
