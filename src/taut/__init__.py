"""taut: post-training for Hugging Face models, with no padding and no prefix computed twice.

    import taut

    taut.check("run.toml").failures
    taut.sft("run.toml", steps=10)
    taut.sft(model="DIR", data="a.jsonl", out="runs/a", optim={"learning_rate": 1e-4})
    taut.resume("runs/a", steps=20)
    taut.generate("runs/a/model", prompts="b.jsonl", out="c.jsonl", sampling={"n": 4})

There is a function for each training method: ``taut.sft``, ``taut.dpo``, ``taut.grpo`` and the others that ``taut
--help`` lists. Each function but ``resume`` and ``runs`` takes its command's keys (``taut COMMAND --help``), nested
(``data={"train": ...}``) or dotted (``**{"data.train": ...}``), and a TOML file or a configuration to set them on.
docs/python.md says what a key may hold.

The names in ``__all__`` are the public surface; their types are in ``__init__.pyi``, which is generated from the
configuration. Importing taut loads neither torch nor transformers: what needs them is imported on first use.
"""

from __future__ import annotations

import sys

if sys.platform == "win32":
    raise ImportError(
        "found Windows; expected Linux or macOS; install taut in WSL 2 (in PowerShell: wsl --install) or Docker"
    )

from importlib import import_module
from typing import Any

from taut import errors
from taut.methods import METHODS

__version__ = "0.1.0"

__all__ = [
    "AttentionError",
    "CheckFailed",
    "ConfigError",
    "DataError",
    "DivergenceError",
    "ModelError",
    "NonFiniteError",
    "OutputError",
    "RenderError",
    "Result",
    "Run",
    "TautError",
    "__version__",
    "chat",
    "check",
    "data",
    "evaluate",
    "export",
    "generate",
    "merge",
    "plan",
    "push",
    "resume",
    "runs",
    "score",
    "show",
    "teach",
    "verify",
]
__all__ += METHODS

_CLASSES = {"Result": "taut.run.ending", "Run": "taut.methods.method"}
_ROOMS = ("data", "plan")
"""Public names that are rooms: ``taut.data.stats(...)``, and ``taut.plan(...)``, which is a room that can be called."""


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"taut.{name}")
    if name in __all__ and hasattr(errors, name):
        return getattr(errors, name)
    if name in _CLASSES:
        from taut.io.extras import require

        require("train", f"taut.{name}")
        return getattr(import_module(_CLASSES[name]), {"Run": "RunConfig"}.get(name, name))
    if name in __all__ or name in METHODS:  # a registered one too
        return import_module("taut.commands.functions").find(name)
    raise AttributeError(f"module 'taut' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
