"""Weights of parts of an answer in the loss, by regular expressions: ``data.token_weights``.

    parts    the matches of all patterns in the text that the model writes, first to last, without overlap; where two
             begin at one place, that of the pattern listed first
    weight   of a token: that of the part that holds its first character which is not white space (of white space alone
             its first), and 1 in none; times that of its message

The text is what the chat template writes of an answer after the generation prompt, up to the token that ends it, which
has the message's weight alone. A token of weight 0 is read and not learned. Matches are those of Python's ``re`` where
a dot matches line breaks; a match of no character is none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from taut.data.settings import TokenWeight
from taut.types import FloatArray


class Part(NamedTuple):
    """A part of a text and its weight."""

    start: int
    stop: int
    weight: float


class TokenWeights:
    """The weights that a list of patterns gives to the tokens of an answer."""

    def __init__(self, rules: Sequence[TokenWeight] = ()) -> None:
        self.rules = tuple(rules)

    @cached_property
    def _patterns(self) -> list[re.Pattern[str]]:
        return [re.compile(rule.pattern, re.DOTALL) for rule in self.rules]

    def parts(self, text: str) -> list[Part]:
        """The parts of an answer's text that have a weight of their own."""
        found: list[Part] = []
        at = 0
        while at < len(text):
            first = (
                next((match for match in pattern.finditer(text, at) if match[0]), None)
                for pattern in self._patterns
            )
            part = min(
                (
                    Part(*match.span(), rule.weight)
                    for match, rule in zip(first, self.rules, strict=True)
                    if match
                ),
                key=lambda part: part.start,
                default=None,
            )
            if part is None:
                break
            found.append(part)
            at = part.stop
        return found

    def of(self, text: str, spans: Sequence[tuple[int, int]]) -> FloatArray:
        """The weight of each token of an answer's text, by its span in it."""
        weight_N = np.ones(len(spans))
        words = [text[start:stop] for start, stop in spans]
        place_N = np.array(
            [
                start + (len(word) - len(word.lstrip()) if word.strip() else 0)
                for (start, _), word in zip(spans, words, strict=True)
            ],
            dtype=np.int64,
        )
        for start, stop, weight in self.parts(text):
            weight_N[(place_N >= start) & (place_N < stop)] = weight
        return weight_N

    def identity(self) -> str:
        """Words that change whenever the weights of some answer could; empty without patterns."""
        return repr([(rule.pattern, rule.weight) for rule in self.rules]) if self.rules else ""
