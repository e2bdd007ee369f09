"""Keys of ``taut rollouts`` and ``taut show --step``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from taut.config import configclass


@configclass
class Rollouts:
    """Print the rollouts of a step."""

    out: str
    """Directory of the run."""
    step: Annotated[int, Field(ge=1)] | None = None
    """The first step that trained on them. Defaults to the newest."""
    prompt: str | None = None
    """Only the prompt with this id."""
    sort: Literal["index", "reward", "length"] = "index"
    """The order of the answers to a prompt: as sampled, best first, or longest first."""
    groups: Annotated[int, Field(ge=1)] = 4
    """Number of prompts to print."""
    json: bool = False
    """Print the rows as JSON lines, with their tokens and logprobs, in place of a report."""


@configclass
class ShowStep:
    """Print the samples of a step."""

    out: str
    """Directory of the run."""
    step: Annotated[int, Field(ge=1)]
    """The step."""
    samples: Annotated[int, Field(ge=0)] = 4
    """Number of recorded samples whose tokens are printed."""
