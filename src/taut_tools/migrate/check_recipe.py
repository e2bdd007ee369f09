"""``taut check --recipe KIND:FILE``: find the known traps in another framework's recipe, and write it as a run of taut.

Needs neither torch nor transformers. Without transformers, facts that have to be read from a tokenizer are listed as
not decided.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from taut.config import configclass
from taut_tools.migrate import examine


@configclass
class RecipeConfig:
    """A recipe of another framework, and its number of processes."""

    recipe: str
    """KIND:FILE, with the kind one of trl, open-r1, swift, openrlhf, llamafactory, axolotl; KIND==VERSION:FILE for a
    release that is not the newest known; KIND.METHOD:FILE for a file that does not name its method. A Python script
    with a trainer of trl or transformers needs no kind."""
    processes: Annotated[int, Field(ge=1)] | None = None
    """Number of training processes, for a recipe that does not state it."""


@configclass
class CheckRecipe(RecipeConfig):
    """Examine a recipe of another framework."""

    json: bool = False
    """Print one JSON object (see docs/recipes.md) instead of the report."""


def run(config: CheckRecipe) -> int:
    """Print the report; the exit code is 1 if the recipe walks into a trap that makes the result wrong, or taut lacks a
    setting.
    """
    return examine.main(config.recipe, as_json=config.json, num_processes=config.processes)
