"""A model directory and an engine's settings -> an engine that is ready, with all that goes with it.

``ModelUse`` is the head of the configuration of every command that uses a finished model (generate, eval, chat,
verify). May import what is below rollout.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from taut.config import configclass
from taut.data.render import Renderer
from taut.data.stops import StopSet
from taut.rollout.engine import Engine
from taut.rollout.local import LocalConfig
from taut.rollout.server import ServerConfig


@configclass
class ModelUse:
    """Which model, and which engine runs it."""

    model: str
    """Directory (or hub name) of the model: weights for the local engine, tokenizer and template for both."""
    engine: Literal["local", "server"] = "local"
    """local: in this process. server: the endpoint at server.url, which must serve this model."""
    template: str | None = None
    """A file with a chat template to use in place of the tokenizer's own."""
    dtype: Literal["float64", "float32", "bfloat16"] | None = None
    """The local engine's dtype; by default bfloat16 on a GPU that has it, else float32."""
    device: str = "auto"
    """The local engine's device: auto, cpu, cuda or cuda:N."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    local: LocalConfig = LocalConfig()
    server: ServerConfig = ServerConfig()


@dataclass(frozen=True)
class Opened:
    """An engine and what its prompts are made with."""

    engine: Engine
    renderer: Renderer
    stops: StopSet
    context: int | None
    """Tokens prompt and completion may have together."""
    decisions: list[tuple[str, str, str]] = field(default_factory=list)
    """(name, value, reason) of what was settled for the user."""
