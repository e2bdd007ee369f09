"""``taut import FRAMEWORK:FILE > run.toml``: another framework's recipe as the file of a run.

Each key has the recipe's line that says it in a comment; what is left out is listed with the reason. The exit code is 1
where something is left out that changes what is learned; the file is then written with ``--force`` alone. What is no
method of taut's is refused by name. Needs neither torch nor transformers; where torch is installed, the file is checked
by the classes of the configuration, and the file says which of the two it was.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from taut.commands.check_recipe import RecipeConfig
from taut.config import configclass, from_mapping
from taut.errors import ConfigError
from taut.io.console import tell
from taut.methods import METHODS
from taut.migrate.draft import Carried
from taut.migrate.examine import examine
from taut.migrate.run_file import option_line, run_file


@configclass
class ImportRecipe(RecipeConfig):
    """Write another framework's recipe as the file of a run."""

    force: bool = False
    """Write the file although something is left out that changes what is learned."""


FILLED = {"model": "MODEL", "rewards": "exact_match", "distill.teacher": "TEACHER"}
"""Stand-ins for required keys that are left to the user."""


def problem_of(carried: Carried) -> str | None:
    """What the configuration's classes find wrong with the settings; None: nothing. What is left to the user, and the
    packages that reports need, are not judged.
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


def run(config: ImportRecipe) -> int:
    """Print the file; 1 where something is left out that changes what is learned."""
    report = examine(config.recipe, config.processes)
    carried = report.carried
    if carried.refusals:
        for option in carried.refusals:
            tell(f"taut: {option_line(option)}")
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
        tell(f"taut: lacks {option_line(option)}")
    if problem is not None:
        tell(f"taut: {note}")
    if not is_exact and not config.force:
        tell("taut: no file is written: the result would be another; --force writes it")
    return 0 if is_exact else 1
