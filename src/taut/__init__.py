"""taut: post-training for Hugging Face models, with no padding and no prefix computed twice.

    import taut

    taut.check("run.toml").failures
    taut.sft("run.toml", steps=10)
    taut.sft(model="DIR", data={"train": "a.jsonl"}, out="runs/a", **{"optim.learning_rate": 1e-4})
    taut.resume("runs/a", steps=20)
    taut.generate(model="runs/a/model", prompts="b.jsonl", out="c.jsonl", **{"sampling.n": 4})

Each function but ``resume`` and ``runs`` takes its command's keys (``taut COMMAND --help``), nested
(``data={"train": ...}``) or dotted (``**{"data.train": ...}``), and a TOML file or a configuration to set them on. The
names below are the public surface. Importing taut loads neither torch nor transformers: what needs them is imported
when it is first asked for.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

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
    from taut.run.config import Run

_T = TypeVar("_T")

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
    "best_of_n",
    "check",
    "cpo",
    "distill",
    "dpo",
    "evaluate",
    "export",
    "generate",
    "gkd",
    "grpo",
    "kto",
    "merge",
    "online_dpo",
    "orpo",
    "ppo",
    "resume",
    "reward",
    "runs",
    "score",
    "sft",
    "show",
    "simpo",
    "teach",
    "verify",
]


def sft(run: Run | str | PathLike[str] | None = None, /, **keys: Any) -> Result:
    """Supervised fine-tuning: check, train, save."""
    return _train("sft", run, keys)


def reward(run: Run | str | PathLike[str] | None = None, /, **keys: Any) -> Result:
    """A reward model, of comparisons, scores or step labels."""
    return _train("reward", run, keys)


def dpo(run: Run | str | PathLike[str] | None = None, /, **keys: Any) -> Result:
    """Direct preference optimisation and its family: preferences, against a reference."""
    return _train("dpo", run, keys)


def kto(run: Run | str | PathLike[str] | None = None, /, **keys: Any) -> Result:
    """Kahneman-Tversky optimisation: answers marked good or bad, against a reference."""
    return _train("kto", run, keys)


def orpo(run: Run | str | PathLike[str] | None = None, /, **keys: Any) -> Result:
    """Odds ratio preference optimisation: preferences without a reference, and good answers."""
    return _train("orpo", run, keys)


def simpo(run: Run | str | PathLike[str] | None = None, /, **keys: Any) -> Result:
    """Simple preference optimisation: preferences by mean log-probs, without a reference."""
    return _train("simpo", run, keys)


def cpo(run: Run | str | PathLike[str] | None = None, /, **keys: Any) -> Result:
    """Contrastive preference optimisation: preferences without a reference, and good answers."""
    return _train("cpo", run, keys)


def distill(run: Run | str | PathLike[str] | None = None, /, **keys: Any) -> Result:
    """Distillation on fixed data: what a teacher says of it."""
    return _train("distill", run, keys)


def grpo(run: Run | str | PathLike[str] | None = None, /, **keys: Any) -> Result:
    """Group relative policy optimisation and its family: answers to a prompt, compared with each other."""
    return _train("grpo", run, keys)


def ppo(run: Run | str | PathLike[str] | None = None, /, **keys: Any) -> Result:
    """Proximal policy optimisation: each token of an answer, compared with what a critic expected."""
    return _train("ppo", run, keys)


def online_dpo(run: Run | str | PathLike[str] | None = None, /, **keys: Any) -> Result:
    """Online DPO: the best and the worst of several answers to a prompt, as a preference."""
    return _train("online_dpo", run, keys)


def best_of_n(run: Run | str | PathLike[str] | None = None, /, **keys: Any) -> Result:
    """Rejection sampling: the best of several answers to a prompt, learned as they are."""
    return _train("best_of_n", run, keys)


def gkd(run: Run | str | PathLike[str] | None = None, /, **keys: Any) -> Result:
    """On-policy distillation: what a teacher says of the model's own answers."""
    return _train("gkd", run, keys)


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
    from taut.commands import train

    train.show(_configure_run(run, keys))


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


def _train(method: Any, run: Run | str | PathLike[str] | None, keys: dict[str, Any]) -> Result:
    from taut.commands import train
    from taut.errors import ConfigError
    from taut.run.config import Run, command_of
    from taut.run.training import METHODS

    if isinstance(run, Run) and run.method != method:
        raise ConfigError(
            f"found a run of {command_of(run.method)} given to taut.{method}; expected one of {command_of(method)}; "
            f"call taut.{run.method}"
        )
    return train.train(_configure(METHODS[method], run, keys))


def _configure_run(run: Run | str | PathLike[str] | None, keys: dict[str, Any]) -> Run:
    """A run of any method, by its key ``method``."""
    from taut.run.config import Run
    from taut.run.training import class_of

    if isinstance(run, Run):
        return _configure(type(run), run, keys)
    named = [f"method={keys['method']}"] if "method" in keys else []
    return _configure(class_of(None if run is None else Path(run), named), run, keys)


def _configure(cls: type[_T], config: _T | str | PathLike[str] | None, keys: dict[str, Any]) -> _T:
    from taut.config import from_mapping, replace

    if isinstance(config, cls):
        return replace(config, keys) if keys else config
    assert config is None or isinstance(config, str | PathLike), "a configuration or a TOML file"
    return from_mapping(cls, keys, None if config is None else Path(config))


def __getattr__(name: str) -> Any:
    if name == "Run":
        from taut.run.config import Run

        return Run
    if name == "Result":
        from taut.commands.train import Result

        return Result
    raise AttributeError(f"module 'taut' has no attribute {name!r}")
