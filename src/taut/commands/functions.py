"""``import taut``: the functions behind its names, and how they read what Python gives.

    taut.sft(model="DIR", data="a.jsonl", out="runs/a")     one for each training method
    taut.generate("runs/a/model", prompts=rows, out="c.jsonl")     one for each command in ``FUNCTIONS``
    taut.data.stats("a.jsonl")                              one for each command of a family

A function takes the words of its command by position and its keys by name, nested or dotted. It returns the result
object of ``Command.result`` and prints what training prints, or nothing. Keys may hold Python objects, which
``plain_keys`` turns into what a configuration holds: rows into files (``data/read/in_memory.py``), functions, classes
and objects into names (``io/user_code.py``), paths into text.

A TautError leaves a function with neither the errors that caused it nor the lines of taut that it came through; with
the environment variable ``TAUT_TRACEBACK`` set it keeps both.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache, wraps
from os import PathLike
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, get_args

from taut.commands import registry
from taut.commands.registry import Command
from taut.config import (
    SUFFIXES,
    TakesCode,
    annotation_of,
    fields_of,
    from_mapping,
    replace,
    restore,
    to_dict,
)
from taut.conflicts import annotation_of_values, is_table
from taut.errors import ConfigError, TautError
from taut.io.extras import require
from taut.io.user_code import name_object
from taut.methods import METHODS, command_of

if TYPE_CHECKING:
    from taut.checks.examine import Examination
    from taut.commands.plan import Planned
    from taut.methods.method import RunConfig as Run
    from taut.run.ending import Result
    from taut.run.states import RunState

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

FUNCTIONS = {
    "chat": "chat",
    "evaluate": "eval",
    "export": "export",
    "generate": "generate",
    "merge": "merge",
    "push": "push",
    "score": "score",
    "teach": "teach",
    "verify": "verify",
}
"""``taut.NAME`` -> the command whose result it returns."""
TRACEBACK = "TAUT_TRACEBACK"
"""The environment variable that keeps whole tracebacks."""


def public(*extras: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function of ``import taut`` that needs these extras."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*arguments: P.args, **keys: P.kwargs) -> R:
            try:
                for extra in extras:
                    require(extra, f"taut.{function.__name__}")
                return function(*arguments, **keys)
            except TautError as error:
                if TRACEBACK in os.environ:
                    raise
                raise error.with_traceback(None) from None

        return call

    return decorate


# -- functions


@public("train")
def resume(out: str | PathLike[str], **keys: Any) -> Result:
    """Resume the run in ``out`` with its configuration, overridden by ``keys``."""
    from taut.commands import resume as command

    return command.resume(out, lambda run: replace(run, plain_keys(type(run), keys)))


@public()
def runs(*directories: str | PathLike[str]) -> list[RunState]:
    """The runs in some directories, newest first; by default in ``runs``, or else in the current directory."""
    from taut.commands import runs as command

    return command.runs(directories)


@public("train")
def show(run: Run | str | PathLike[str] | None = None, /, **keys: Any) -> None:
    """Print the resolved configuration and the first samples, their targets colored. Takes a run of any ``method``."""
    from taut.commands import show as command

    command.show(_configure(_class_of(run, keys), run, keys))


@public("train")
def check(
    run: Run | str | PathLike[str] | None = None, /, *, full: bool = False, **keys: Any
) -> Examination:
    """The findings of the checks that run before each training; ``full``: of all checks. Takes a run of any ``method``.

    Prints nothing, and raises nothing where a check fails: see ``failures``.
    """
    from taut.commands import check as command

    return command.check(_configure(_class_of(run, keys), run, keys), full=full)


@public("train")
def plan(run: Run | str | PathLike[str] | None = None, /, **keys: Any) -> Planned:
    """Predict the memory and the step time of a run of any ``method``, on ``gpus`` devices of ``gpu_memory``."""
    from taut.commands import plan as command
    from taut.methods.method import RunConfig

    cls: type[Any] = command.class_for(_class_of(run, keys))
    if isinstance(run, RunConfig):
        run = restore(cls, to_dict(run), "in the run")
    planned: Planned = command.plan(_configure(cls, run, keys))
    return planned


def find(name: str) -> Callable[..., Any]:
    """``taut.NAME``."""
    if name in FUNCTIONS:
        return _command_function(name, FUNCTIONS[name])
    function: Callable[..., Any] = (
        _train_function(name) if name in METHODS else globals()[name]  # one of this file
    )
    return function


def find_in(family: str, name: str) -> Callable[..., Any] | None:
    """``taut.FAMILY.NAME``, of a command of two words; None: there is none."""
    command = registry.find(f"{family} {name}")
    return None if command is None else _command_function(f"{family}.{name}", f"{family} {name}")


@cache
def _train_function(name: str) -> Callable[..., Result]:
    def train(run: Run | str | PathLike[str] | None = None, /, **keys: Any) -> Result:
        from taut.commands import train
        from taut.methods.method import RunConfig

        if isinstance(run, RunConfig) and run.method != name:
            raise ConfigError(
                f"found a run of {run.command()} given to taut.{name}; expected one of {command_of(name)}; "
                f"call taut.{run.method}"
            )
        cls = type(run) if isinstance(run, RunConfig) else METHODS[name]  # ``taut.Run(...)`` is SFT
        return train.train(_configure(cls, run, keys))

    about = METHODS.entries[name].about
    about = f"{about[0].upper()}{about[1:]}: check, train, save."
    return public("train")(_titled(train, name, about, command_of(name)))


@cache
def _command_function(name: str, typed: str) -> Callable[..., Any]:
    command = registry.find(typed)
    if command is None or command.config is None or command.result is None:
        raise ConfigError(f"found taut.{name}; expected a command with a result for Python")

    def call(*words: Any, **keys: Any) -> Any:
        assert command.config is not None and command.result is not None
        config, settings = _words(command, words)
        cls = resolve_name(command.config)
        return resolve_name(command.result)(_configure(cls, config, {**settings, **keys}))

    about = f"{command.about[0].upper()}{command.about[1:]}."
    return public(*command.extras)(_titled(call, name, about, f"taut {typed}"))


def _titled(function: Callable[P, R], name: str, about: str, command: str) -> Callable[P, R]:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{about} Keys: ``{command} --help``."
    return function


# -- what Python gives


def _words(command: Command, words: tuple[Any, ...]) -> tuple[Any, dict[str, Any]]:
    """A configuration or the file of one, and the keys that words stand for, as on the command line."""
    config: Any = None
    texts = list(words)
    is_file = texts and (texts[0] is None or str(texts[0]).endswith(SUFFIXES))
    if is_file or (texts and is_table(type(texts[0]))):
        config = texts.pop(0)
    if command.many is not None and texts:
        return config, {command.many: texts}
    if len(texts) > len(command.alone):
        expected = ", ".join(command.alone) or "a configuration or the file of one"
        raise ConfigError(
            f"found {len(words)} arguments by position; expected at most {expected}; name the keys of the others"
        )
    return config, dict(zip(command.alone, texts, strict=False))


def _class_of(run: Run | str | PathLike[str] | None, keys: Mapping[str, Any]) -> type[Run]:
    """The class of a run of any method, by its key ``method``."""
    from taut.methods.method import RunConfig, class_of

    if isinstance(run, RunConfig):
        return type(run)
    named = [f"method={keys['method']}"] if "method" in keys else []
    return class_of(None if run is None else Path(run), named)


def _configure(cls: type[T], config: T | str | PathLike[str] | None, keys: Mapping[str, Any]) -> T:
    plain = plain_keys(cls, keys)
    if isinstance(config, cls):
        return replace(config, plain) if plain else config
    if config is not None and not isinstance(config, str | PathLike):
        raise ConfigError(
            f"found {type(config).__name__} as the first argument; expected a configuration of {cls.__name__} or the "
            "path of a TOML or YAML file; name its key"
        )
    return from_mapping(cls, plain, None if config is None else Path(config))


def plain_keys(cls: type[Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a configuration of ``cls`` with text in place of rows and of code. ``data`` that is no table of keys
    is ``data.train``.
    """
    from taut.data.read.in_memory import as_paths
    from taut.data.settings import DataConfig

    plain = dict(keys)
    if "data" in plain and annotation_of(cls, ["data"]) is DataConfig:
        rows = plain["data"]
        is_keys = isinstance(rows, DataConfig) or (isinstance(rows, Mapping) and "path" not in rows)
        if not is_keys:
            plain["data.train"] = plain.pop("data")
    named: dict[str, Any] = _with_names(as_paths(cls, plain), cls)
    return named


def _with_names(value: Any, hint: Any) -> Any:
    """A value of the type ``hint`` with the names of functions, classes and objects in place of these."""
    parts = list(parts_of(hint))
    if isinstance(value, Mapping):
        table = next(filter(is_table, parts), None)
        return {
            key: _with_names(item, hint if table is None else hint_of(table, str(key).split(".")))
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_with_names(item, hint) for item in value]
    mark = next((part for part in parts if isinstance(part, TakesCode)), None)
    is_plain = value is None or isinstance(value, str | int | float | PathLike)
    if mark is None or is_plain or is_table(type(value)):
        return value
    return (mark.function if inspect.isroutine(value) else "") + name_object(value)


def hint_of(cls: type[Any], path: list[str]) -> Any:
    """The type of the field a dotted key names, with its marks; None where there is none."""
    *tables, last = path
    table = annotation_of(cls, tables)
    if is_table(table) and last in fields_of(table):
        return fields_of(table)[last].rebuild_annotation()
    return annotation_of_values(table)


def parts_of(hint: Any) -> Iterator[Any]:
    """The types and marks that a type is made of, itself included."""
    yield hint
    for part in get_args(hint):
        yield from parts_of(part)
