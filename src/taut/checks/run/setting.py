"""One setting: its key, what was asked, and what is found on the run as it was built."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """In force where what is found is what was asked, word for word."""

    key: str
    asked: str
    found: str

    @property
    def is_in_force(self) -> bool:
        return self.asked == self.found

    def __str__(self) -> str:
        return f"{self.key}: asked {self.asked}, found {self.found}"


def listed(values: Iterable[Any]) -> str:
    """Different values, in words: one, where all are equal."""
    return " and ".join(sorted({_written(value) for value in values})) or "nothing"


def _written(value: Any) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)
