"""What is told of a framework's options: the names they are read by, what holds where they are not set, and what
becomes of those that no key of taut carries. One file for each framework, data alone.

``names``      the framework's name of an option -> the one that ``convert.py`` reads
``defaults``   by method (``*``: all): what the framework does where the recipe is silent, by the name that is read
``needless``, ``machine``, ``lacking``   reasons -> options (see draft.py). An option that is in none of the three, and
               that convert.py does not read, is lacking.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Lacking(NamedTuple):
    """What taut has nothing for."""

    why: str
    off: tuple[Any, ...] = ()
    """Values that ask for nothing, in addition to empty and false ones."""
    changes: bool = True
    """What is learned is another model without it."""
    refuses: bool = False
    """There is no such run in taut."""


@dataclass(frozen=True)
class Tables:
    """The options of one framework."""

    title: str
    """As its authors write it."""
    methods: Mapping[str, str]
    """The framework's method -> that of taut; a sentence where taut has none."""
    names: Mapping[str, Mapping[str, str]]
    defaults: Mapping[str, Mapping[str, Any]]
    needless: Mapping[str, str]
    """Option -> the reason; so for the next two."""
    machine: Mapping[str, str]
    lacking: Mapping[str, Lacking]
    variables: tuple[str, ...] = ()
    """Patterns of environment variables that concern the machine."""
    variables_elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Variables that are settings taut has nothing for -> why."""
    none_is_unset: bool = False
    """A value that is null is as good as none."""

    def names_of(self, method: str) -> Mapping[str, str]:
        return {**self.names.get("*", {}), **self.names.get(method, {})}

    def defaults_of(self, method: str) -> Mapping[str, Any]:
        return {**self.defaults.get("*", {}), **self.defaults.get(method, {})}


def words(text: str) -> tuple[str, ...]:
    """The words of a text: a list of names that reads well."""
    return tuple(text.split())


def by_option(*reasons: Mapping[str, str]) -> dict[str, str]:
    """Tables of reason -> options -> one of option -> reason. Raises ValueError for an option with two."""
    table: dict[str, str] = {}
    for entries in reasons:
        for reason, names in entries.items():
            for name in names.split():
                if name in table:
                    raise ValueError(f"{name} has two outcomes: {table[name]}; {reason}")
                table[name] = reason
    return table


def lacking(
    why: str, options: str, changes: bool = True, refuses: bool = False, **off: Any
) -> dict[str, Lacking]:
    """An entry of ``Tables.lacking``. ``off``: option -> a value, or a tuple of values, that asks for nothing."""
    values = {name: value if isinstance(value, tuple) else (value,) for name, value in off.items()}
    return {
        name: Lacking(why, values.get(name, ()), changes, refuses)
        for name in (*options.split(), *(name for name in values if name not in options.split()))
    }
