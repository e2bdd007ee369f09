"""1 where an answer is nothing but the given tags, once each and in order: ``<think>...</think><answer>...</answer>``.

White space may stand between them. With ``partial`` an answer that is not whole gets the share of its marks that stand
once and in order (each tag has two), at most half of 1, so that a model finds the form step by step.

May import config, errors and the verifiers' base.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from taut.config import configclass
from taut.errors import ConfigError, DataError, install_extra
from taut.rewards.verifier import Answered, Judged, Place, Verifier


@configclass
class Tags(Verifier):
    """The form of tags."""

    judges: ClassVar[Judged] = "form"

    tags: Annotated[tuple[str, ...], Field(min_length=1)] = ("think", "answer")
    """Their names, in order."""
    is_opened: bool = False
    """The prompt ends with the first tag's opening mark, as some templates have it."""
    partial: bool = False
    """Give something for a part of the form."""

    def __post_init__(self) -> None:
        if len(set(self.tags)) < len(self.tags) or not all(self.tags):
            raise ConfigError(
                f"found tags={list(self.tags)}; expected names, each once; correct them"
            )

    def __call__(self, answered: Answered) -> float:
        text = f"<{self.tags[0]}>{answered.text}" if self.is_opened else answered.text
        marks = [mark for tag in self.tags for mark in (f"<{tag}>", f"</{tag}>")]
        num_right, at, outside = 0, 0, []
        for number, mark in enumerate(marks):
            found = text.find(mark, at)
            if found < 0 or text.count(mark) > 1:
                continue
            if number % 2 == 0:
                outside.append(text[at:found])
            num_right, at = num_right + 1, found + len(mark)
        outside.append(text[at:])
        if num_right == len(marks) and not any(part.strip() for part in outside):
            return 1.0
        return 0.5 * num_right / len(marks) if self.partial else 0.0


# --------------------------------------------------------------------------------------------------
# 1 where an answer is JSON that a JSON schema allows; else 0.
#
# The whole answer has to be JSON, or with ``is_fenced`` the first block between triple backquotes. NaN and Infinity
# are not JSON. The schema is one for all rows, or each row's own. References in it are to itself; none is fetched.
#
# jsonschema is imported here only. May import config, errors and the verifiers' base.

_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


@configclass
class JsonSchema(Verifier):
    """JSON of a form."""

    runs: ClassVar[Place] = "process"
    judges: ClassVar[Judged] = "form"
    max_memory: ClassVar[int | None] = 2**30

    schema: dict[str, Any] | None = None
    """What is allowed; draft 2020-12 unless its $schema says otherwise."""
    column: str | None = None
    """The column with the row's own schema, an object or a text of JSON, instead; a row without one is left out."""
    is_fenced: bool = False
    """The JSON stands in a block of code."""

    def __post_init__(self) -> None:
        if (self.schema is None) == (self.column is None):
            raise ConfigError(
                "json_schema has a schema or a column that has it; expected one of them; set one"
            )

    def prepare(self) -> None:
        """Import the library, and check the schema."""
        assert self._library
        if self.schema is not None:
            assert self._of_all

    def when_unjudged(self, answered: Answered) -> float:
        """0, as any wrong answer."""
        return 0.0

    def __call__(self, answered: Answered) -> float | None:
        """None where the row has no schema."""
        validator = self._of_all if self.column is None else self._of_row(answered)
        if validator is None:
            return None
        text = answered.text
        if self.is_fenced:
            fenced = _FENCED.search(text)
            text = fenced[1] if fenced else ""
        try:
            value = json.loads(text, parse_constant=_refuse)
            return float(validator.is_valid(value))
        except (ValueError, RecursionError, OverflowError):  # no JSON, too deep, too large a number
            return 0.0

    @cached_property
    def _library(self) -> Any:
        try:
            import jsonschema
        except ImportError as error:
            raise ConfigError(
                f"the reward json_schema needs jsonschema ({error}); expected it installed; {install_extra('rl')}"
            ) from error
        return jsonschema

    @cached_property
    def _of_all(self) -> Any:
        return self._validator(self.schema)

    def _of_row(self, answered: Answered) -> Any:
        assert self.column is not None
        found = answered.row.get(self.column)
        return None if found is None else self._validator(_read(found, self.column))

    def _validator(self, schema: Any) -> Any:
        import referencing

        library = self._library
        made = library.validators.validator_for(schema, library.Draft202012Validator)
        try:
            made.check_schema(schema)
        except library.SchemaError as error:
            raise DataError(
                f"found a schema that is none: {error.message[:200]}; expected a JSON schema; correct it"
            ) from error
        return made(schema, registry=referencing.Registry())


def _read(found: Any, column: str) -> Any:
    if not isinstance(found, str):
        return found
    try:
        return json.loads(found)
    except ValueError as error:
        raise DataError(
            f"found a schema in column {column!r} that is no JSON ({error}); expected an object; correct the row"
        ) from error


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


# --------------------------------------------------------------------------------------------------
# The share of an answer that is in the language asked for, 0 to 1 (as the language consistency of arXiv:2501.12948).
#
# The answer is cut into stretches of at least ``STRETCH`` letters at line ends; each counts by its letters, and is in
# the language that py3langid gives it (a naive Bayes model over bytes: small, offline, and, unlike langdetect,
# without chance). Code between triple backquotes and formulas between dollar signs are left out. Fewer letters than
# ``SHORTEST`` cannot be told: it does not apply.
#
# py3langid is imported here only. May import config, errors and the verifiers' base.

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


# --------------------------------------------------------------------------------------------------
# How much of an answer repeats itself: minus the share of its n-grams that were there before, 0 to -1.
#
#     -(1 - different / all)          over the answer's n-grams of words
#
# As in arXiv:2502.03373, appendix C.2, of words in place of tokens: what white space separates, in lower case. An
# answer with fewer than n words has none.
#
# May import config and the verifiers' base.


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
