"""The command line: words -> a configuration -> a call of the library. No further behaviour.

Settings are ``key=value``, ``--key=value``, ``--key value``, or ``--key`` alone for a boolean key. A single word is the
TOML or YAML file that they override or, for commands that take a model or a run, that model or run (then only a word
that ends in .toml, .yaml or .yml is a file). All forms are equal to ``taut.config``.

A TautError is one line on stderr and its exit code (2: the user can correct it; 1: a check failed); under torchrun the
first failing rank prints it for all. An interrupt is one line too, with what remains to be done. Any other exception is
a bug and keeps its traceback.

Imports nothing heavy until a command runs.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
import re
import signal
import sys
import traceback
from collections import deque
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from taut import __version__
from taut.errors import ConfigError, Interrupted, RankFailed, TautError
from taut.extras import explained_imports, require
from taut.io import threads
from taut.io.console import guarded, is_first_on_host, one_line, tell
from taut.io.imports import named
from taut.methods import METHODS, published
from taut.train.signals import SIGNALS, Interrupt, Interrupts

OF_KIND = re.compile(r"[\w.-]+(==[\w.]+)?:")
"""How a word begins that is a file of another framework, as trl:run.yaml or trl==0.18.0:run.yaml."""
CTRL_C = 130
ENDING = tuple(number for number in SIGNALS if number != signal.SIGINT)
"""Signals that end any command in one line; Ctrl-C is Python's own KeyboardInterrupt."""


class Command(NamedTuple):
    """A command. Code is named as ``module:name`` and imported when the command runs."""

    words: str
    """The usage: its arguments as text."""
    about: str
    call: str
    """Function of the configuration; an integer result is the exit code."""
    config: str | None = None
    """The configclass; without one, the function takes the ``key=value`` words."""
    alone: tuple[str, ...] = ()
    """The keys that single words set, in order."""
    many: str | None = None
    """The key of the list that collects single words."""
    is_raw: bool = False
    """The function takes the TOML or YAML file and the settings, and makes its configuration itself."""
    has_method: bool = False
    """The run may be of any method, chosen by the key ``method``."""
    extras: tuple[str, ...] = ("train",)
    """The extras that it needs (taut.extras)."""


