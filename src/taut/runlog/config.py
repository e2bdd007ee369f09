"""What is reported of a run, and where to."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

from pydantic import Field

from taut.config import configclass
from taut.errors import ConfigError, install_extra


@configclass
class LogConfig:
    """Where a run's events go besides ``events.jsonl``, which is always written."""

    console: bool = True
    """Report on the terminal: the decisions taken, progress, warnings, a summary."""
    every: Annotated[int, Field(ge=1)] = 1
    """Steps between two lines of progress where the output is no terminal."""
    tensorboard: bool = False
    """Write TensorBoard scalars to out/tensorboard."""
    wandb: str | None = None
    """Weights & Biases project to report to; needs the extra wandb."""

    def __post_init__(self) -> None:
        if self.wandb is not None and find_spec("wandb") is None:
            raise ConfigError(
                f"found log.wandb={self.wandb}, but the package wandb is not installed; "
                f"expected it beside taut; {install_extra('wandb')}; or leave log.wandb out"
            )
