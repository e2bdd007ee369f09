"""Every command of ``taut``: its text for ``--help``, and the name of its code.

The commands of the core are listed here. Other packages, such as taut_tools, add theirs by entry points of the group
``taut.commands``:

    [project.entry-points."taut.commands"]
    page = "taut_tools.page:PAGE"                   a Command; a dot in the name begins its second word
    "data.stats" = "taut_tools.curate:STATS"        taut data stats
    "eval--tasks" = "taut_tools.lm_eval:TASKS"      taut eval, where its key tasks is set

The code of a command is named, ``module:name``, and imported when the command runs, since most of it takes seconds.
Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from taut.errors import ConfigError
from taut.io import plugins
from taut.methods import METHODS

GROUP = "taut.commands"


@dataclass(frozen=True, slots=True)
class Command:
    """A command. Code is named as ``module:name`` and imported when the command runs."""

    words: str
    """The usage: its arguments as text."""
    about: str
    call: str
    """Function of the configuration; an integer result is the exit code."""
    config: str | None = None
    """The configclass; without one, the function takes the ``key=value`` words."""
    group: str = ""
    """The title under which ``taut --help`` lists it."""
    alone: tuple[str, ...] = ()
    """The keys that single words set, in order."""
    many: str | None = None
    """The key of the list that collects single words."""
    is_raw: bool = False
    """The function takes the TOML or YAML file and the settings, and makes its configuration itself."""
    has_method: bool = False
    """The run may be of any method, chosen by the key ``method``."""
    extras: tuple[str, ...] = ("train",)
    """The extras that the command needs (taut.io.extras)."""
    result: str | None = None
    """Function of the configuration that returns the result, for ``taut.NAME`` of Python; it prints nothing."""


TRAIN = "taut.commands.train:train"
TRAINING = "Train a model"
LOOK = "Look at a run, before and after"
LAUNCH = "Train on several machines"
DATA = "Look at data, and take rows out"
USE = "Use and judge a model"
SAVE = "Save it elsewhere"
HERE = "This machine"
TITLES = (TRAINING, LOOK, LAUNCH, DATA, USE, SAVE, HERE)
"""Titles of ``taut --help``, in order; titles from other packages follow."""

CORE = {
    "show": Command(
        "[RUN.toml | RUN.yaml] [key=value ...]",
        "print the configuration and which tokens are targets; of a run (--step N RUN) a step",
        "taut.commands.show:show",
        "taut.methods.method:RunConfig",
        group=LOOK,
        has_method=True,
        result="taut.commands.show:show",
    ),
    "tokenize": Command(
        "[RUN.toml | RUN.yaml] [out=DIR] [key=value ...]",
        "tokenize the data of a run before it, into the cache or a directory that runs take as data.train",
        "taut.commands.tokenize:main",
        "taut.methods.method:RunConfig",
        group=LOOK,
        is_raw=True,
        has_method=True,
    ),
    "check": Command(
        "[RUN.toml | RUN.yaml | --model DIR --data FILE | --recipe KIND:FILE [--processes N]] "
        "[--full] [--all] [--json] [--cluster]",
        "find what is wrong with a run before it is trained",
        "taut.commands.check:main",
        "taut.commands.settings:CheckRun",
        group=LOOK,
        is_raw=True,
        has_method=True,
    ),
    "plan": Command(
        "[RUN.toml | RUN.yaml | --model DIR] [--gpus N] [--gpu-memory 80GiB]",
        "predict the memory and the step time of a run",
        "taut.commands.plan:main",
        "taut.commands.settings:Plan",
        group=LOOK,
        is_raw=True,
        has_method=True,
    ),
    "resume": Command(
        "OUT [key=value ...]",
        "resume a run from its directory",
        "taut.commands.resume:run",
        group=LOOK,
        alone=("out",),
    ),
    "runs": Command(
        "[DIR ...]",
        "list runs: state, step, loss, checkpoint",
        "taut.commands.runs:run",
        "taut.commands.runs:Runs",
        group=LOOK,
        many="directories",
        extras=(),
    ),
    "generate": Command(
        "MODEL prompts=FILE out=FILE",
        "generate completions of a file of prompts, as JSONL",
        "taut.commands.generate:run",
        "taut.commands.settings:Generate",
        group=USE,
        alone=("model",),
        result="taut.commands.generate:generate",
    ),
    "eval": Command(
        "MODEL data=FILE",
        "evaluate a model on questions with known answers",
        "taut.commands.evaluate:run",
        "taut.commands.settings:Evaluate",
        group=USE,
        alone=("model",),
        result="taut.commands.evaluate:evaluate",
    ),
    "verify": Command(
        "MODEL [--engine server --urls URL]",
        "verify that a model, or its server, matches its contract",
        "taut.commands.verify:run",
        "taut.commands.settings:Verify",
        group=USE,
        alone=("model",),
        result="taut.commands.verify:verify",
    ),
    "merge": Command(
        "MODEL ADAPTER out=DIR",
        "merge a base model and a LoRA adapter",
        "taut.commands.merge:run",
        "taut.commands.settings:Merge",
        group=SAVE,
        alone=("model", "adapter"),
        result="taut.commands.merge:merge",
    ),
    "schema": Command(
        "[METHOD]",
        "print the JSON schema of a run's TOML or YAML file, for editors",
        "taut.commands.schema:run",
        "taut.commands.schema:Schema",
        group=HERE,
        alone=("method",),
        extras=(),
    ),
    "completion": Command(
        "bash|zsh|fish",
        "print a script with which a shell completes commands, keys and values",
        "taut.commands.completion:run",
        "taut.commands.completion:Completion",
        group=HERE,
        alone=("shell",),
        extras=(),
    ),
    "check--cluster": Command(
        "--cluster [RUN.toml | RUN.yaml] [key=value ...] [--json]",
        "find what is wrong with the machines of a run before it is launched",
        "taut.commands.check_cluster:main",
        "taut.commands.settings:CheckClusterRun",
        is_raw=True,
        has_method=True,
    ),
}
"""The commands of the core that do not train, by the name of their entry point."""


def training() -> dict[str, Command]:
    """The commands that train, one for each method."""
    return {
        name.replace("_", "-"): Command(
            "[RUN.toml | RUN.yaml] [key=value ...]", about, TRAIN, place, TRAINING, result=TRAIN
        )
        for name, (place, about) in METHODS.entries.items()
    }


def names() -> list[str]:
    """Every command, as typed: the core's first."""
    known = [*training(), *CORE, *plugins.names(GROUP)]
    return list(dict.fromkeys(name.replace(".", " ") for name in known if "--" not in name))