TRAIN = "taut.commands.train:train"
OTHERS = {
    "teach": Command(
        "MODEL data.train=FILE out=FILE",
        "write a teacher's top logprobs to a file, for distill",
        "taut.commands.teach:run",
        "taut.commands.teach:Teach",
        ("model",),
    ),
    "show": Command(
        "[RUN.toml | RUN.yaml] [key=value ...]",
        "print the configuration and which tokens are targets; of a run (--step N RUN) a step",
        "taut.commands.show:show",
        "taut.methods.method:RunConfig",
        has_method=True,
    ),
    "tokenise": Command(
        "[RUN.toml | RUN.yaml] [out=DIR] [key=value ...]",
        "tokenise the data of a run before it, into the cache or a directory that runs take as data.train",
        "taut.commands.tokenise:main",
        "taut.methods.method:RunConfig",
        is_raw=True,
        has_method=True,
    ),
    "check": Command(
        "[RUN.toml | RUN.yaml | --model DIR --data FILE | --recipe KIND:FILE [--processes N]] "
        "[--full] [--all] [--json] [--cluster]",
        "find what is wrong with a run before it is trained",
        "taut.commands.check:main",
        "taut.commands.check:CheckRun",
        is_raw=True,
        has_method=True,
    ),
    "import": Command(
        "KIND:FILE [--processes N] [--force] > RUN.toml",
        "write another framework's recipe as the file of a run",
        "taut.commands.import_recipe:run",
        "taut.commands.import_recipe:ImportRecipe",
        ("recipe",),
        extras=(),
    ),
    "plan": Command(
        "[RUN.toml | RUN.yaml | --model DIR] [--gpus N] [--gpu-memory 80GiB]",
        "predict the memory and the step time of a run",
        "taut.commands.plan:main",
        "taut.commands.plan:Plan",
        is_raw=True,
        has_method=True,
    ),
    "resume": Command(
        "OUT [key=value ...]",
        "resume a run from its directory",
        "taut.commands.resume:run",
        alone=("out",),
    ),
    "runs": Command(
        "[DIR ...]",
        "list runs: state, step, loss, checkpoint",
        "taut.commands.runs:run",
        "taut.commands.runs:Runs",
        many="directories",
        extras=(),
    ),
    "launch ray": Command(
        "RUN.toml [nodes=2] [gpus_per_node=8] [key=value ...]",
        "train on several machines of a Ray cluster, and go on where one of them dies",
        "taut.commands.launch:ray",
        "taut.commands.launch:LaunchRay",
        is_raw=True,
        has_method=True,
        extras=("train", "ray"),
    ),
    "launch slurm": Command(
        "RUN.toml [nodes=2] [gpus_per_node=8] [--dry-run] [key=value ...]",
        "train on several machines as a job of Slurm, which goes on after its time limit",
        "taut.commands.launch_slurm:slurm",
        "taut.commands.launch_slurm:LaunchSlurm",
        is_raw=True,
        has_method=True,
    ),
    "rollouts": Command(
        "RUN [step=N] [sort=reward]",
        "print the rollouts of a step, with their rewards",
        "taut.commands.rollouts:run",
        "taut.commands.rollouts:Rollouts",
        ("out",),
    ),
    "page": Command(
        "RUN|DIR ... [out=FILE.html]",
        "show runs in a browser: every token, rollout and curve, live or in one file",
        "taut.commands.page:run",
        "taut.commands.page:Page",
        many="runs",
    ),
    "generate": Command(
        "MODEL prompts=FILE out=FILE",
        "generate completions of a file of prompts, as JSONL",
        "taut.commands.generate:run",
        "taut.commands.generate:Generate",
        ("model",),
    ),
    "eval": Command(
        "MODEL data=FILE",
        "evaluate a model on questions with known answers",
        "taut.commands.evaluate:run",
        "taut.commands.evaluate:Evaluate",
        ("model",),
    ),
    "data stats": Command(
        "IN ...",
        "print what a data set holds: rows, lengths, duplicates",
        "taut.commands.data:run_stats",
        "taut.commands.data:Stats",
        many="data",
    ),
    "data dedup": Command(
        "IN ... out=FILE.jsonl|DIR/",
        "remove exact and near duplicates",
        "taut.commands.data:run_dedup",
        "taut.commands.data:Dedup",
        many="data",
        extras=("train", "data"),
    ),
    "data decontaminate": Command(
        "IN ... out=FILE.jsonl|DIR/ against=[FILE]",
        "remove rows that hold a question of an evaluation",
        "taut.commands.data:run_decontaminate",
        "taut.commands.data:Decontaminate",
        many="data",
    ),
    "data filter": Command(
        "IN ... out=FILE.jsonl|DIR/",
        "keep rows by length, language, loss, reward, pass rate or column",
        "taut.commands.data_filter:run",
        "taut.commands.data_filter:Filter",
        many="data",
    ),
    "score": Command(
        "MODEL data=FILE out=FILE",
        "score a file of answers with a reward model, as JSONL",
        "taut.commands.score:run",
        "taut.commands.score:Score",
        ("model",),
    ),
    "serve-reward": Command(
        "MODEL [port=5000]",
        "serve a reward model over HTTP",
        "taut.commands.serve_reward:run",
        "taut.commands.serve_reward:ServeReward",
        ("model",),
    ),
    "chat": Command(
        "MODEL",
        "chat with a model in the terminal",
        "taut.commands.chat:run",
        "taut.commands.chat:Chat",
        ("model",),
    ),
    "verify": Command(
        "MODEL [--engine server --url URL]",
        "verify that a model, or its server, matches its contract",
        "taut.commands.verify:run",
        "taut.commands.verify:Verify",
        ("model",),
    ),
    "merge": Command(
        "MODEL ADAPTER out=DIR",
        "merge a base model and a LoRA adapter",
        "taut.commands.merge:run",
        "taut.commands.merge:Merge",
        ("model", "adapter"),
    ),
    "export": Command(
        "MODEL out=FILE.gguf",
        "export one GGUF file for llama.cpp and programs built on it",
        "taut.commands.export:run",
        "taut.commands.export:Export",
        ("model",),
        extras=("train", "gguf"),
    ),
    "push": Command(
        "RUN NAME [private=false] [out=DIR]",
        "upload the model of a run, with a model card, to the Hugging Face hub",
        "taut.commands.push:run",
        "taut.commands.push:Push",
        ("run", "name"),
    ),
    "schema": Command(
        "[METHOD]",
        "print the JSON schema of a run's TOML or YAML file, for editors",
        "taut.commands.schema:run",
        "taut.commands.schema:Schema",
        ("method",),
        extras=(),
    ),
    "completion": Command(
        "bash|zsh|fish",
        "print a script with which a shell completes commands, keys and values",
        "taut.commands.completion:run",
        "taut.commands.completion:Completion",
        ("shell",),
        extras=(),
    ),
    "sandbox": Command(
        "[--json]",
        "test the sandbox mechanisms of this machine",
        "taut.commands.sandbox:run",
        "taut.commands.sandbox:SandboxReport",
    ),
    "demo": Command(
        "[key=value ...]",
        "train a small real model, offline, in minutes",
        "taut.demo:main",
        extras=("train", "gguf"),
    ),
}
"""The commands that do not train."""
WITH_KEY = {
    ("show", "step"): Command(
        "--step N RUN",
        "print the samples of a step with the losses that a run recorded",
        "taut.commands.show_step:run",
        "taut.commands.show_step:ShowStep",
        ("out",),
    ),
    ("eval", "tasks"): Command(
        "MODEL tasks=lm-eval:NAME[,NAME ...]",
        "evaluate a model on tasks of lm-evaluation-harness",
        "taut.commands.evaluate_tasks:run",
        "taut.commands.evaluate_tasks:EvaluateTasks",
        ("model",),
        extras=("train", "lm-eval"),
    ),
    ("check", "cluster"): Command(
        "--cluster [RUN.toml | RUN.yaml] [key=value ...] [--json]",
        "find what is wrong with the machines of a run before it is launched",
        "taut.commands.check_cluster:main",
        "taut.commands.check_cluster:CheckClusterRun",
        is_raw=True,
        has_method=True,
    ),
    ("check", "recipe"): Command(
        "--recipe KIND:FILE [--processes N] [--json]",
        "find what is wrong with another framework's recipe",
        "taut.commands.check_recipe:run",
        "taut.commands.check_recipe:CheckRecipe",
        extras=(),
    ),
}
"""What a command is where a key is set."""
GROUPS = {
    "Look at a run, before and after": (
        *("show", "tokenise", "import", "check", "plan", "resume", "runs", "rollouts", "page"),
    ),
    "Train on several machines": tuple(name for name in OTHERS if name.startswith("launch ")),
    "Look at data, and take rows out": tuple(name for name in OTHERS if name.startswith("data ")),
    "Use and judge a model": ("generate", "eval", "score", "serve-reward", "chat", "verify"),
    "Save it elsewhere": ("merge", "export", "push"),
    "This machine": ("schema", "completion", "sandbox", "demo"),
}
"""Groups of ``taut --help``, after that of the commands that train, and of teach, which prepares it."""
FAMILIES = {name.partition(" ")[0] for name in OTHERS if " " in name}
"""First words of the commands whose names are two words."""
EXAMPLE = "taut sft model=DIR data.train=a.jsonl out=runs/a steps=100 seed=1"


