"""1 where the whole answer equals one of the references, both normalised (``normal.py``); else 0.

May import config, ``rewards.normal`` and the verifiers' base.
"""

from __future__ import annotations

from typing import ClassVar

from taut.config import configclass
from taut.rewards.answered import Answered
from taut.rewards.normal import normalise
from taut.rewards.verifier import Verifier


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
