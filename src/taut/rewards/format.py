"""Rewards for the form of an answer: tags, a JSON schema, one language, no repetition.

jsonschema and py3langid are imported here only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from taut.config import configclass
from taut.conflicts import conflict
from taut.errors import ConfigError, DataError
from taut.rewards.settings import Judged, Place
from taut.rewards.verifier import Explained, RewardInput, Verifier, import_library


@configclass
class Tags(Verifier):
    """1 if an answer is nothing but the given tags, once each and in order: ``<think>...</think><answer>...</answer>``;
    else 0.

    White space may stand between them. With ``partial`` an incomplete answer gets half the share of its marks that
    stand once and in order (each tag has two), so that a model finds the form step by step.
    """

    judges: ClassVar[Judged] = "form"

    tags: Annotated[tuple[str, ...], Field(min_length=1)] = ("think", "answer")
    """Names of the tags, in order."""
    is_opened: bool = False
    """The answer goes on inside the first tag. A prompt that ends with the tag's opening mark, as some chat templates
    write it, says so by itself."""
    partial: bool = False
    """Give a partial score for a part of the form."""

    def __post_init__(self) -> None:
        if len(set(self.tags)) < len(self.tags) or not all(self.tags):
            why = "a name is empty or repeated"
            raise conflict(self, "tags", why, "expected each once; correct them")

    def __call__(self, answer: RewardInput) -> float:
        opening = f"<{self.tags[0]}>"
        is_opened = self.is_opened or answer.opened == opening
        text = opening + answer.text if is_opened else answer.text
        marks = [mark for tag in self.tags for mark in (f"<{tag}>", f"</{tag}>")]
        num_right, at, outside = 0, 0, []
        for number, mark in enumerate(marks):
            position = text.find(mark, at)
            if position < 0 or text.count(mark) > 1:
                continue
            if number % 2 == 0:
                outside.append(text[at:position])
            num_right, at = num_right + 1, position + len(mark)
        outside.append(text[at:])
        if num_right == len(marks) and not any(part.strip() for part in outside):
            return 1.0
        return 0.5 * num_right / len(marks) if self.partial else 0.0


_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


@configclass
class JsonSchema(Verifier):
    """1 if an answer is JSON that a JSON schema allows; else 0.

    The whole answer has to be JSON, or with ``is_fenced`` the first block between triple backquotes. NaN and Infinity
    are not JSON. The schema is one for all rows, or each row's own. References in it are to itself; none is fetched.
    """

    runs: ClassVar[Place] = "process"
    judges: ClassVar[Judged] = "form"
    max_memory: ClassVar[int | None] = 2**30
    unjudged: ClassVar[float | None] = 0.0

    schema: dict[str, Any] | None = None
    """The schema of all rows; draft 2020-12 unless its $schema says otherwise."""
    column: str | None = None
    """The column with each row's own schema, an object or JSON text; the reward does not apply to a row without one."""
    is_fenced: bool = False
    """The JSON is in a code block."""

    rules: ClassVar[str] = """
        exactly one of schema column: the schema is given here, or in a column of each row
    """

    def prepare(self) -> None:
        """Import the library, and check the schema."""
        assert self._library
        if self.schema is not None:
            assert self._of_all

    def __call__(self, answer: RewardInput) -> float | None:
        """None if the row has no schema."""
        if self.column is None:
            validator = self._of_all
        else:
            schema = answer.row.get(self.column)
            if schema is None:
                return None
            if isinstance(schema, str):
                try:
                    schema = json.loads(schema)
                except ValueError as error:
                    raise DataError(
                        f"found a schema in column {self.column!r} that is no JSON ({error}); expected an object; "
                        "correct the row"
                    ) from error
            validator = self._validator(schema)
        text = answer.text
        if self.is_fenced:
            fenced = _FENCED.search(text)
            text = fenced[1] if fenced else ""
        try:
            value = json.loads(text, parse_constant=_refuse)
            wrong = next(validator.iter_errors(value), None)
        except (ValueError, RecursionError, OverflowError) as error:  # no JSON, too deep, too large
            return Explained(0.0, f"no JSON: {error}")
        return 1.0 if wrong is None else Explained(0.0, f"{wrong.json_path}: {wrong.message}")

    @cached_property
    def _library(self) -> Any:
        return import_library("jsonschema", "jsonschema", "json_schema")

    @cached_property
    def _of_all(self) -> Any:
        return self._validator(self.schema)

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


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


