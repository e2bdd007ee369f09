"""The command line: words -> a configuration -> a call of the library. No behaviour of its own.

Settings are ``key=value``, ``--key=value``, ``--key value``, or ``--key`` alone for a key that is true or false; one
word without ``=`` is the TOML file they are set on top of. All are the same thing to ``taut.config``.

A TautError is one line on stderr and its exit code (2: the user can put it right; 1: a check failed); under torchrun
the rank that fails first prints it for all. Any other exception is a mistake of ours and keeps its traceback.

Imports nothing heavy until a command runs. May be imported by ``__main__`` only.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from taut import __version__
from taut.errors import ConfigError, TautError

INTERRUPTED = 130

USAGE = """\
usage: taut sft  [RUN.toml] [key=value ...]    fine-tune a model on your data
       taut show [RUN.toml] [key=value ...]    print the resolved configuration, and which tokens are targets
       taut demo [key=value ...]               train a small real model, offline, in minutes
       taut COMMAND --help                     every key of a command
       taut --version

example: taut sft model=DIR data.train=a.jsonl out=runs/a steps=100 seed=1"""


class Command(NamedTuple):
    """What a word on the command line does."""

    run: Callable[[Sequence[str]], int]
    help: Callable[[], str]


class Words(NamedTuple):
    """A command's arguments, sorted."""

    path: Path | None
    overrides: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return _dispatch(words)
    except TautError as error:
        if _is_told_here():
            sys.stderr.write(f"taut: error: {' '.join(str(error).splitlines())}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def _is_told_here() -> bool:
    """Whether it is for this process to print the error that ends it."""
    if "RANK" not in os.environ:
        return True
    from taut import parallel

    return parallel.is_first_to_fail()


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        _print(USAGE)
        return 0 if words else 2
    if words[0] == "--version":
        _print(f"taut {__version__}")
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        near = difflib.get_close_matches(words[0], COMMANDS, n=1) or ["sft"]
        raise ConfigError(
            f"found the command {words[0]!r}; expected one of {', '.join(COMMANDS)}; did you mean 'taut {near[0]}'?"
        )
    if "-h" in words[1:] or "--help" in words[1:]:
        _print(command.help())
        return 0
    return command.run(words[1:])


def _sft(words: Sequence[str]) -> int:
    from taut import api
    from taut.config import load
    from taut.run import Run

    api.sft(load(Run, *sort_words(words, _switches())))
    return 0


def _show(words: Sequence[str]) -> int:
    from taut import api
    from taut.config import load
    from taut.run import Run

    api.show(load(Run, *sort_words(words, _switches())))
    return 0


def _demo(words: Sequence[str]) -> int:
    from taut.demo import main as demo

    path, overrides = sort_words(words, _switches())
    if path is not None:
        raise ConfigError(f"found {str(path)!r}; taut demo takes key=value only, as in steps=10")
    return demo(overrides)


def _keys_help(usage: str) -> str:
    from taut.config import describe
    from taut.run import Run

    lines = [usage, "", "keys (type; default):"]
    for row in describe(Run):
        lines.append(f"  {row.key}  ({row.type}; {row.default})")
        lines.append(f"      {row.doc}")
    return "\n".join(lines)


def _sft_help() -> str:
    return _keys_help("usage: taut sft [RUN.toml] [key=value | --key value ...]")


def _show_help() -> str:
    return _keys_help("usage: taut show [RUN.toml] [key=value | --key value ...]")


def _demo_help() -> str:
    from taut import demo

    return f"usage: taut demo [key=value ...]\n\n{(demo.__doc__ or '').strip()}"


def _switches() -> set[str]:
    """The keys that are true or false."""
    from taut.config import describe
    from taut.run import Run

    return {row.key for row in describe(Run) if row.type == "true | false"}


def sort_words(words: Sequence[str], switches: set[str]) -> Words:
    """The TOML file, and every setting as ``key=value``."""
    path: Path | None = None
    overrides = []
    rest = iter(words)
    for word in rest:
        if word.startswith("--"):
            overrides.append(_from_flag(word[2:], rest, switches))
        elif "=" in word:
            overrides.append(word)
        elif path is None:
            path = Path(word)
        else:
            raise ConfigError(
                f"found {word!r} beside {str(path)!r}; expected one TOML file, and settings as key=value"
            )
    return Words(path, overrides)


def _from_flag(flag: str, rest: Iterator[str], switches: set[str]) -> str:
    key, equals, value = flag.partition("=")
    key = key.replace("-", "_")
    if equals:
        return f"{key}={value}"
    if key in switches:
        return f"{key}=true"
    following = next(rest, None)
    if following is None:
        raise ConfigError(f"found --{flag} without a value; expected --{flag} VALUE")
    return f"{key}={following}"


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")


COMMANDS = {
    "sft": Command(_sft, _sft_help),
    "show": Command(_show, _show_help),
    "demo": Command(_demo, _demo_help),
}