def commands() -> dict[str, Command]:
    """Every command by name: one for each training method, then the others."""
    training = {
        name.replace("_", "-"): Command(
            "[RUN.toml | RUN.yaml] [key=value ...]", about, TRAIN, place
        )
        for name, (place, about) in METHODS.entries.items()
    }
    return training | OTHERS


class Words(NamedTuple):
    """A command's arguments: the TOML or YAML file, and settings as ``key=value``."""

    path: Path | None
    overrides: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    threads.set_defaults()
    with guarded(), Interrupts.watching(ENDING) as interrupts:
        code = _run_guarded(words, interrupts)
    if code == Interrupted.exit_code and arguments is None:
        for number in SIGNALS:  # a repeated signal must not change the exit code
            signal.signal(number, signal.SIG_IGN)
    return code


def _run_guarded(words: Sequence[str], interrupts: Interrupts) -> int:
    """Run a command; errors and interrupts become a message and an exit code."""
    try:
        with interrupts.at_once():
            return _dispatch(words)
    except TautError as error:
        return _end(error)
    except KeyboardInterrupt as interrupt:
        is_ctrl_c = interrupts.received in (None, signal.SIGINT.name)
        how = "" if is_ctrl_c else f" by {interrupts.received}"
        kept = () if isinstance(interrupt, Interrupt) else interrupt.args
        code = CTRL_C if is_ctrl_c else Interrupted.exit_code
        return _report(": ".join([f"taut: interrupted{how}", *map(str, kept)]), code)
    except Exception as error:  # noqa: BLE001 - printed whole
        failure = _of_others(error)
        if failure is not None:
            return _end(failure)
        if "RANK" in os.environ and "torch" in sys.modules:
            from taut.train import distributed

            distributed.is_first_to_fail(1, f"{type(error).__name__}: {error}")
        sys.stderr.write(
            "".join(traceback.format_exception(error))
        )  # inside guarded(), which escapes it
        return 1


