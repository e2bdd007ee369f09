"""1 where an answer is JSON that a JSON schema allows; else 0.

The whole answer has to be JSON, or with ``is_fenced`` the first block between triple backquotes. NaN and Infinity are
not JSON. The schema is one for all rows, or each row's own. References in it are to itself; none is fetched.

jsonschema is imported here only. May import config, errors and the verifiers' base.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any, ClassVar

from taut.config import configclass
from taut.errors import ConfigError, DataError, install_extra
from taut.rewards.answered import Answered
from taut.rewards.verifier import Judged, Place, Verifier

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
