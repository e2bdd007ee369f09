"""How much of an answer repeats itself: minus the share of its n-grams that were there before, 0 to -1.

    -(1 - different / all)          over the answer's n-grams of words

As in arXiv:2502.03373, appendix C.2, of words in place of tokens: what white space separates, in lower case. An answer
with fewer than n words has none.

May import config and the verifiers' base.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from taut.config import configclass
from taut.rewards.answered import Answered
from taut.rewards.verifier import Judged, Verifier


@configclass
class Repetition(Verifier):
    """It does not repeat itself."""

    judges: ClassVar[Judged] = "form"

    n: Annotated[int, Field(ge=1)] = 4
    """How many words, or characters, in a row are compared."""
    units: Literal["words", "characters"] = "words"
    """characters: for scripts that do not separate words; n=20 is then a good choice."""

    def __call__(self, answered: Answered) -> float:
        lower = answered.text.lower()
        units = lower.split() if self.units == "words" else list(lower)
        grams = [tuple(units[at : at + self.n]) for at in range(len(units) - self.n + 1)]
        return len(set(grams)) / len(grams) - 1 if grams else 0.0