def _of_others(error: Exception) -> RankFailed | None:
    """The failure of another rank that brought this one about: torchrun ends the others by a signal, and collectives
    break.
    """
    if "RANK" not in os.environ or "torch" not in sys.modules or isinstance(error, RankFailed):
        return None
    from taut.train import distributed

    if isinstance(error, Interrupted):
        return distributed.failure_of_others()
    return distributed.explain(error)


def _end(error: TautError) -> int:
    error = _of_others(error) or error
    return _report(f"taut: error: {' '.join(str(error).splitlines())}", error.exit_code)


def _report(line: str, exit_code: int) -> int:
    """Print the final line; of several ranks, the first to fail does. Returns the exit code."""
    if "RANK" in os.environ:
        if "torch" in sys.modules:
            from taut.train import distributed

            is_first = distributed.is_first_to_fail(exit_code, line)
        else:
            is_first = is_first_on_host()
        if not is_first:
            return exit_code
    tell(line)
    return exit_code


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        _print(usage())
        return 0 if words else 2
    if words[0] == "--complete":  # of the scripts of ``taut completion``
        from taut.commands.completion import complete

        _print("\n".join(complete(words[1:], commands())))
        return 0
    if words[0] == "--version":
        _print(f"taut {__version__}")
        return 0
    known, words = commands(), joined(words)
    if words[0] in METHODS:
        words[0] = words[0].replace("_", "-")  # as ``method`` has it
    command = known.get(words[0])
    if command is None:
        near = difflib.get_close_matches(words[0], known, n=1) or ["sft"]
        if words[0].partition(" ")[0] in FAMILIES:
            return _run_family(words)
        meant = published(words[0]) or f"taut {near[0]}"
        raise ConfigError(
            f"found the command {words[0]!r}; expected one of {', '.join(known)}; did you mean '{meant}'?"
        )
    command = command_with(words, command)
    for word, following in zip(words[1:], [*words[2:], ""], strict=False):
        if word in ("-h", "--help") or word.startswith("--help="):
            topic = word.partition("=")[2] or ("" if following[:1] == "-" else following)
            _print(_help(words[0], command, topic or None))
            return 0
    return _run(words[0], command, words[1:])


def joined(words: Sequence[str]) -> list[str]:
    """The words with the name of the command as the first, which of a family is two: ``data dedup``."""
    if words[0] in FAMILIES and len(words) > 1:
        return [" ".join(words[:2]), *words[2:]]
    return list(words)


