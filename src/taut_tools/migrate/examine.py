"""``examine("trl:recipe.yaml")``: find the traps in a recipe of another framework, and convert it to a run of taut.

A recipe is given as FRAMEWORK:FILE; as FRAMEWORK==VERSION:FILE for a release that is not the newest known; as
FRAMEWORK.METHOD:FILE for a settings file that fits several methods; as FILE.py for a Python script of trl. The report
is text in 100 columns, or JSON with a named schema (docs/recipes.md).
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
import sys
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from packaging.version import InvalidVersion, Version
from rich.console import Console
from rich.table import Table
from rich.text import Text

from taut.config import home_path
from taut.errors import ConfigError
from taut.io.terminal import Terminal
from taut.methods import command_of
from taut_tools.migrate.convert import convert
from taut_tools.migrate.dialects import DIALECTS, dialect_of, kinds_of, read_recipe
from taut_tools.migrate.draft import Carried
from taut_tools.migrate.facts import Facts
from taut_tools.migrate.frameworks import words
from taut_tools.migrate.recipe import Recipe
from taut_tools.migrate.run_file import as_words, by_reason, option_line, printable
from taut_tools.migrate.traps import Judged, State, judge

SPEC = re.compile(
    r"(?P<framework>[\w-]+)(?:\.(?P<method>\w+))?(?:==(?P<version>[^:]+))?:(?P<file>.+)"
)
SCHEMA = "taut.recipe/3"
"""Schema of the report. Its number rises when a field changes its meaning or is removed; see docs/recipes.md."""
RECIPE_FIELDS = words("framework library version version_reason method method_reason model data")
TRAP_FIELDS = words(
    "id severity what why fix taut versions versions_note classes threads seen source"
)
"""Fields of a recipe and of a trap that the JSON report has."""
STYLES = {"wrong": "bold red", "late": "yellow", "slow": "cyan"}
WIDTH = 100
"""Columns of a report that does not go to a terminal."""
LABEL_WIDTH = 9
COMMAND_WIDTH = 88
MAX_LINES = 8
"""Maximum lines of a list that are printed; JSON has all."""


def main(spec: str, *, as_json: bool = False, num_processes: int | None = None) -> int:
    """Print the report. The exit code is 1 if the recipe walks into a trap that makes the result wrong, or taut lacks a
    setting that changes the result.
    """
    report = examine(spec, num_processes)
    if as_json:
        sys.stdout.write(json.dumps(report.as_json(), allow_nan=False) + "\n")
    else:
        report.print(Terminal(width=None if sys.stdout.isatty() else WIDTH))
    return report.exit_code


def examine(spec: str, num_processes: int | None = None) -> RecipeReport:
    """Read a recipe and judge it; ``num_processes`` is for a recipe that does not state its number of processes.
    Raises ConfigError where there is no recipe.
    """
    match = SPEC.fullmatch(spec) or SPEC.fullmatch(f"trl:{spec}" if spec.endswith(".py") else "")
    if match is None:
        kinds = kinds_of(home_path(spec)) if home_path(spec).is_file() else []
        meant = " or ".join(f"{kind}:{spec}" for kind in kinds or ["FRAMEWORK"])
        raise ConfigError(
            f"recipe={spec}: the framework is not named; expected FRAMEWORK:FILE, e.g. trl:recipe.yaml; write {meant}"
        )
    if match["framework"] not in DIALECTS:
        near = difflib.get_close_matches(match["framework"], DIALECTS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}" if near else f"expected one of {', '.join(DIALECTS)}"
        raise ConfigError(f"recipe={spec}: unknown framework {match['framework']}; {hint}")
    if match["version"] is not None:
        try:
            Version(match["version"])
        except InvalidVersion:
            raise ConfigError(
                f"recipe={spec}: {match['version']} is no version; expected e.g. 0.18.0"
            ) from None
    path = home_path(match["file"])
    try:
        dialect = dialect_of(match["framework"], path)
        recipe = read_recipe(dialect, path, match["method"], match["version"])
        facts = Facts(recipe, path.parent)
        carried = convert(recipe, facts, num_processes)
        return RecipeReport(recipe, str(path), tuple(judge(recipe, facts)), carried)
    except RecursionError:
        raise ConfigError(
            f"{path} is nested too deeply; expected a recipe; write it flat"
        ) from None


@dataclass(frozen=True)
class RecipeReport:
    """A recipe, the verdict on every trap of its framework and method, and the run in taut."""

    recipe: Recipe
    path: str
    judged: tuple[Judged, ...]
    carried: Carried

    def having(self, state: State) -> list[Judged]:
        """Traps with a verdict: ``walks_in``, ``clear`` or ``undecided``."""
        return [judged for judged in self.judged if judged.state == state]

    @property
    def exit_code(self) -> int:
        """1 if the recipe walks into a trap that makes the result wrong, or taut lacks a setting that changes it."""
        walks_in = any(judged.trap.severity == "wrong" for judged in self.having("walks_in"))
        return int(walks_in or not self.carried.is_exact)

    @property
    def command(self) -> str | None:
        """The command ``taut METHOD key=value ...``, or None if taut has no such run."""
        if self.carried.refusals:
            return None
        return " ".join(
            [command_of(self.carried.method), *map(shlex.quote, as_words(self.carried.settings))]
        )

    def print(self, console: Console) -> None:
        """Print the report as text."""
        # The recipe, and each trap that it walks into.
        recipe = self.recipe
        console.print(
            Text.assemble(
                (self.path, "bold"),
                f"  {recipe.framework} {recipe.method} ({recipe.method_reason})",
            )
        )
        console.print(Text(f"{recipe.library} {recipe.version}: {recipe.version_reason}", "dim"))
        for trap, _, because in self.having("walks_in"):
            style = STYLES[trap.severity]
            table = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
            table.add_column(width=LABEL_WIDTH, overflow="fold")
            table.add_column(overflow="fold")
            table.add_row()
            table.add_row(Text(trap.severity, style), Text(trap.what, style))
            for place in because:
                table.add_row("", Text(place, "italic"))
            classes = [f"class {name}" if isinstance(name, int) else name for name in trap.classes]
            rows = {
                "why": " ".join(trap.why.split()),
                "fix": trap.fix,
                "taut": trap.taut,
                "releases": trap.affected,
                "known as": f"{trap.id}: {', '.join([*classes, *trap.threads])}",
            }
            for name, text in rows.items():
                table.add_row(Text(name, "dim"), Text(text, "bold" if name == "fix" else ""))
            console.print(table)
        # Lists: undecided traps by reason, unknown keys, words that are not read, and the run in taut.
        undecided: dict[str, list[str]] = {}
        for judged in self.having("undecided"):
            undecided.setdefault("; ".join(judged.because), []).append(judged.trap.id)
        undecided_lines = [f"{why}: {', '.join(ids)}" for why, ids in undecided.items()]
        _print_list(console, "Not decided:", undecided_lines)
        unknown_lines = [
            f"{unknown.place}: {unknown.key} is no option of {recipe.options_of} for {recipe.method}"
            + (f"; did you mean {unknown.nearest}?" if unknown.nearest else "")
            for unknown in recipe.unknown
        ]
        _print_list(console, "Unknown keys:", unknown_lines)
        _print_list(console, "Not read:", list(recipe.unread))
        _print_carried(console, self)
        counts = (
            f"{len(self.having('walks_in'))} walked into, {len(self.having('clear'))} clear, "
            f"{len(self.having('undecided'))} not decided"
        )
        style = STYLES["wrong"] if self.exit_code else "green"
        console.print(Text(f"\n{len(self.judged)} known traps: {counts}", style))

    def as_json(self) -> dict[str, Any]:
        """The whole report, for programs."""
        recipe, carried = self.recipe, self.carried
        return {
            "schema": SCHEMA,
            "taut": version("taut"),
            "file": self.path,
            **{name: getattr(recipe, name) for name in RECIPE_FIELDS},
            "outcome": "failed" if self.exit_code else "passed",
            "traps": [
                {name: getattr(trap, name) for name in TRAP_FIELDS}
                | {"state": state, "because": list(because)}
                for trap, state, because in self.judged
            ],
            "unknown_keys": [
                {name: getattr(unknown, name) for name in ("key", "place", "nearest")}
                for unknown in recipe.unknown
            ],
            "unread": list(recipe.unread),
            "carried": {
                "method": carried.method,
                "command": self.command,
                "settings": dict(carried.settings),
                "unfilled": dict(carried.unfilled),
                "assumed": list(carried.assumed),
                "options": [
                    {
                        **{name: getattr(option, name) for name in ("key", "outcome", "why")},
                        "place": option.place or None,
                        "value": printable(option),
                        "keys": list(option.keys),
                        "changes_result": option.changes or option.refuses,
                    }
                    for option in carried.options
                ],
            },
        }


def _print_list(console: Console, title: str, lines: list[str], max_lines: int = MAX_LINES) -> None:
    """Print a title and its lines, if there are any."""
    if not lines:
        return
    console.print(Text(f"\n{title}", "bold"))
    table = Table.grid(padding=(0, 1, 0, 2), pad_edge=True)
    table.add_column(overflow="fold")
    for line in lines[:max_lines]:
        table.add_row(Text(line))
    if len(lines) > max_lines:
        table.add_row(Text(f"and {len(lines) - max_lines} more (--json)", "dim"))
    console.print(table)


def _print_carried(console: Console, report: RecipeReport) -> None:
    """Print the command of taut, every setting that taut lacks, and the other options by reason."""
    carried = report.carried
    lacking = sorted(
        carried.having("lacking"), key=lambda option: (not option.refuses, not option.changes)
    )
    lacking_lines = [option_line(option) for option in lacking]
    if report.command is None:
        console.print(Text("\nIn taut: no command", "bold"))
        _print_list(console, "Not in taut:", lacking_lines, len(lacking))
        return
    command_lines = [command_of(carried.method)]  # broken between words, never within quotes
    for word in map(shlex.quote, as_words(carried.settings)):
        if len(command_lines[-1]) + len(word) < COMMAND_WIDTH:
            command_lines[-1] += f" {word}"
        else:
            command_lines.append(word)
    command = " \\\n      ".join(command_lines)
    console.print(Text("\nIn taut:", "bold"))
    console.print(Text(f"  {command}"), soft_wrap=True)
    console.print(
        Text("  taut import writes it as a file, with the recipe's line at each key", "dim")
    )
    words = [f"{key}: {why}" for key, why in carried.unfilled.items()]
    _print_list(console, "To be filled in:", words, len(words))
    _print_list(console, "Lacking:", lacking_lines, len(lacking))
    _print_list(console, "Assumed:", list(carried.assumed), len(carried.assumed))
    rest = [*carried.having("needless"), *carried.having("machine")]
    _print_list(console, "Left aside:", by_reason(rest))
