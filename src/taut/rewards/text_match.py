"""Rewards that compare texts: exact match, containment, a regular expression.

The first two normalise as SQuAD does (arXiv:1606.05250); a step that would leave nothing is skipped, so that the
answers "A" and "+" stay answers.
"""

from __future__ import annotations

import re
import string
from typing import ClassVar

from taut.config import configclass
from taut.rewards.verifier import Answered, Judged, Place, Verifier, compile_pattern

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """``text`` as it is compared: lower case, no ASCII punctuation, no articles, single spaces."""
    plain = " ".join(text.lower().split())
    words = " ".join(plain.translate(_PUNCTUATION).split()) or plain
    return " ".join(_ARTICLES.sub(" ", words).split()) or words


@configclass
class ExactMatch(Verifier):
    """1 if the whole answer equals one of the references, both normalised; else 0."""

    full_marks: ClassVar[float | None] = 1.0
    needs_reference: ClassVar[bool] = True

    def __call__(self, answered: Answered) -> float | None:
        """None if there is no reference."""
        if not answered.references:
            return None
        return float(normalise(answered.text) in map(normalise, answered.references))


@configclass
class Contains(Verifier):
    """1 if the words of one of the references occur in the answer, consecutive and in order, both normalised; else 0.

    Words are what spaces separate: "fox" is not in "foxhound", and a reference inside a sentence of a script without
    spaces is not found.
    """

    full_marks: ClassVar[float | None] = 1.0
    needs_reference: ClassVar[bool] = True

    def __call__(self, answered: Answered) -> float | None:
        """None if there is no reference."""
        if not answered.references:
            return None
        words = f" {normalise(answered.text)} "
        return float(any(f" {normalise(reference)} " in words for reference in answered.references))


@configclass
class Regex(Verifier):
    """1 if a regular expression (Python's) is found in the answer; else 0.

    Some expressions take for ever on some texts, so they run in a process with a time limit; an answer that reaches it
    gets 0.
    """

    runs: ClassVar[Place] = "process"
    judges: ClassVar[Judged] = "form"
    max_memory: ClassVar[int | None] = 2**30
    unjudged: ClassVar[float | None] = 0.0

    pattern: str
    """The regular expression. Flags go inside: (?s) a dot matches any character, (?i) case does not matter, (?m) ^ and
    $ match at each line."""
    is_whole: bool = False
    """Match the whole answer, not a part of it."""

    def __post_init__(self) -> None:
        compile_pattern(self.pattern)

    def __call__(self, answered: Answered) -> float:
        match = re.fullmatch if self.is_whole else re.search
        return float(match(self.pattern, answered.text) is not None)
