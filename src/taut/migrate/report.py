"""What is known of a recipe, for people in 100 columns, and for programs as JSON with a named schema.

Says nothing that the judgement does not hold. Imports ``recipe.py``, ``traps.py`` and ``carry.py``; ``examine.py``
imports it.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from taut.migrate.carry import Carried, Option
from taut.migrate.recipe import Recipe
from taut.migrate.traps import Judged, State

SCHEMA = "taut.recipe/2"
"""Raised whenever a field changes its meaning or goes; docs/recipes.md says what there is."""
SECRET = re.compile(r"(?i)token$|key$|secret$")
STYLES = {"wrong": "bold red", "late": "yellow", "slow": "cyan"}
LABEL = 9
"""Columns of the words on the left."""
COMMAND = 88
"""Columns of a line of the command."""
SHOWN = 8
"""How many lines of a list are printed; JSON has all."""


@dataclass(frozen=True)
class RecipeReport:
    """A recipe and every trap of its framework and method, judged."""

    recipe: Recipe
    path: str
    judged: tuple[Judged, ...]
    carried: Carried | None

    def having(self, state: State) -> list[Judged]:
        """The traps that it walks into, that are clear, or that could not be decided."""
        return [one for one in self.judged if one.state == state]

    @property
    def exit_code(self) -> int:
        """1 where it walks into a trap that makes the result wrong, or has a setting that taut lacks."""
        walks_in = any(one.trap.severity == "wrong" for one in self.having("walks_in"))
        return int(walks_in or (self.carried is not None and bool(self.carried.having("lacking"))))

    def print(self, console: Console) -> None:
        """The report for people."""
        recipe = self.recipe
        console.print(
            Text.assemble(
                (self.path, "bold"),
                f"  {recipe.framework} {recipe.method} ({recipe.method_reason})",
            )
        )
        console.print(Text(f"{recipe.library} {recipe.version}: {recipe.version_reason}", "dim"))
        for one in self.having("walks_in"):
            console.print(_trap(one))
        _list(console, "Not decided:", _undecided(self.having("undecided")))
        _list(console, "Unknown keys:", [_unknown(self, at) for at in range(len(recipe.unknown))])
        _list(console, "Not read:", list(recipe.unread))
        _carried(console, recipe, self.carried)
        counts = [
            f"{len(self.having('walks_in'))} walked into",
            f"{len(self.having('clear'))} clear",
        ]
        counts.append(f"{len(self.having('undecided'))} not decided")
        style = STYLES["wrong"] if self.exit_code else "green"
        console.print(Text(f"\n{len(self.judged)} known traps: {', '.join(counts)}", style))

    def as_json(self) -> dict[str, Any]:
        """Everything, for programs."""
        recipe = self.recipe
        return {
            "schema": SCHEMA,
            "taut": version("taut"),
            "file": self.path,
            "framework": recipe.framework,
            "library": recipe.library,
            "version": recipe.version,
            "version_reason": recipe.version_reason,
            "method": recipe.method,
            "method_reason": recipe.method_reason,
            "model": recipe.model,
            "data": recipe.data,
            "outcome": "failed" if self.exit_code else "passed",
            "traps": [_as_json(one) for one in self.judged],
            "unknown_keys": [
                {"key": one.key, "place": one.place, "nearest": one.nearest}
                for one in recipe.unknown
            ],
            "unread": list(recipe.unread),
            "carried": None if self.carried is None else _carried_as_json(self.carried),
        }


def _carried_as_json(carried: Carried) -> dict[str, Any]:
    return {
        "command": carried.command,
        "settings": dict(carried.settings),
        "unfilled": dict(carried.unfilled),
        "assumed": list(carried.assumed),
        "options": [
            {
                "key": option.key,
                "place": option.place or None,
                "value": _json_value(option),
                "outcome": option.outcome,
                "why": option.why,
                "keys": list(option.keys),
            }
            for option in carried.options
        ],
    }


def _json_value(option: Option) -> Any:
    """The option's value, unless it is a secret; a date, or a number that JSON has none for, as text."""
    if option.outcome == "machine" and SECRET.search(option.key):
        return "***"
    try:
        json.dumps(option.value, allow_nan=False)
    except (TypeError, ValueError):
        return str(option.value)
    return option.value


