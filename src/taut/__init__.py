"""taut: post-training for Hugging Face models, with no padding and no prefix computed twice.

    import taut

    taut.check("run.toml").failures
    taut.sft("run.toml", steps=10)
    taut.sft(model="DIR", data={"train": "a.jsonl"}, out="runs/a", **{"optim.learning_rate": 1e-4})
    taut.resume("runs/a", steps=20)
    taut.generate(model="runs/a/model", prompts="b.jsonl", out="c.jsonl", **{"sampling.n": 4})

There is a function for each training method: ``taut.sft``, ``taut.dpo``, ``taut.grpo`` and the others that ``taut
--help`` lists. Each function but ``resume`` and ``runs`` takes its command's keys (``taut COMMAND --help``), nested
(``data={"train": ...}``) or dotted (``**{"data.train": ...}``), and a TOML file or a configuration to set them on.
The names below are the public surface. Importing taut loads neither torch nor transformers: what needs them is
imported on first use.
"""

from __future__ import annotations

import sys

if sys.platform == "win32":
    raise ImportError(
        "found Windows; expected Linux or macOS; install taut in WSL 2 (in PowerShell: wsl --install) or Docker"
    )

from functools import cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from taut.errors import (
    AttentionError,
    CheckFailed,
    ConfigError,
    DataError,
    DivergenceError,
    ModelError,
    NonFiniteError,
    OutputError,
    RenderError,
    TautError,
)
from taut.io.extras import require, requires_training
from taut.methods import METHODS, command_of

if TYPE_CHECKING:
    from taut.checks.examine import Examination
    from taut.commands.evaluate import Evaluated
    from taut.commands.generate import Generated
    from taut.commands.merge import Merged
    from taut.commands.runs import RunList
    from taut.commands.score import Scored
    from taut.commands.settings import Evaluate, Generate, Merge, Score, Teach, Verify
    from taut.commands.teach import Taught
    from taut.commands.verify import Finding
    from taut.methods.method import RunConfig as Run
    from taut.run.ending import Result

    Export: TypeAlias = object  # taut_tools.export.settings.Export: the core imports no tool

_T = TypeVar("_T")


class TrainFunction(Protocol):
    """The type of ``taut.sft`` and its like, one for each training method."""

    def __call__(self, run: Run | str | PathLike[str] | None = None, /, **keys: Any) -> Result: ...


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
    "check",
    "evaluate",
    "export",
    "generate",
    "merge",
    "resume",
    "runs",
    "score",
    "show",
    "teach",
    "verify",
]
__all__ += METHODS


@requires_training
def resume(out: str | PathLike[str], **keys: Any) -> Result:
    """Resume the run in ``out`` with its configuration, overridden by ``keys``."""
    from taut.commands import resume as resumed

    return resumed.resume(out, keys)


def runs(*directories: str | PathLike[str]) -> RunList:
    """The runs in some directories, newest first; by default in ``runs``, or else in the current directory."""
    from taut.commands import runs as command

    return command.runs(directories)


@requires_training
def show(run: Run | str | PathLike[str] | None = None, /, **keys: Any) -> None:
    """Print the resolved configuration and the first samples, their targets colored. Takes a run of any ``method``."""
    from taut.commands import show as command

    command.show(_configure_run(run, keys))


@requires_training
def check(
    run: Run | str | PathLike[str] | None = None, /, *, full: bool = False, **keys: Any
) -> Examination:
    """The findings of the checks that run before each training; ``full``: of all checks. Takes a run of any ``method``.

    Prints nothing, and raises nothing where a check fails: see ``failures``.
    """
    from taut.commands import check as command

    return command.check(_configure_run(run, keys), full=full)


@requires_training
def generate(config: Generate | str | PathLike[str] | None = None, /, **keys: Any) -> Generated:
    """Generate completions of a file of prompts, as JSONL."""
    from taut.commands import generate as command
    from taut.commands.settings import Generate

    return command.generate(_configure(Generate, config, keys))


@requires_training
def evaluate(config: Evaluate | str | PathLike[str] | None = None, /, **keys: Any) -> Evaluated:
    """Evaluate a model on questions with known answers."""
    from taut.commands import evaluate as command
    from taut.commands.settings import Evaluate

    return command.evaluate(_configure(Evaluate, config, keys))


