"""1 where a regular expression is found in the answer; else 0. Expressions are Python's; some take for ever on some
texts, so they run in a process with a time limit; an answer that reaches it is 0.

May import config, errors and the verifiers' base.
"""

from __future__ import annotations

import re
from typing import ClassVar

from taut.config import configclass
from taut.errors import ConfigError
from taut.rewards.answered import Answered
from taut.rewards.verifier import Judged, Place, Verifier


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
