"""The preference data of ``benchmarks/dpo.py``, generated from a fixed seed: nothing is downloaded.

A pair is ``<bos> prompt <sep>`` and two answers ``... <eos>`` over the words of ``data.py``. Words of chosen answers
have even ids, those of rejected ones odd ids: a rule that a model learns from some pairs and that holds in others, so
that the losses of a run move, and two runs that are equal at its end have taken the same steps.

Run by ``benchmarks/dpo.py`` and imported by nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data import BOS, EOS, SEP, Row, draw_words, word


@dataclass(frozen=True)
class Pair:
    """Ids of the prompt with ``<bos>`` and ``<sep>``, and of the answers with ``<eos>``."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]

    @property
    def rows(self) -> tuple[Row, Row]:
        """The pair as two rows, as a framework that shares nothing sees it."""
        length = len(self.prompt)
        return Row(self.prompt + self.chosen, length), Row(self.prompt + self.rejected, length)

    @property
    def num_targets(self) -> int:
        return len(self.chosen) + len(self.rejected)

    @property
    def num_tokens(self) -> int:
        return 2 * len(self.prompt) + self.num_targets


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt and of an answer, drawn evenly from fewest to most."""

    prompt: tuple[int, int]
    answer: tuple[int, int]


def make_pairs(count: int, vocab: int, lengths: Lengths) -> list[Pair]:
    rng = np.random.default_rng(22)

    def draw(between: tuple[int, int], num_specials: int) -> list[int]:
        length = int(rng.integers(between[0], between[1] + 1))
        return draw_words(rng, vocab, length - num_specials)

    return [
        Pair(
            (BOS, *draw(lengths.prompt, 2), SEP),
            (*(_even(token, vocab) for token in draw(lengths.answer, 1)), EOS),
            (*(_even(token, vocab) - 1 for token in draw(lengths.answer, 1)), EOS),
        )
        for _ in range(count)
    ]


def _even(token: int, vocab: int) -> int:
    return min(token + token % 2, vocab - 2)


def write_pairs(pairs: Sequence[Pair], folder: Path) -> None:
    """``pairs.jsonl``, messages for everybody; ``rows.jsonl``, the ids that a model is to be given: pair k's chosen row
    is number 2 k, its rejected row 2 k + 1.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (
        (folder / "pairs.jsonl").open("w") as pairs_file,
        (folder / "rows.jsonl").open("w") as rows_file,
    ):
        for pair in pairs:
            for row in pair.rows:
                rows_file.write(json.dumps({"ids": row.ids, "num_prompt": row.num_prompt}) + "\n")
            record = {
                "prompt": [{"role": "user", "content": _text(pair.prompt[1:-1])}],
                "chosen": [{"role": "assistant", "content": _text(pair.chosen[:-1])}],
                "rejected": [{"role": "assistant", "content": _text(pair.rejected[:-1])}],
            }
            pairs_file.write(json.dumps(record) + "\n")


def _text(ids: Sequence[int]) -> str:
    return " ".join(map(word, ids))
