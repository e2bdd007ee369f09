"""The command line: words -> a configuration -> a call of the library. No further behavior.

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
from pathlib import Path
from typing import Any, NamedTuple

from taut import __version__
from taut.commands import registry
from taut.commands.registry import TRAIN, Command
from taut.errors import CheckFailed, ConfigError, Interrupted, RankFailed, TautError
from taut.io import allocator, progress, threads
from taut.io.console import guarded, is_first_on_host, one_line, print_line
from taut.io.extras import explained_imports, require
from taut.io.user_code import named
from taut.methods import METHODS, published
from taut.train.signals import SIGNALS, Interrupt, Interrupts

RECIPE_SPEC = re.compile(r"[\w.-]+(==[\w.]+)?:")
"""Prefix of a file of another framework, as in trl:run.yaml or trl==0.18.0:run.yaml."""
CTRL_C = 130
ENDING = tuple(number for number in SIGNALS if number != signal.SIGINT)
"""Signals that end any command with one line; Ctrl-C is Python's own KeyboardInterrupt."""

HELP = ("-h", "--help", "help")
EXAMPLE = "taut sft model=DIR data.train=a.jsonl out=runs/a steps=100 seed=1"


class Words(NamedTuple):
    """A command's arguments: the TOML or YAML file, and settings as ``key=value``."""

    path: Path | None
    overrides: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    threads.set_defaults()
    allocator.bound_kernel_cache()
    with guarded(), progress.drawn(), Interrupts.watching(ENDING) as interrupts:
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
    """Return the failure of another rank that caused this one: torchrun ends the others by a signal, and collectives
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
    """Print the final line; of several ranks, only the first that fails prints it. Returns the exit code."""
    if "RANK" in os.environ:
        if "torch" in sys.modules:
            from taut.train import distributed

            is_first = distributed.is_first_to_fail(exit_code, line)
        else:
            is_first = is_first_on_host()
        if not is_first:
            return exit_code
    print_line(line)
    return exit_code


def _dispatch(words: Sequence[str]) -> int:
    """Answer a question about taut, or find the command of these words and run it. Returns the exit code."""
    # questions about taut itself
    if words and words[0] in HELP and len(words) > 1:  # taut help sft
        words = [*words[1:], "--help"]
    elif not words or words[0] in HELP:
        _print(usage())
        return 0 if words else 2
    if words[0] == "--complete":  # of the scripts of ``taut completion``
        from taut.commands.completion import complete

        _print("\n".join(complete(words[1:])))
        return 0
    if words[0] in ("--version", "-V", "version"):
        _print(f"taut {__version__}")
        return 0

    # the command, or the nearest one in an error
    words = joined(words)
    if words[0] in METHODS:
        words[0] = words[0].replace("_", "-")  # online_dpo is online-dpo
    command = command_of(words)
    if command is None:
        near = difflib.get_close_matches(words[0].lower(), registry.names(), n=1)
        if words[0].partition(" ")[0] in registry.families():
            return _run_family(words)
        from taut.config import foreign_command

        meant = published(words[0]) or foreign_command(words[0])
        meant = meant or (f"taut {near[0]}" if near else "")
        hint = f"did you mean '{meant}'?" if meant else "is it a method, as in 'taut sft'?"
        raise ConfigError(
            f"found the command {words[0]!r}; expected one of those that 'taut --help' lists; {hint}"
        )

    # its help, or the run
    for word, following in zip(words[1:], [*words[2:], ""], strict=False):
        if word in HELP[:2] or word == words[1] == "help" or word.startswith("--help="):
            topic = word.partition("=")[2] or ("" if following[:1] == "-" else following)
            _print(_help(words[0], command, topic or None))
            return 0
    return _run(words[0], command, words[1:])


def joined(words: Sequence[str]) -> list[str]:
    """Join the two words that name a command of a family, as in ``data dedup``, into the first word."""
    if len(words) > 1 and registry.find(words[0]) is None and words[0] in registry.families():
        return [" ".join(words[:2]), *words[2:]]
    return list(words)


def _run_family(words: Sequence[str]) -> int:
    """Print the tools of a family, for ``taut data`` alone. Raises ConfigError if another word follows."""
    family, _, tool = words[0].partition(" ")
    names = [name for name in registry.names() if name.startswith(f"{family} ")]
    known = {name: command.about for name in names if (command := registry.find(name))}
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


def command_of(words: Sequence[str]) -> Command | None:
    """Return the command of these words, or None if a key selects another one, as in ``taut show --step``."""
    keys = [word.partition("=")[0].removeprefix("--") for word in words[1:]]
    return registry.find_with(words[0], keys)


def usage() -> str:
    """Every command with its description, in groups."""
    from taut.commands import help

    groups: dict[str, dict[str, str]] = {title: {} for title in registry.TITLES}
    for name in registry.names():
        try:
            command = registry.find(name)
        except ConfigError as error:
            groups.setdefault("Cannot be imported", {})[name] = str(error)
        else:
            assert command is not None
            groups.setdefault(command.group or "More commands", {})[name] = command.about
    return help.overview({title: named for title, named in groups.items() if named}, EXAMPLE)


def config_class(command: Command) -> type[Any]:
    """The configclass of a command that has one."""
    assert command.config is not None
    cls: type[Any] = _import_name(command.config)
    return cls


def _run(name: str, command: Command, words: Sequence[str]) -> int:
    """Make the configuration of a command from its words, call the command, and report. Returns the exit code."""
    progress.show("reading the configuration")

    # what can be refused before heavy imports
    for extra in command.extras:
        require(extra, f"taut {name}")
    from taut.config import describe, foreign_keys, load
    from taut.io import temporary

    # words -> the file of settings and key=value -> the configuration; then the call
    temporary.clear()
    if command.config is None:
        path, overrides = sort_words(words, set(), command.alone)
        if path is not None:
            raise ConfigError(
                f"found {str(path)!r}; taut {name} takes key=value only, as in steps=10"
            )
        given: Sequence[Any] = [overrides]
    else:
        cls = config_class(command)
        classes = METHODS.values() if command.has_method else [cls]
        rows = [row for described in (cls, *classes) for row in describe(described)]
        keys = {row.key for row in rows}
        switches = {row.key for row in rows if row.type == "true | false"}
        foreign = {name for table in foreign_keys() for name in table} - keys
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
            sorted_words = sorted_words._replace(overrides=overrides)  # online-dpo is online_dpo
        if command.has_method:
            _require_no_method(name, sorted_words.path)
        if command.has_method and not command.is_raw:
            cls = _import_name("taut.methods.method:class_of")(*sorted_words)
        given = sorted_words if command.is_raw else [load(cls, *sorted_words)]
    if command.call == TRAIN:  # which looks again, seconds later
        from taut.train.run_dir import out_of, require_usable

        (run,) = given
        require_usable(out_of(run.out), resume=run.resume, overwrite=run.overwrite)

    # torch is imported once the keys are not refused
    progress.show("loading torch and transformers")
    call = _import_name(command.call)
    progress.hide()
    result = call(*given)
    progress.hide()

    # what the result says: the first rank prints notices, every rank fails
    if os.environ.get("RANK", "0") == "0":
        if notice := getattr(result, "notice", None):
            _print(notice)
        if warning := getattr(result, "warning", None):
            sys.stderr.write(f"taut: warning: {one_line(warning)}\n")
    if failure := getattr(result, "failure", None):
        return _report(f"taut: error: {one_line(failure)}", CheckFailed.exit_code)
    return result if isinstance(result, int) else 0


def _require_no_method(name: str, path: Path | None) -> None:
    """Refuse ``taut plan grpo``: a word there names a file of settings."""
    method = str(path).replace("-", "_")
    if path is not None and method in METHODS and not path.exists():
        raise ConfigError(
            f"found {str(path)!r} after taut {name}; expected a file of settings, or key=value; write method={method}"
        )


def _help(name: str, command: Command, topic: str | None) -> str:
    from taut.commands import help

    lines = [*help.usage(name, command.words), ""]
    if command.config is None:
        module = find_spec(command.call.partition(":")[0])
        assert module is not None and module.origin is not None
        source = ast.parse(Path(module.origin).read_text(encoding="utf-8"))
        return "\n".join([*lines, help.filled_page(ast.get_docstring(source) or "")])
    try:
        cls = config_class(command)
    except ImportError:  # of another package, whose keys need more than pydantic
        for extra in command.extras:
            require(extra, f"taut {name} --help")
        raise
    rows = help.rows_of(cls)
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
    """Sort words into the file of settings and every setting as ``key=value``. ``alone``: keys that single words set,
    in order; ``many``: key that collects them in a list; ``foreign``: keys of other frameworks, which may be switches
    there.
    """
    from taut.config import SUFFIXES

    path: Path | None = None
    overrides, together = [], []
    keys, rest = iter(alone), deque(words)
    while rest:
        word = rest.popleft()
        if word.startswith("--"):
            overrides.append(_from_flag(word[2:], rest, switches, foreign))
        elif "=" in word and not (alone and RECIPE_SPEC.match(word)):
            overrides.append(word)
        elif many:
            together.append(word)
        elif alone and (RECIPE_SPEC.match(word) or not word.endswith(SUFFIXES)):
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
                f"found {word!r} next to {str(path)!r}; expected one file of settings, and settings as key=value, as "
                "in model=DIR data.train=FILE"
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
        near = difflib.get_close_matches(flag, ["help", *switches], n=1)
        hint = f"; did you mean --{near[0]}?" if near else ""
        raise ConfigError(f"found --{flag} without a value; expected --{flag} VALUE{hint}")
    return f"{key}={rest.popleft()}"


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
