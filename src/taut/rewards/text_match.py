"""SQuAD's normalisation (arXiv:1606.05250): lower case, no ASCII punctuation, no articles, single spaces.

A step that would leave nothing is left out, so that the answers "A" and "+" stay answers.

Imports nothing of ours. Rewards that compare words import it.
"""

from __future__ import annotations

import re
import string
from typing import ClassVar

from taut.config import configclass
from taut.errors import ConfigError
from taut.rewards.verifier import Answered, Judged, Place, Verifier

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """``text`` as it is compared."""
    plain = " ".join(text.lower().split())
    words = " ".join(plain.translate(_PUNCTUATION).split()) or plain
    return " ".join(_ARTICLES.sub(" ", words).split()) or words


# --------------------------------------------------------------------------------------------------
# 1 where the whole answer equals one of the references, both normalised (``normal.py``); else 0.
#
# May import config, ``rewards.normal`` and the verifiers' base.


@configclass
class ExactMatch(Verifier):
    """The answer is a reference."""

    full_marks: ClassVar[float | None] = 1.0
    needs_reference: ClassVar[bool] = True

    def __call__(self, answered: Answered) -> float | None:
        """None where there is no reference."""
        if not answered.references:
            return None
        return float(normalise(answered.text) in map(normalise, answered.references))


# --------------------------------------------------------------------------------------------------
# 1 where the words of one of the references stand in the answer, in their order and side by side; else 0.
#
# Both are normalised (``normal.py``). Words are what spaces separate: "fox" is not in "foxhound", and a reference
# inside a sentence of a script without spaces is not found.
#
# May import config, ``rewards.normal`` and the verifiers' base.


@configclass
class Contains(Verifier):
    """A reference stands in the answer."""

    full_marks: ClassVar[float | None] = 1.0
    needs_reference: ClassVar[bool] = True

    def __call__(self, answered: Answered) -> float | None:
        """None where there is no reference."""
        if not answered.references:
            return None
        words = f" {normalise(answered.text)} "
        return float(any(f" {normalise(it)} " in words for it in answered.references))


# --------------------------------------------------------------------------------------------------
# 1 where a regular expression is found in the answer; else 0. Expressions are Python's; some take for ever on some
# texts, so they run in a process with a time limit; an answer that reaches it is 0.
#
# May import config, errors and the verifiers' base.


@configclass
class Regex(Verifier):
    """A pattern is there."""

    runs: ClassVar[Place] = "process"
    judges: ClassVar[Judged] = "form"
    max_memory: ClassVar[int | None] = 2**30

    pattern: str
    """Flags stand inside it: (?s) a dot is any character, (?i) case does not matter, (?m) ^ and $ are of each line."""
    is_whole: bool = False
    """The whole answer has to be the pattern's, not a part of it."""

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ConfigError(
                f"pattern={self.pattern!r:.80} is no regular expression: {error}; expected one of Python's; correct it"
            ) from error

    def when_unjudged(self, answered: Answered) -> float:
        """0, as any wrong answer."""
        return 0.0

    def __call__(self, answered: Answered) -> float:
        match = re.fullmatch if self.is_whole else re.search
        return float(match(self.pattern, answered.text) is not None)