@requires_training
def score(config: Score | str | PathLike[str] | None = None, /, **keys: Any) -> Scored:
    """Score a file of answers with a reward model; with accuracy and calibration where the rows have labels."""
    from taut.commands import score as command
    from taut.commands.settings import Score

    return command.score(_configure(Score, config, keys))


@requires_training
def verify(config: Verify | str | PathLike[str] | None = None, /, **keys: Any) -> list[Finding]:
    """Compare a model, or the server that serves it, with its contract: one finding per question."""
    from taut.commands import verify as command
    from taut.commands.settings import Verify

    return command.verify(_configure(Verify, config, keys))


@requires_training
def teach(config: Teach | str | PathLike[str] | None = None, /, **keys: Any) -> Taught:
    """Write a teacher's top logprobs of a data set to a file, for ``distill``."""
    from taut.commands import teach as command
    from taut.commands.settings import Teach

    return command.teach(_configure(Teach, config, keys))


@requires_training
def merge(config: Merge | str | PathLike[str] | None = None, /, **keys: Any) -> Merged:
    """Merge a base model and a LoRA adapter into one model directory."""
    from taut.commands import merge as command
    from taut.commands.settings import Merge

    return command.merge(_configure(Merge, config, keys))


@requires_training
def export(config: Export | str | PathLike[str] | None = None, /, **keys: Any) -> Path:
    """Export a model as one GGUF file; prints a summary and returns the file's path. ``config``: a TOML file, or the
    configuration of ``taut export``.
    """
    require("gguf", "taut.export")
    from taut.commands import registry
    from taut.config import home_path
    from taut.io.user_code import named

    command = registry.find("export")
    assert command is not None and command.config is not None
    chosen = _configure(named(command.config), config, keys)
    named(command.call)(chosen)
    return home_path(chosen.out)


@cache
def _train_function(name: str) -> TrainFunction:
    """``taut.NAME`` for a training method."""

    def train(run: Run | str | PathLike[str] | None = None, /, **keys: Any) -> Result:
        require("train", f"taut.{name}")
        from taut.commands import train
        from taut.errors import ConfigError
        from taut.methods.method import RunConfig

        if isinstance(run, RunConfig) and run.method != name:
            raise ConfigError(
                f"found a run of {run.command()} given to taut.{name}; expected one of {command_of(name)}; "
                f"call taut.{run.method}"
            )
        cls = type(run) if isinstance(run, RunConfig) else METHODS[name]  # ``taut.Run(...)`` is SFT
        return train.train(_configure(cls, run, keys))

    about = METHODS.entries[name].about
    train.__name__ = train.__qualname__ = name
    train.__doc__ = (
        f"{about[0].upper()}{about[1:]}: check, train, save. Keys: ``{command_of(name)} --help``."
    )
    return train


def _configure_run(run: Run | str | PathLike[str] | None, keys: dict[str, Any]) -> Run:
    """A run of any method, by its key ``method``."""
    from taut.methods.method import RunConfig, class_of

    if isinstance(run, RunConfig):
        return _configure(type(run), run, keys)
    named = [f"method={keys['method']}"] if "method" in keys else []
    return _configure(class_of(None if run is None else Path(run), named), run, keys)


def _configure(cls: type[_T], config: _T | str | PathLike[str] | None, keys: dict[str, Any]) -> _T:
    from taut.config import from_mapping, replace
    from taut.data.read.in_memory import as_paths

    keys = as_paths(cls, keys)
    if isinstance(config, cls):
        return replace(config, keys) if keys else config
    assert config is None or isinstance(config, str | PathLike), "a configuration or a TOML file"
    return from_mapping(cls, keys, None if config is None else Path(config))


if TYPE_CHECKING:

    def __getattr__(name: str) -> TrainFunction:
        """A type checker takes any other name for a training method: which there are is known at run time."""
else:

    def __getattr__(name: str) -> Any:
        if name == "Run":
            require("train", "taut.Run")
            from taut.methods.method import RunConfig

            return RunConfig
        if name == "Result":
            require("train", "taut.Result")
            from taut.run.ending import Result

            return Result
        if name in METHODS:
            return _train_function(name)
        raise AttributeError(f"module 'taut' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
