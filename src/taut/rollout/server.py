"""The engine behind an OpenAI-compatible endpoint."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from taut.config import configclass


@configclass
class ServerConfig:
    """An OpenAI-compatible endpoint that takes token ids (vLLM)."""

    name: str | None = None
    """The model's name there; by default the only one it serves."""
    key: str | None = None
    """Name of the environment variable that holds the API key; none is sent by default."""
    timeout: Annotated[float, Field(gt=0)] = 120.0
    """Seconds a request may take."""
    retries: Annotated[int, Field(ge=0)] = 5
    """How often a request that failed in transit, or that the server was too busy for, is sent again."""
    concurrency: Annotated[int, Field(ge=1)] = 32
    """Requests under way at a time."""
