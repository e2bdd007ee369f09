"""Every command, by the name that is typed; one that another is where a key is set as ``eval--tasks``."""

from __future__ import annotations

from taut.commands import registry

FOUND = {name: registry.find(name) for name in registry.names()} | {
    f"{name}--{key}": registry.find_with(name, [key]) for name, key in registry.variants()
}
ALL = {name: command for name, command in FOUND.items() if command is not None}
