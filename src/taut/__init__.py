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
imported when it is first asked for.
"""

from __future__ import annotations

from functools import cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

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
from taut.methods import METHODS, command_of

if TYPE_CHECKING:
    from taut.checks.examine import Examination
    from taut.commands.evaluate import Evaluate, Evaluated
    from taut.commands.export import Export
    from taut.commands.generate import Generate, Generated
    from taut.commands.merge import Merge, Merged
    from taut.commands.runs import RunState
    from taut.commands.score import Score, Scored
    from taut.commands.teach import Taught, Teach
    from taut.commands.train import Result
    from taut.commands.verify import Finding, Verify
    from taut.methods.method import RunConfig as Run

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


def resume(out: str | PathLike[str], **keys: Any) -> Result:
    """Go on with the run in ``out``, with its own configuration and ``keys`` set on top."""
    from taut.commands import resume as resumed

    return resumed.resume(out, keys)


def runs(*directories: str | PathLike[str]) -> list[RunState]:
    """The runs in some directories, newest first; without one in ``runs``, or else the current directory."""
    from taut.commands import runs as command

    return command.runs(directories)


def show(run: Run | str | PathLike[str] | None = None, /, **keys: Any) -> None:
    """Print the resolved configuration and the first samples, their targets coloured. Takes a run of any ``method``."""
    from taut.commands import show as command

    command.show(_configure_run(run, keys))


def check(
    run: Run | str | PathLike[str] | None = None, /, *, full: bool = False, **keys: Any
) -> Examination:
    """What is asked before each training, and what was found; ``full``: all there is to ask. Takes runs of any method.

    Prints nothing, and raises nothing where a check fails: see ``failures``.
    """
    from taut.commands import check as command

    return command.check(_configure_run(run, keys), full=full)


def generate(config: Generate | str | PathLike[str] | None = None, /, **keys: Any) -> Generated:
    """Completions of a file of prompts, written as JSONL."""
    from taut.commands import generate as command

    return command.generate(_configure(command.Generate, config, keys))


def evaluate(config: Evaluate | str | PathLike[str] | None = None, /, **keys: Any) -> Evaluated:
    """A model's answers to questions with known answers, judged."""
    from taut.commands import evaluate as command

    return command.evaluate(_configure(command.Evaluate, config, keys))


def score(config: Score | str | PathLike[str] | None = None, /, **keys: Any) -> Scored:
    """A reward model's numbers for a file of answers, with accuracy and calibration where they are judged."""
    from taut.commands import score as command

    return command.score(_configure(command.Score, config, keys))


def verify(config: Verify | str | PathLike[str] | None = None, /, **keys: Any) -> list[Finding]:
    """Whether a model, or the server that serves it, does what its contract says: one finding per question."""
    from taut.commands import verify as command

    return command.verify(_configure(command.Verify, config, keys))


def teach(config: Teach | str | PathLike[str] | None = None, /, **keys: Any) -> Taught:
    """A file of what a teacher says of a data set, for ``distill``."""
    from taut.commands import teach as command

    return command.teach(_configure(command.Teach, config, keys))


def merge(config: Merge | str | PathLike[str] | None = None, /, **keys: Any) -> Merged:
    """One model directory of a base model and a LoRA adapter."""
    from taut.commands import merge as command

    return command.merge(_configure(command.Merge, config, keys))


def export(config: Export | str | PathLike[str] | None = None, /, **keys: Any) -> Path:
    """A model as one GGUF file; prints what was written, and gives its place."""
    from taut.commands import export as command
    from taut.config import home_path

    chosen = _configure(command.Export, config, keys)
    command.run(chosen)
    return home_path(chosen.out)


@cache
def _train_function(name: str) -> TrainFunction:
    """``taut.NAME`` for a training method."""

    def train(run: Run | str | PathLike[str] | None = None, /, **keys: Any) -> Result:
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
            from taut.methods.method import RunConfig

            return RunConfig
        if name == "Result":
            from taut.commands.train import Result

            return Result
        if name in METHODS:
            return _train_function(name)
        raise AttributeError(f"module 'taut' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
