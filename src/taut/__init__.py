"""taut: post-training for Hugging Face models, with no padding and no prefix computed twice.

    import taut

    taut.sft("run.toml", steps=10)
    taut.sft(model="DIR", data={"train": "a.jsonl"}, out="runs/a", **{"optim.learning_rate": 1e-4})

The names below are the public surface. Importing taut loads neither torch nor transformers: what needs them is
imported when it is first asked for.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taut.errors import (
    AttentionError,
    CheckFailed,
    ConfigError,
    DataError,
    ModelError,
    NonFiniteError,
    OutputError,
    RenderError,
    TautError,
)

if TYPE_CHECKING:
    from taut.api import Result
    from taut.run import Run

__version__ = "0.1.0"

__all__ = [
    "AttentionError",
    "CheckFailed",
    "ConfigError",
    "DataError",
    "ModelError",
    "NonFiniteError",
    "OutputError",
    "RenderError",
    "Result",
    "Run",
    "TautError",
    "__version__",
    "sft",
    "show",
]


def sft(run: Run | str | PathLike[str] | None = None, /, **keys: Any) -> Result:
    """Supervised fine-tuning: check, train, save. ``run`` is a Run or a TOML file; ``keys`` are set on top.

    Keys are those of ``taut sft --help``, nested (``data={"train": ...}``) or dotted
    (``**{"data.train": ...}``).
    """
    from taut import api

    return api.sft(_configure(run, keys))


def show(run: Run | str | PathLike[str] | None = None, /, **keys: Any) -> None:
    """Print the resolved configuration and the first samples, their targets coloured. Takes what ``sft`` takes."""
    from taut import api

    api.show(_configure(run, keys))


def _configure(run: Run | str | PathLike[str] | None, keys: dict[str, Any]) -> Run:
    from taut.config import from_mapping, replace
    from taut.run import Run

    if isinstance(run, Run):
        return replace(run, keys) if keys else run
    return from_mapping(Run, keys, None if run is None else Path(run))


def __getattr__(name: str) -> Any:
    if name == "Run":
        from taut.run import Run

        return Run
    if name == "Result":
        from taut.api import Result

        return Result
    raise AttributeError(f"module 'taut' has no attribute {name!r}")