def _as_json(one: Judged) -> dict[str, Any]:
    trap = one.trap
    return {
        "id": trap.id,
        "state": one.state,
        "severity": trap.severity,
        "because": list(one.because),
        "what": trap.what,
        "why": trap.why,
        "fix": trap.fix,
        "taut": trap.taut,
        "versions": trap.versions,
        "versions_note": trap.versions_note,
        "classes": list(trap.classes),
        "threads": list(trap.threads),
        "seen": list(trap.seen),
        "source": trap.source,
    }


def _grid() -> Table:
    table = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(width=LABEL, overflow="fold")
    table.add_column(overflow="fold")
    return table


def _trap(one: Judged) -> Table:
    """A trap that the recipe walks into: what, why, where, which releases, what to do."""
    trap, table = one.trap, _grid()
    style = STYLES[trap.severity]
    table.add_row()
    table.add_row(Text(trap.severity, style), Text(trap.what, style))
    for place in one.because:
        table.add_row("", Text(place, "italic"))
    known = ", ".join([*(_row(name) for name in trap.classes), *trap.threads])
    rows = {
        "why": " ".join(trap.why.split()),
        "fix": trap.fix,
        "taut": trap.taut,
        "releases": trap.affected,
        "known as": f"{trap.id}: {known}",
    }
    for name, text in rows.items():
        table.add_row(Text(name, "dim"), Text(text, "bold" if name == "fix" else ""))
    return table


def _row(name: str | int) -> str:
    """A row of docs/failures.md."""
    return name if isinstance(name, str) else f"class {name}"


def _undecided(judged: list[Judged]) -> list[str]:
    """A line for each reason, with the traps that it leaves open."""
    reasons: dict[str, list[str]] = {}
    for one in judged:
        reasons.setdefault("; ".join(one.because), []).append(one.trap.id)
    return [f"{reason}: {', '.join(ids)}" for reason, ids in reasons.items()]


def _unknown(report: RecipeReport, at: int) -> str:
    key = report.recipe.unknown[at]
    hint = f"; did you mean {key.nearest}?" if key.nearest else ""
    return f"{key.place}: {key.key} is no option of {report.recipe.options_of} for {report.recipe.method}{hint}"


def _list(console: Console, title: str, lines: list[str], shown: int = SHOWN) -> None:
    """A title and its lines, if there are any."""
    if not lines:
        return
    console.print(Text(f"\n{title}", "bold"))
    table = Table.grid(padding=(0, 1, 0, 2), pad_edge=True)
    table.add_column(overflow="fold")
    more = len(lines) - shown
    for line in lines[:shown]:
        table.add_row(Text(line))
    if more > 0:
        table.add_row(Text(f"and {more} more (--json)", "dim"))
    console.print(table)


def _carried(console: Console, recipe: Recipe, carried: Carried | None) -> None:
    """The command of taut, to be copied; every setting that it lacks; the others in one line for each reason."""
    if carried is None:
        is_sft = recipe.method == "sft"
        why = "the recipe names no model" if is_sft else "only recipes for SFT are written as one"
        console.print(Text(f"\nIn taut: no command; {why}", "bold"))
        return
    lacking = sorted(carried.having("lacking"), key=lambda option: not option.refuses)
    if carried.command is None:
        console.print(Text("\nIn taut: no command", "bold"))
        _list(console, "Not in taut:", [option.line for option in lacking], len(lacking))
        return
    console.print(Text("\nIn taut:", "bold"))
    console.print(Text(f"  {_wrapped(carried)}"), soft_wrap=True)
    words = [f"{word}: a value for {key}" for key, word in carried.unfilled.items()]
    _list(console, "To be filled in:", words, len(words))
    _list(console, "Lacking:", [option.line for option in lacking], len(lacking))
    _list(console, "Assumed:", list(carried.assumed), len(carried.assumed))
    _list(
        console,
        "Left aside:",
        _left_aside([*carried.having("needless"), *carried.having("machine")]),
    )


def _wrapped(carried: Carried) -> str:
    """The command in lines that a shell joins: broken between words, never within quotes."""
    lines = ["taut sft"]
    for word in map(shlex.quote, carried.words):
        if len(lines[-1]) + len(word) < COMMAND:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return " \\\n      ".join(lines)


def _left_aside(options: list[Option]) -> list[str]:
    """A line for each reason, with the options that it holds for."""
    reasons: dict[str, list[str]] = {}
    for option in options:
        reasons.setdefault(option.why, []).append(option.key)
    return [f"{', '.join(keys)}: {why}" for why, keys in reasons.items()]
