"""``taut import FRAMEWORK:FILE > run.toml``: write another framework's recipe as the file of a run.

A comment at each key has the recipe's line from which it follows; options that are left out are listed with the reason.
If one of these changes what is learned, the exit code is 1, and the file is written with ``--force`` only. A method
that taut does not have is refused by name. Needs neither torch nor transformers; with torch the configuration's classes
check the file, and the file says whether they did.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from taut.config import configclass, from_mapping, load
from taut.errors import ConfigError
from taut.io.console import print_line
from taut.methods import METHODS
from taut_tools.migrate.check_recipe import RecipeConfig
from taut_tools.migrate.draft import Carried
from taut_tools.migrate.examine import examine
from taut_tools.migrate.run_file import option_line, run_file


@configclass
class ImportRecipe(RecipeConfig):
    """Write another framework's recipe as the file of a run."""

    force: bool = False
    """Write the file even if an option is left out that changes what is learned."""


FILLED = {"model": "MODEL", "rewards": "exact_match", "distill.teacher": "TEACHER"}
"""Placeholders for required keys that are left to the user."""


def problem_of(carried: Carried) -> str | None:
    """The error of the configuration's classes about the settings, or None. Keys that are left to the user and packages
    that reports need are not judged.
    """
    settings = {
        key: value
        for key, value in carried.settings.items()
        if key not in ("log.wandb", "log.trackio", "log.tensorboard")
    }
    settings |= {key: FILLED[key] for key in carried.unfilled if key in FILLED}
    try:
        from_mapping(METHODS[carried.method], settings)
    except ConfigError as error:
        return str(error)
    return None


def main(path: Path | None, overrides: Sequence[str]) -> int:
    """``taut import``, where a YAML file is the recipe, and not a file of settings."""
    if path is not None and path.suffix != ".toml":
        path, overrides = None, [f"recipe={path}", *overrides]
    return run(load(ImportRecipe, path, overrides))


def run(config: ImportRecipe) -> int:
    """Print the file; the exit code is 1 if an option is left out that changes what is learned."""
    report = examine(config.recipe, config.processes)
    carried = report.carried
    if carried.refusals:
        for option in carried.refusals:
            print_line(f"taut: {option_line(option)}")
        return 1
    problem, note = None, "not checked by the configuration's classes: torch is not installed"
    if find_spec("torch") is not None:
        problem, note = problem_of(carried), "checked by the configuration's classes"
    if problem is not None:
        note = f"taut refuses it: {problem}"
    changing = [option for option in carried.having("lacking") if option.changes]
    is_exact = not changing and problem is None
    if is_exact or config.force:
        sys.stdout.write(run_file(report.recipe, carried, [note]))
    for option in changing:
        print_line(f"taut: lacks {option_line(option)}")
    if problem is not None:
        print_line(f"taut: {note}")
    if not is_exact and not config.force:
        print_line("taut: no file is written: the result would be another; --force writes it")
    return 0 if is_exact else 1
