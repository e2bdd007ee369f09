"""1 where the words of one of the references stand in the answer, in their order and side by side; else 0.

Both are normalised (``normal.py``). Words are what spaces separate: "fox" is not in "foxhound", and a reference inside
a sentence of a script without spaces is not found.

May import config, ``rewards.normal`` and the verifiers' base.
"""

from __future__ import annotations

from typing import ClassVar

from taut.config import configclass
from taut.rewards.answered import Answered
from taut.rewards.normal import normalise
from taut.rewards.verifier import Verifier


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
