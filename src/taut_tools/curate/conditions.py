"""Conditions on rows: bounds on measured values, patterns in the text, and comparisons of columns.

    min_tokens=16, max_loss=4            a bound on a measured value
    match="\\bSQL\\b"                      a regular expression that occurs in the row's text (``reject``: does not)
    where=["score >= 0.5", "source != web", "meta.lang == en"]

A row without the value that a bound is on (a reward that does not apply, or is an error) is removed, with the reason
``no_reward`` and the like: nothing shows that it is good.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from taut.data.read.json_io import did_you_mean, shown
from taut.errors import ConfigError, DataError

OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION = re.compile(r"\s*(?P<column>.+?)\s*(?P<operator>==|!=|>=|<=|>|<)\s*(?P<value>.+?)\s*")


@dataclass(frozen=True)
class Bound:
    """A bound on a measured value."""

    key: str
    """Key of the bound: min_tokens, max_tokens, ..."""
    name: str
    """Name of the value: tokens, ..."""
    limit: float
    keeps_unknown: bool = False
    """Whether a row without the value is kept."""

    def broken_by(self, value: float) -> bool:
        return value < self.limit if self.key.startswith("min_") else value > self.limit


@dataclass(frozen=True)
class Where:
    """A condition on a column."""

    text: str
    column: str
    operator: str
    word: str
    """The value as the condition spells it."""
    value: Any
    """The value read as JSON, if it is JSON, else the word."""

    def holds(self, record: Mapping[str, Any], place: str) -> bool:
        """Whether a row meets the condition. Raises DataError where it lacks the column or cannot be compared."""
        found = _column(record, self.column)
        if found is None:
            raise DataError(
                f"{place}: the row has no column {self.column!r}, of where={self.text!r}; its columns are "
                f"{shown(record)}{did_you_mean(self.column, record)}"
            )
        is_word = isinstance(found, str) and not isinstance(self.value, str)
        value = self.word if is_word else self.value
        kinds = (str, (int, float))
        is_ordered = any(isinstance(found, kind) and isinstance(value, kind) for kind in kinds)
        if self.operator not in ("==", "!=") and not is_ordered:
            raise DataError(
                f"{place}: {self.column} is {shown(found)}; expected a value that {self.value!r} can be compared "
                f"with, for where={self.text!r}; correct the row, or the condition"
            )
        return OPERATORS[self.operator](found, value)


def read_where(text: str) -> Where:
    """Read a condition such as ``score >= 0.5``, whose value is JSON or else a text. Raises ConfigError."""
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"where has {text!r}; expected COLUMN, one of {' '.join(OPERATORS)}, and a value, as in 'score >= 0.5'"
        )
    try:
        value = json.loads(match["value"])
    except ValueError:
        value = match["value"]
    return Where(text, match["column"], match["operator"], match["value"], value)


def read_pattern(text: str | None, key: str) -> re.Pattern[str] | None:
    """Compile a regular expression; None gives None. Raises ConfigError for an invalid one."""
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise ConfigError(
            f"{key}={text!r} is no regular expression ({error}); expected one of Python's; correct it"
        ) from None


@dataclass(frozen=True)
class Conditions:
    """All conditions of a filter."""

    bounds: Sequence[Bound]
    where: Sequence[Where]
    match: re.Pattern[str] | None
    reject: re.Pattern[str] | None

    def broken(
        self,
        text: str,
        record: Mapping[str, Any],
        values: Mapping[str, float | None],
        place: str,
    ) -> tuple[str, dict[str, Any]] | None:
        """The first condition that a row breaks, with its details, or None for a row that is kept."""
        for bound in self.bounds:
            value = values[bound.name]
            if value is None and not bound.keeps_unknown:
                return f"no_{bound.name}", {}
            if value is not None and bound.broken_by(value):
                return bound.key, {bound.name: value}
        for where in self.where:
            if not where.holds(record, place):
                return "where", {"condition": where.text}
        if self.match is not None and self.match.search(text) is None:
            return "match", {}
        if self.reject is not None and (found := self.reject.search(text)):
            return "reject", {"found": found[0][:200]}
        return None


def _column(record: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or None. A dot leads into an object."""
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value