def find(name: str) -> Command | None:
    """The command of this name, as typed, or None. Raises ConfigError for one that cannot be imported."""
    if "." in name or "--" in name:
        return None
    return training().get(name) or _added(name.replace(" ", "."))


def find_with(name: str, keys: Iterable[str]) -> Command | None:
    """The command of this name, or the variant ``NAME--KEY`` of it if one of the keys is set."""
    command = find(name)
    if command is None or command.call == TRAIN:
        return command
    entry = name.replace(" ", ".")
    return next((it for key in keys if (it := _added(f"{entry}--{key}"))), command)


def _added(entry: str) -> Command | None:
    if entry in CORE or entry not in plugins.names(GROUP):
        return CORE.get(entry)
    command = plugins.load(GROUP, entry)
    if isinstance(command, Command):
        return command
    raise ConfigError(
        f"{GROUP}: found {entry!r}, which is a {type(command).__name__}; expected a taut.commands.registry.Command"
    )


def variants() -> list[tuple[str, str]]:
    """The command and the key that selects a variant of it."""
    known = [*CORE, *plugins.names(GROUP)]
    return [(name, key) for name, dashes, key in (it.partition("--") for it in known) if dashes]


def families() -> set[str]:
    """First words of two-word commands."""
    return {name.partition(" ")[0] for name in names() if " " in name}