STRETCH, SHORTEST = 60, 12
_NO_LANGUAGE = re.compile(
    r"```.*?(?:```|\Z)|\$\$.*?\$\$|\$[^$\n]*\$|\\\(.{0,999}?\\\)|\\\[.{0,999}?\\\]", re.DOTALL
)
"""Bounded: else the end of every formula that is opened and not closed is searched for to the end of the text."""


@configclass
class Language(Verifier):
    """The share of an answer that is in the language asked for, 0 to 1 (the language consistency of arXiv:2501.12948).

    The answer is cut at line ends into stretches of at least ``STRETCH`` letters; each counts by its letters, and is in
    the language that py3langid gives it (a naive Bayes model over bytes: small, offline, and, unlike langdetect,
    deterministic). Code between triple backquotes and formulas between dollar signs are left out. The reward does not
    apply to fewer letters than ``SHORTEST``.
    """

    runs: ClassVar[Place] = "process"
    judges: ClassVar[Judged] = "form"
    max_memory: ClassVar[int | None] = 2**30
    unjudged: ClassVar[float | None] = 0.0

    language: str
    """ISO 639-1 code: en, de, zh, ..."""
    among: tuple[str, ...] = ()
    """The languages that are distinguished; fewer are told apart more reliably. By default all that are known."""

    def prepare(self) -> None:
        """Load the model."""
        assert self._identifier

    def __call__(self, answer: RewardInput) -> float | None:
        """None if there is too little text."""
        stretches = list(_stretches(_NO_LANGUAGE.sub(" ", answer.text)))
        letters = [_letters(stretch) for stretch in stretches]
        if sum(letters) < SHORTEST:
            return None
        position = [self._identifier.classify(stretch)[0] for stretch in stretches]
        num_right = [n for n, name in zip(letters, position, strict=True) if name == self.language]
        return sum(num_right) / sum(letters)

    @cached_property
    def _identifier(self) -> Any:
        langid = import_library("py3langid.langid", "py3langid", "language")
        identifier = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE)
        strange = {self.language, *self.among} - set(identifier.labels)
        if strange:
            raise ConfigError(
                f"found the language {min(strange)!r}; expected codes of {', '.join(sorted(identifier.labels))}"
            )
        if self.among:
            identifier.set_languages({self.language, *self.among})
        return identifier


def _stretches(text: str) -> Iterator[str]:
    """Lines, joined until they have enough letters; what remains at the end joins the last stretch."""
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


@configclass
class Repetition(Verifier):
    """Repetition in an answer: minus the share of its n-grams that occurred before, 0 to -1.

        -(1 - different / all)          over the answer's n-grams of words

    As in arXiv:2502.03373, appendix C.2, with words in place of tokens: what white space separates, in lower case. An
    answer with fewer than n words has none.
    """

    judges: ClassVar[Judged] = "form"

    n: Annotated[int, Field(ge=1)] = 4
    """Words, or characters, of an n-gram."""
    units: Literal["words", "characters"] = "words"
    """characters: for scripts that do not separate words; n=20 is then a good choice."""

    def __call__(self, answer: RewardInput) -> float:
        lower = answer.text.lower()
        units = lower.split() if self.units == "words" else list(lower)
        grams = [tuple(units[at : at + self.n]) for at in range(len(units) - self.n + 1)]
        return len(set(grams)) / len(grams) - 1 if grams else 0.0
