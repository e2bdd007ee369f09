"""Conditions on rows: bounds on what was measured of them, a pattern in their text, and their columns.

    min_tokens=16, max_loss=4            a bound on a measured value
    match="\\bSQL\\b"                      a regular expression that is found in the row's text (``reject``: is not)
    where=["score >= 0.5", "source != web", "meta.lang == en"]

A row that has no value where a bound asks for one (a reward that does not apply, or is an error) is removed with the
reason ``no_reward`` and so on: it is not known to be good, and the file of removed rows says why.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from taut.data.json_io import did_you_mean, shown
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
    """min_tokens, max_tokens, ..."""
    name: str
    """tokens, ..."""
    limit: float
    keeps_unknown: bool = False
    """Whether a row that has no such value keeps the bound."""

    def broken_by(self, value: float) -> bool:
        return value < self.limit if self.key.startswith("min_") else value > self.limit


@dataclass(frozen=True)
class Where:
    """A condition on a column."""

    text: str
    column: str
    operator: str
    value: Any

    def holds(self, record: Mapping[str, Any], place: str) -> bool:
        """Raises DataError where the row has no such column, or a value that cannot be compared."""
        found = _column(record, self.column)
        if found is None:
            raise DataError(
                f"{place}: the row has no column {self.column!r}, of where={self.text!r}; its columns are "
                f"{shown(record)}{did_you_mean(self.column, record)}"
            )
        value = (
            self.value
            if not isinstance(found, str) or isinstance(self.value, str)
            else self.text_value
        )
        kinds = (str, (int, float))
        is_ordered = any(isinstance(found, kind) and isinstance(value, kind) for kind in kinds)
        if self.operator not in ("==", "!=") and not is_ordered:
            raise DataError(
                f"{place}: {self.column} is {shown(found)}; expected a value that {self.value!r} can be compared "
                f"with, for where={self.text!r}; correct the row, or the condition"
            )
        return OPERATORS[self.operator](found, value)

    @property
    def text_value(self) -> str:
        """The value as it is written in the condition."""
        match = _CONDITION.fullmatch(self.text)
        assert match is not None
        return match["value"]


def read_where(text: str) -> Where:
    """A condition, as ``score >= 0.5``. The value is JSON, else a text. Raises ConfigError for anything else."""
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"where has {text!r}; expected COLUMN, one of {' '.join(OPERATORS)}, and a value, as in 'score >= 0.5'"
        )
    try:
        value = json.loads(match["value"])
    except ValueError:
        value = match["value"]
    return Where(text, match["column"], match["operator"], value)


def read_pattern(text: str | None, key: str) -> re.Pattern[str] | None:
    """A regular expression. Raises ConfigError for one that is none."""
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
        """The first condition that a row breaks, with what goes with it; None: it keeps all."""
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
    """The value of a column; a dot leads into an object. None: there is none."""
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value
