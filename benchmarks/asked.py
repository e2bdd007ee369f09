"""The prompts of ``benchmarks/grpo.py``, generated from a fixed seed: each renders to exactly so many tokens.

Words that are one token each, with a space before it: of the word-level tokenizer of ``data.py`` all, of others those
of lower-case letters. Imported by ``benchmarks/grpo.py``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

import data

_WORD = re.compile(r"^Ġ[a-z]{3,}$")


def write_prompts(
    path: Path,
    model: Path,
    *,
    count: int,
    length: int,
    are_half_silent: bool = False,
    turns: int = 1,
) -> None:
    """``count`` rows of messages, each ``length`` tokens with template and generation prompt. ``are_half_silent``:
    every other one says that all of its answers are worth the same. ``turns``: of an agent, for ``peers/turns.py``.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    words = _words(tokenizer)
    rng = np.random.default_rng(23)
    missing = length - len(_rendered(tokenizer, words[0]))
    assert missing > 0, f"{length} tokens are not enough for the template"
    with path.open("w") as file:
        for number in range(count):
            chosen = [words[0], *(words[k] for k in rng.integers(0, len(words), missing))]
            messages = [{"role": "user", "content": " ".join(chosen)}]
            size = len(_rendered(tokenizer, messages[0]["content"]))
            assert size == length, f"prompt {number} has {size} tokens, not {length}"
            is_silent = are_half_silent and number % 2 == 1
            row = {"prompt": messages, "is_silent": is_silent, "turns": turns, "word": words[0]}
            file.write(json.dumps(row) + "\n")


def _rendered(tokenizer: Any, content: str) -> list[int]:
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    ids: list[int] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return ids


def _words(tokenizer: Any) -> list[str]:
    vocabulary = tokenizer.get_vocab()
    own = [token for token in vocabulary if re.fullmatch(r"w\d+", token)]
    found = own or [token[1:] for token in vocabulary if _WORD.match(token)]
    assert len(found) > len(data.SPECIALS), "a tokenizer without words"
    return sorted(found)