def _run_family(words: Sequence[str]) -> int:
    """``taut data`` without one of its tools: print them. Raises ConfigError where another word is in its place."""
    family, _, tool = words[0].partition(" ")
    known = {
        name: command.about for name, command in commands().items() if name.startswith(f"{family} ")
    }
    if tool not in ("", "-h", "--help"):
        tools = [name.partition(" ")[2] for name in known]
        near = difflib.get_close_matches(tool, tools, n=1)
        hint = f"did you mean 'taut {family} {near[0]}'?" if near else f"run: taut {family} --help"
        raise ConfigError(
            f"found taut {family} {tool!r}; expected one of {', '.join(tools)}; {hint}"
        )
    from taut.commands import help

    _print(help.family(family, known))
    return 0 if tool else 2


def command_with(words: Sequence[str], command: Command) -> Command:
    """What the command of these words is: another one where a key makes it so (``WITH_KEY``)."""
    keys = [word.partition("=")[0].removeprefix("--") for word in words[1:]]
    return next((WITH_KEY[words[0], key] for key in keys if (words[0], key) in WITH_KEY), command)


def usage() -> str:
    """Every command with its description, in groups."""
    from taut.commands import help

    known = commands()
    named = {name for names in GROUPS.values() for name in names}
    training = {"Train a model": [name for name in known if name not in named]}
    groups = {
        title: {name: known[name].about for name in names}
        for title, names in {**training, **GROUPS}.items()
    }
    return help.overview(groups, EXAMPLE)


def config_class(command: Command) -> type[Any]:
    """The configclass of a command that has one."""
    assert command.config is not None
    cls: type[Any] = _import_name(command.config)
    return cls


def _run(name: str, command: Command, words: Sequence[str]) -> int:
    for extra in command.extras:
        require(extra, f"taut {name}")
    if command.call == TRAIN:
        _require_free_out(words)
    from taut.config import ELSEWHERE, INSTEAD, describe, load
    from taut.io import temporary

    temporary.clear()
    call = _import_name(command.call)
    if command.config is None:
        path, overrides = sort_words(words, set(), command.alone)
        if path is not None:
            raise ConfigError(
                f"found {str(path)!r}; taut {name} takes key=value only, as in steps=10"
            )
        result = call(overrides)
    else:
        cls = config_class(command)
        classes = METHODS.values() if command.has_method else [cls]
        rows = [row for described in (cls, *classes) for row in describe(described)]
        keys = {row.key for row in rows}
        switches = {row.key for row in rows if row.type == "true | false"}
        foreign = {*ELSEWHERE, *INSTEAD} - keys
        sorted_words = sort_words(words, switches, command.alone, command.many, foreign)
        if "data.train" in keys:
            overrides = [
                re.sub(r"^\s*data\s*=", "data.train=", word) for word in sorted_words.overrides
            ]
            sorted_words = sorted_words._replace(overrides=overrides)  # data=FILE is short for it
        if "method" in keys:
            overrides = [
                re.sub(r"^\s*method\s*=.*", lambda match: match[0].replace("-", "_"), word)
                for word in sorted_words.overrides
            ]
            sorted_words = sorted_words._replace(overrides=overrides)  # as the command has it
        if command.has_method:
            _require_no_method(name, sorted_words.path)
        if command.has_method and not command.is_raw:
            cls = _import_name("taut.methods.method:class_of")(*sorted_words)
        result = call(*sorted_words) if command.is_raw else call(load(cls, *sorted_words))
    if os.environ.get("RANK", "0") == "0":
        if notice := getattr(result, "notice", None):
            _print(notice)
        if warning := getattr(result, "warning", None):
            sys.stderr.write(f"taut: warning: {one_line(warning)}\n")
    return result if isinstance(result, int) else 0


