"""``examine("trl:recipe.yaml")``: which known traps a recipe of another framework walks into, and the same run in taut.

The recipe is named FRAMEWORK:FILE, FRAMEWORK==VERSION:FILE where the library is not the newest known, and
FRAMEWORK.METHOD:FILE where a file of settings does not tell which method it is for.

Imports the rest of ``compat``. The command line imports it.
"""

from __future__ import annotations

import difflib
import json
import re
import sys

from packaging.version import InvalidVersion, Version

from taut.config import home_path
from taut.errors import ConfigError
from taut.io.terminal import Terminal
from taut.migrate import open_r1, openrlhf, swift, trl
from taut.migrate.carry import carry
from taut.migrate.dialect import Dialect, read
from taut.migrate.facts import Facts
from taut.migrate.report import RecipeReport
from taut.migrate.traps import judge

DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (trl.DIALECT, open_r1.DIALECT, swift.DIALECT, openrlhf.DIALECT)
}
WIDTH = 100
"""Columns of a report that does not go to a terminal."""
SPEC = re.compile(
    r"(?P<framework>[\w-]+)(?:\.(?P<method>\w+))?(?:==(?P<version>[^:]+))?:(?P<file>.+)"
)


def examine(spec: str, num_processes: int | None = None) -> RecipeReport:
    """Read a recipe and judge it. Raises ConfigError where there is none to be read.

    ``num_processes``: how many processes it is started with, where the recipe does not say.
    """
    match = SPEC.fullmatch(spec)
    if match is None:
        raise ConfigError(f"recipe={spec}: expected FRAMEWORK:FILE, e.g. trl:recipe.yaml")
    dialect = DIALECTS.get(match["framework"])
    if dialect is None:
        near = difflib.get_close_matches(match["framework"], DIALECTS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}" if near else f"expected one of {', '.join(DIALECTS)}"
        raise ConfigError(f"recipe={spec}: unknown framework {match['framework']}; {hint}")
    if match["version"] is not None:
        _require_version(match["version"], spec)
    path = home_path(match["file"])
    recipe = read(dialect, path, match["method"], match["version"])
    facts = Facts(recipe, path.parent)
    carried = carry(recipe, facts, num_processes)
    return RecipeReport(recipe, str(path), tuple(judge(recipe, facts)), carried)


def main(spec: str, *, as_json: bool = False, num_processes: int | None = None) -> int:
    """Print the report. The exit code is 1 where the recipe walks into a trap that makes the result wrong, or has a
    setting that taut lacks.
    """
    report = examine(spec, num_processes)
    if as_json:
        sys.stdout.write(json.dumps(report.as_json(), allow_nan=False) + "\n")
    else:
        report.print(Terminal(width=None if sys.stdout.isatty() else WIDTH))
    return report.exit_code


def _require_version(text: str, spec: str) -> None:
    try:
        Version(text)
    except InvalidVersion:
        raise ConfigError(f"recipe={spec}: {text} is no version; expected e.g. 0.18.0") from None
