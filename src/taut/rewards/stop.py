"""1 where an answer ended by itself; where it was cut, ``otherwise``.

May import config and the verifiers' base.
"""

from __future__ import annotations

from typing import ClassVar

from taut.config import configclass
from taut.rewards.answered import Answered
from taut.rewards.verifier import Judged, Verifier


@configclass
class Stop(Verifier):
    """It ends."""

    judges: ClassVar[Judged] = "form"

    ended: float = 1.0
    """For an answer that ends by itself."""
    otherwise: float = 0.0
    """For one that was cut."""

    def __call__(self, answered: Answered) -> float:
        return self.ended if answered.finish_reason == "stop" else self.otherwise
