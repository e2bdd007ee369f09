"""``import taut``: the functions behind its names, and how they read what Python gives.

    taut.sft(model="DIR", data="a.jsonl", out="runs/a")             one for each training method
    taut.generate("runs/a/model", prompts=rows, out="c.jsonl")      one for each command with a ``result``
    taut.data.stats("a.jsonl")                                      and for those of a family

A function takes the words of its command by position and its keys by name, nested or dotted, and returns a result
object. Keys may hold Python objects, which ``plain_keys`` turns into what a configuration holds: rows into files
(``data/read/in_memory.py``), functions, classes and objects into names (``io/user_code.py``), paths into text.

What a function is doing is told as by the command: on the line of a notebook, or in a line for each long phase.

A TautError leaves a function with neither the errors that caused it nor the lines of taut that it came through; with
the environment variable ``TAUT_TRACEBACK`` set it keeps both. The types are in taut/__init__.pyi, which is generated.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache, wraps
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_args

from taut.commands import registry
from taut.commands.registry import Command
from taut.config import SUFFIXES, TakesCode, from_mapping, replace, restore, to_dict
from taut.conflicts import annotation_of, annotation_of_values, fields_of, is_table
from taut.errors import ConfigError, TautError
from taut.io.extras import require
from taut.io.progress import told
from taut.io.user_code import name_object

TRACEBACK = "TAUT_TRACEBACK"
"""The environment variable that keeps whole tracebacks."""
OWN = ("check", "plan", "resume", "runs")
"""The functions that are written out here."""
COMMANDS = {"evaluate": "eval"}
"""Functions of another name than their command."""


# -- functions


def resume(out: str | os.PathLike[str], **keys: Any) -> Any:
    """Resume the run in ``out`` with its configuration, overridden by ``keys``."""
    from taut.commands import resume as command

    return command.resume(out, lambda run: replace(run, plain_keys(type(run), keys)))


def runs(*directories: str | os.PathLike[str]) -> Any:
    """The runs in some directories, newest first; by default in ``runs``, or else in the current directory."""
    from taut.commands import runs as command

    return command.runs(directories)


def check(run: Any = None, /, *, full: bool = False, **keys: Any) -> Any:
    """The findings of the checks that run before each training; ``full``: of all checks. Takes a run of any ``method``.

    Prints nothing, and raises nothing where a check fails: see ``failures``.
    """
    from taut.commands import check as command

    return command.check(_configure(_class_of(run, keys), run, keys), full=full)


def plan(run: Any = None, /, **keys: Any) -> Any:
    """Predict the memory and the step time of a run of any ``method``, on ``gpus`` devices of ``gpu_memory``."""
    from taut.commands import plan as command

    cls = command.class_for(_class_of(run, keys))
    run = restore(cls, to_dict(run), "in the run") if is_table(type(run)) else run
    return command.plan(_configure(cls, run, keys))


@cache
def find(name: str) -> Callable[..., Any] | None:
    """``taut.NAME``, or ``taut.FAMILY.NAME``; None: there is no such command, or it has no result for Python."""
    if name in OWN:
        return _public(globals()[name], registry.CORE[name].extras)
    typed = COMMANDS.get(name, name.replace(".", " ").replace("_", "-"))
    command = registry.find(typed)
    if command is None or command.config is None or command.result is None:
        return None
    place, result = command.config, command.result

    def call(*words: Any, **keys: Any) -> Any:
        config, settings = _words(command, words)
        keys = settings | keys
        is_run = command.has_method or hasattr(config, "method")
        cls = _class_of(config, keys) if is_run else resolve_name(place)
        if command.call == registry.TRAIN and cls.method != name:
            found = f"found a run of {cls.command()} given to taut.{name}"
            raise ConfigError(f"{found}; expected one of taut {typed}; call taut.{cls.method}")
        return resolve_name(result)(_configure(cls, config, keys))

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"{command.about[0].upper()}{command.about[1:]}. Keys: ``taut {typed} --help``."
    return _public(call, command.extras)


def _public(function: Callable[..., Any], extras: tuple[str, ...]) -> Callable[..., Any]:
    @wraps(function)
    def call(*arguments: Any, **keys: Any) -> Any:
        try:
            for extra in extras:
                require(extra, f"taut.{function.__name__}")
            with told():
                return function(*arguments, **keys)
        except TautError as error:
            if TRACEBACK in os.environ:
                raise
            raise error.with_traceback(None) from None

    return call


# -- what Python gives


def _words(command: Command, words: tuple[Any, ...]) -> tuple[Any, dict[str, Any]]:
    """A configuration or the file of one, and the keys that words stand for, as on the command line."""
    first = words[0] if words else None
    takes_words = command.alone or command.many
    is_config = first is None or is_table(type(first)) or str(first).endswith(SUFFIXES)
    config, texts = (first, words[1:]) if is_config or not takes_words else (None, words)
    if command.many is not None:
        return config, {command.many: [*texts]} if texts else {}
    if len(texts) > len(command.alone):
        raise ConfigError(f"found {len(words)} words; expected {command.words}; name the keys")
    return config, dict(zip(command.alone, texts, strict=False))


def _class_of(run: Any, keys: Mapping[str, Any]) -> type[Any]:
    """The class of a run of any method, by its key ``method``."""
    from taut.methods.method import class_of

    if is_table(type(run)):
        return type(run)
    named = [f"method={keys['method']}"] if "method" in keys else []
    return class_of(None if run is None else Path(run), named)


def _configure(cls: type[Any], config: Any, keys: Mapping[str, Any]) -> Any:
    plain = plain_keys(cls, keys)
    if isinstance(config, cls):
        return replace(config, plain) if plain else config
    if config is not None and not isinstance(config, str | os.PathLike):
        found = f"found {type(config).__name__} by position; expected {cls.__name__}"
        raise ConfigError(f"{found}, or the path of a TOML or YAML file; give it by key")
    return from_mapping(cls, plain, None if config is None else Path(config))


def plain_keys(cls: type[Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a configuration of ``cls`` with text in place of rows and of code. ``data`` that is no table of keys
    is ``data.train``.
    """
    from taut.data.read.in_memory import as_paths
    from taut.data.settings import DataConfig

    plain = dict(keys)
    if annotation_of(cls, ["data"]) is DataConfig and "data" in plain:
        rows = plain["data"]
        is_keys = isinstance(rows, DataConfig) or (isinstance(rows, Mapping) and "path" not in rows)
        if not is_keys:
            plain["data.train"] = plain.pop("data")
    return dict(_with_names(as_paths(cls, plain), cls))


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
    is_plain = value is None or isinstance(value, str | int | float | os.PathLike)
    if (mark is None and hint is not None) or is_plain or is_table(type(value)):
        return value
    return (mark.function if mark and inspect.isroutine(value) else "") + name_object(value)


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
