"""Additions of installed packages to taut, by entry points in their pyproject.toml.

    [project.entry-points."taut.commands"]
    count = "toy:COUNT"

The groups are taut.commands, taut.rewards, taut.tools, taut.environments, taut.sinks, taut.verify by the suffix of a
file, and taut.adapters by the extra of a library. A name is read without importing what it stands for; ``load`` imports
it. Imports nothing heavy.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from taut.errors import ConfigError
from taut.io.extras import require

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ADAPTERS = "taut.adapters"
"""Objects through which taut uses the library of an extra, by the name of the extra."""


@cache
def _added(group: str) -> dict[str, list[EntryPoint]]:
    """Entry points of a group by name. The installed packages are looked through once."""
    from importlib import metadata  # takes longer than most that a start imports

    found: dict[str, list[EntryPoint]] = {}
    for entry in metadata.entry_points(group=group):
        found.setdefault(entry.name, []).append(entry)
    return found


def names(group: str) -> tuple[str, ...]:
    """The names that packages add to a group, in alphabetical order."""
    return tuple(sorted(_added(group)))


def entry_of(group: str, name: str) -> EntryPoint:
    """Return the entry point of a name in a group. Raises ConfigError for a name that two packages add, or none."""
    entries = _added(group).get(name)
    if entries is None:
        raise ConfigError(
            f"{group}: no package adds {name!r}; expected taut to do so; install this version of taut again"
        )
    owners = sorted({owner_of(entry) for entry in entries})
    if len(owners) > 1:
        raise ConfigError(
            f"{group}: the packages {' and '.join(owners)} both add {name!r}; expected one; uninstall the other"
        )
    return entries[0]


def owner_of(entry: EntryPoint) -> str:
    """The package that adds it."""
    return entry.dist.name if entry.dist is not None else "?"


def load(group: str, name: str) -> Any:
    """The object that a name of a group stands for.

    Raises ConfigError for a name that two packages add, and for an object that cannot be imported.
    """
    entry = entry_of(group, name)
    owner = owner_of(entry)
    try:
        return entry.load()
    except Exception as error:
        raise ConfigError(
            f"{group}: {owner} adds {name!r} as {entry.value}, which cannot be imported ({type(error).__name__}: "
            f"{error}); expected a module with that name; update or uninstall {owner}"
        ) from error


def adapter(extra: str, needed_by: str) -> Any:
    """The object through which taut uses the library of an extra. ``needed_by``: the setting that names it.

    Raises ConfigError where the library is not installed.
    """
    require(extra, needed_by)
    return load(ADAPTERS, extra)
