"""The engine in this process."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from taut.config import configclass


@configclass
class LocalConfig:
    """The engine in this process."""

    sequences: Annotated[int, Field(ge=1)] = 64
    """Completions decoded at a time."""
    prefill_tokens: Annotated[int, Field(ge=1)] = 4096
    """Prompt tokens computed at a time; a longer prompt is computed alone."""
