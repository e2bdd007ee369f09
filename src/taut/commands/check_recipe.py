"""``taut check --recipe KIND:FILE``: which known traps another framework's recipe walks into, and the run in taut.

Needs neither torch nor transformers; where transformers is not installed, what has to be read from a tokenizer is
listed as not decided.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from taut.config import configclass
from taut.migrate import examine


@configclass
class RecipeConfig:
    """Which recipe of another framework is read, and what it leaves open."""

    recipe: str
    """KIND:FILE, with the kind one of trl, open-r1, swift, openrlhf, llamafactory, axolotl; KIND==VERSION:FILE where
    the library is not the newest known; KIND.METHOD:FILE where the file does not say its method."""
    processes: Annotated[int, Field(ge=1)] | None = None
    """Number of training processes that the recipe is started with, where it does not say so."""


@configclass
class CheckRecipe(RecipeConfig):
    """Examine a recipe of another framework."""

    json: bool = False
    """Print one JSON object (see docs/recipes.md) instead of the report."""


def run(config: CheckRecipe) -> int:
    """Print the report; 1 where the recipe walks into a trap that makes the result wrong, or taut lacks a setting."""
    return examine.main(config.recipe, as_json=config.json, num_processes=config.processes)