def _require_no_method(name: str, path: Path | None) -> None:
    """Refuse ``taut plan grpo``: the word is where a file of settings is named."""
    method = str(path).replace("-", "_")
    if path is not None and method in METHODS and not path.exists():
        raise ConfigError(
            f"found {str(path)!r} after taut {name}; expected a file of settings, or key=value; write method={method}"
        )


def _require_free_out(words: Sequence[str]) -> None:
    """Refuse an ``out`` that is in use before torch is imported: seconds sooner than ``train``, which checks again."""
    from taut.config import SUFFIXES, read_settings, user_path
    from taut.train.run_dir import require_usable

    files = [Path(word) for word in words if word.endswith(SUFFIXES) and "=" not in word]
    settings = read_settings(files[0]) if len(files) == 1 else {}
    for word, following in pairwise([*words, ""]):
        key, equals, value = word.removeprefix("--").partition("=")
        settings[key] = value if equals else following
    is_replaced = any(
        settings.get(key, "false") not in (False, "false") for key in ("resume", "overwrite")
    )
    if not is_replaced and isinstance(settings.get("out"), str):
        require_usable(user_path(settings["out"], "out"), resume=False, overwrite=False)


def _help(name: str, command: Command, topic: str | None) -> str:
    from taut.commands import help, keys

    lines = [*help.usage(name, command.words), ""]
    if command.config is None:
        module = find_spec(command.call.partition(":")[0])
        assert module is not None and module.origin is not None
        source = ast.parse(Path(module.origin).read_text(encoding="utf-8"))
        return "\n".join([*lines, help.filled_page(ast.get_docstring(source) or "")])
    rows = keys.rows_of(command.config)
    if rows is None:  # a method from outside of this package
        for extra in command.extras:
            require(extra, f"taut {name} --help")
        rows = keys.described(config_class(command))
    is_training = command.call == TRAIN
    return "\n".join([*lines, *help.command_help(name, command.about, rows, topic, is_training)])


def _import_name(name: str) -> Any:
    """The object that ``module:name`` names."""
    with explained_imports():
        return named(name)


def sort_words(
    words: Sequence[str],
    switches: set[str],
    alone: Sequence[str] = (),
    many: str | None = None,
    foreign: Collection[str] = (),
) -> Words:
    """The file of settings, and every setting as ``key=value``.

    ``alone``: the keys that single words set, in order; ``many``: the key that collects them in a list; ``foreign``:
    keys of other frameworks, which may be switches there.
    """
    from taut.config import SUFFIXES

    path: Path | None = None
    overrides, together = [], []
    keys, rest = iter(alone), deque(words)
    while rest:
        word = rest.popleft()
        if word.startswith("--"):
            overrides.append(_from_flag(word[2:], rest, switches, foreign))
        elif "=" in word and not (alone and OF_KIND.match(word)):
            overrides.append(word)
        elif many:
            together.append(word)
        elif alone and (OF_KIND.match(word) or not word.endswith(SUFFIXES)):
            key = next(keys, None)
            if key is None:
                wanted = " and ".join(name.upper() for name in alone)
                raise ConfigError(
                    f"found {word!r} next to {wanted}; expected settings as key=value after it"
                )
            overrides.append(f"{key}={word}")
        elif path is None:
            path = Path(word)
        else:
            raise ConfigError(
                f"found {word!r} next to {str(path)!r}; expected one file of settings, and settings as key=value"
            )
    if together:
        overrides.append(f"{many}={json.dumps(together, ensure_ascii=False)}")
    return Words(path, overrides)


def _from_flag(flag: str, rest: deque[str], switches: set[str], foreign: Collection[str]) -> str:
    key, equals, value = flag.partition("=")
    key = key.replace("-", "_")
    if equals:
        return f"{key}={value}"
    if key in switches:
        return f"{key}=true"
    if key in foreign and (not rest or rest[0].startswith("--") or "=" in rest[0]):
        return f"{key}=true"  # taut.config names the replacement
    if not rest:
        raise ConfigError(f"found --{flag} without a value; expected --{flag} VALUE")
    return f"{key}={rest.popleft()}"


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
