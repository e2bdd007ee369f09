"""Write the file of a run: TOML, each key with the recipe's line from which it follows, and all other options."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from taut.config import toml
from taut.methods import command_of
from taut_tools.migrate.draft import Carried, Option
from taut_tools.migrate.frameworks import tables_of
from taut_tools.migrate.recipe import Recipe

WIDTH = 110
"""Maximum columns of a comment."""
SECRET = re.compile(r"(?i)token$|key$|secret$|password$")


def printable(option: Option) -> Any:
    """The option's value for JSON: ``***`` for a secret, text for a date or a number that JSON lacks."""
    is_private = option.outcome == "machine" or option.key.startswith("$")
    if is_private and SECRET.search(option.key):
        return "***"
    try:
        json.dumps(option.value, allow_nan=False)
    except (TypeError, ValueError):
        return str(option.value)
    return option.value


def one_line(text: Any) -> str:
    """Shorten a text to a comment of one line without control characters."""
    line = " ".join(str(text).split())
    line = line if line.isprintable() else json.dumps(line)[1:-1]
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."


def run_file(recipe: Recipe, carried: Carried, notes: Iterable[str] = ()) -> str:
    """Write the whole file; ``notes`` are further lines of its head."""
    # The head: origin, command, assumptions, and what taut lacks.
    title = tables_of(recipe.framework).title
    processes = carried.processes or 1
    command = f"{command_of(carried.method)} run.toml"
    start = f"torchrun --nproc-per-node {processes} -m {command}" if processes > 1 else command
    lines = [
        f"# {title} {recipe.version} ({recipe.method}), {recipe.place}",
        f"# {start}",
        *(f"# {one_line(note)}" for note in notes),
    ]
    lines += _comments("assumed", carried.assumed)
    lines += _comments("not read", recipe.unread)
    lacking = carried.having("lacking")
    lines += _comments("lacks", (option_line(one) for one in lacking if one.changes or one.refuses))
    quiet = (option_line(one) for one in lacking if not one.changes and not one.refuses)
    lines += _comments("lacks, with the same result", quiet)
    # Keys by table, each with its source; keys that are left open are comments.
    lines += ["", f'method = "{carried.method}"']
    tables: dict[str, list[str]] = {"": []}
    for key, value in carried.settings.items():
        table, _, name = key.partition(".")
        if not name:
            table, name = "", key
        source = one_line(carried.sources.get(key, ""))
        tables.setdefault(table, []).append(f"{name} = {toml(value)}  # {source}")
    for key, why in carried.unfilled.items():
        table, _, name = key.rpartition(".")
        tables.setdefault(table.partition(".")[0], []).append(
            f"# {name or key} = ?  # {one_line(why)}"
        )
    lines += tables.pop("")
    for table, entries in tables.items():
        lines += ["", f"[{table}]", *entries]
    # The options that do not change the run.
    lines += [""]
    lines += _comments("needless", by_reason(carried.having("needless")))
    lines += _comments("machine", by_reason(carried.having("machine")))
    return "\n".join(lines).rstrip() + "\n"


def option_line(option: Option) -> str:
    """A line for an option that taut lacks, with its value and the reason."""
    value = (
        "" if not option.place or option.value is None else f" = {one_line(printable(option))[:60]}"
    )
    return f"{option.place}{': ' if option.place else ''}{option.key}{value}: {option.why}"


def _comments(title: str, lines: Iterable[str]) -> list[str]:
    return [f"# {title}: {' '.join(line.split())}" for line in lines]


def by_reason(options: Iterable[Option]) -> list[str]:
    """A line ``KEY, KEY: reason`` for each reason."""
    names: dict[str, list[str]] = {}
    for option in options:
        names.setdefault(option.why, []).append(option.key)
    return [f"{', '.join(keys)}: {why}" for why, keys in names.items()]


def as_words(settings: Mapping[str, Any]) -> list[str]:
    """Write settings as words of a command."""
    return [f"{key}={word(value)}" for key, value in settings.items()]


def word(value: Any) -> str:
    """Write a value as TOML; a string has no quotes unless TOML would read it as another value."""
    if not isinstance(value, str):
        return toml(value)
    with suppress(tomllib.TOMLDecodeError):
        tomllib.loads(f"value = {value}")
        return toml(value)
    return value
