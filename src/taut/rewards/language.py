"""The share of an answer that is in the language asked for, 0 to 1 (as the language consistency of arXiv:2501.12948).

The answer is cut into stretches of at least ``STRETCH`` letters at line ends; each counts by its letters, and is in
the language that py3langid gives it (a naive Bayes model over bytes: small, offline, and, unlike langdetect, without
chance). Code between triple backquotes and formulas between dollar signs are left out. Fewer letters than ``SHORTEST``
cannot be told: it does not apply.

py3langid is imported here only. May import config, errors and the verifiers' base.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar

from taut.config import configclass
from taut.errors import ConfigError, install_extra
from taut.rewards.answered import Answered
from taut.rewards.verifier import Judged, Place, Verifier

STRETCH, SHORTEST = 60, 12
_NO_LANGUAGE = re.compile(
    r"```.*?(?:```|\Z)|\$\$.*?\$\$|\$[^$\n]*\$|\\\(.{0,999}?\\\)|\\\[.{0,999}?\\\]", re.DOTALL
)
"""Bounded, for each mark that opens a formula and has none that closes it would be looked for to the end."""


@configclass
class Language(Verifier):
    """In one language."""

    runs: ClassVar[Place] = "process"
    judges: ClassVar[Judged] = "form"
    max_memory: ClassVar[int | None] = 2**30

    language: str
    """Its code of ISO 639-1: en, de, zh, ..."""
    among: tuple[str, ...] = ()
    """Languages it is told from; fewer are told apart more surely. By default all that are known."""

    def prepare(self) -> None:
        """Load the model."""
        assert self._identifier

    def when_unjudged(self, answered: Answered) -> float:
        """0, as any wrong answer."""
        return 0.0

    def __call__(self, answered: Answered) -> float | None:
        """None where there is too little text."""
        stretches = list(_stretches(_NO_LANGUAGE.sub(" ", answered.text)))
        letters = [_letters(stretch) for stretch in stretches]
        if sum(letters) < SHORTEST:
            return None
        found = [self._identifier.classify(stretch)[0] for stretch in stretches]
        own = [n for n, name in zip(letters, found, strict=True) if name == self.language]
        return sum(own) / sum(letters)

    @cached_property
    def _identifier(self) -> Any:
        try:
            from py3langid.langid import MODEL_FILE, LanguageIdentifier
        except ImportError as error:
            raise ConfigError(
                f"the reward language needs py3langid ({error}); expected it installed; {install_extra('rl')}"
            ) from error
        identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
        strange = {self.language, *self.among} - set(identifier.labels)
        if strange:
            raise ConfigError(
                f"found the language {min(strange)!r}; expected codes of {', '.join(sorted(identifier.labels))}"
            )
        if self.among:
            identifier.set_languages({self.language, *self.among})
        return identifier


def _stretches(text: str) -> Iterator[str]:
    """Lines, joined until they have letters enough; what is left at the end joins the last."""
    done, held, letters = "", "", 0
    for line in text.splitlines():
        held += line + "\n"
        letters += _letters(line)
        if letters >= STRETCH:
            if done:
                yield done
            done, held, letters = held, "", 0
    if done + held:
        yield done + held


def _letters(text: str) -> int:
    return sum(character.isalpha() for character in text)
