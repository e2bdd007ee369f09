"""TOML or YAML, and dotted overrides -> a frozen tree of dataclasses, or an error of one line. Knows no component.

A configuration is a class made with ``configclass``; classes nest. ``load`` reads a TOML or YAML file and sets
``a.b=value`` on top; ``from_mapping`` does the same with Python values. Both refuse unknown keys, values of another
kind than the field's, and keys that are set twice. Values are checked, never rewritten.

The value of an override is TOML (``1e-4``, ``true``, ``[1, 2]``); a value that is not TOML, or of no kind that the
field takes, is text (``out=1`` is a directory called 1). ``none`` unsets an optional field. The texts of a list need
no quotes, which a shell would remove (``lora.targets=[q_proj,v_proj]``), and a list of one no brackets. What begins
like a list or a table of a field that takes one, and is none, is an error.

``explain`` turns pydantic's errors into one line: unknown keys first, with the nearest known key (or the key with
the function of another framework's), then values of another kind, then missing keys. Keys and values are shortened.
Keys that contradict each other are in the table ``rules`` of their class (conflicts.py).

Imports errors, conflicts, io.files and, for YAML, io.yaml_tables only.
"""

from __future__ import annotations

import ast
import bisect
import dataclasses
import difflib
import fnmatch
import inspect
import json
import os
import re
import sys
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar, dataclass_transform
from urllib.parse import urlsplit

import pydantic
from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from taut import conflicts
from taut.conflicts import Conflict, annotation_of_values, is_table, one_line, shortened
from taut.conflicts import annotation_of as annotation_of
from taut.conflicts import changed as changed
from taut.conflicts import fields_of as fields_of
from taut.conflicts import written as written
from taut.errors import ConfigError
from taut.io import files
from taut.io.files import home_path as home_path

T = TypeVar("T")
KeyPath = tuple[str | int, ...]

Positive: TypeAlias = Annotated[float, Field(gt=0)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
"""Types of a field: a number above 0, of at least 0, and between 0 and 1."""


@dataclasses.dataclass(frozen=True)
class TakesCode:
    """The mark of a text that may name code, as ``FILE.py:name``: Python may give the function, class or object."""

    function: str = ""
    """Stands before the name of a function."""


Code: TypeAlias = Annotated[str, TakesCode()]

YAML = (".yaml", ".yml")
SUFFIXES = (".toml", *YAML)
"""How the names of files of settings end."""
LARGEST = 2**24
"""Largest file of settings, in bytes."""
DEEPEST = 32
"""Depth to which tables and lists may be nested."""
WIDEST = 2**63
"""TOML's integers are smaller in size."""
IS_TRAINING = "optim.learning_rate"
"""The key by which a command that trains is recognized."""

ERRORS_SHOWN = 3
"""Mistakes in one message."""
EXPECTED = {
    "bool_type": "true or false",
    "cadence": "a number of steps, or a text like 0.5 epochs or 30 minutes",
    "dict_type": "a table",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_type": "an integer",
    "list_type": "a list",
    "string_pattern_mismatch": "FILE.py:name",
    "string_type": "a string",
    "tuple_type": "a list",
}
"""pydantic's error types in our words."""


REWARD_KEYS = (
    "a reward has name, weight, label, timeout, inside, after, judges and options; what one reward alone takes is in "
    "options: options.{}"
)


@cache
def _foreign() -> dict[str, Any]:
    text = resources.files("taut").joinpath("foreign_keys.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def foreign_value(key: str, value: Any) -> str | None:
    """The setting here for a value that other frameworks have for the key; None where none is known."""
    settings = _foreign()["values"].get(key, {})
    word = str(value).lower()
    return next((ours for ours, values in settings.items() if word in values.split()), None)


def foreign_command(name: str) -> str | None:
    """The command here for one of other tools, or one that is nearly spelled so; None where none is known."""
    ours = {word: one for one, words in _foreign()["commands"].items() for word in words.split()}
    near = difflib.get_close_matches(name, ours, n=1, cutoff=0.8)
    return ours[near[0]] if near else None


def did_you_mean(key: str, value: Any) -> str:
    """``; did you mean KEY=OURS?`` for a value that other frameworks have for the key; empty for others."""
    ours = foreign_value(key, value)
    return "" if ours is None else f"; did you mean {ours}?"


@cache
def foreign_keys() -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Names of other frameworks -> the keys here, and names without a key here -> the alternative."""
    table = _foreign()
    return (
        {
            name: tuple(keys.split())
            for keys, names in table["keys"].items()
            for name in names.split()
        },
        {name: why for why, names in table["instead"].items() for name in names.split()},
    )


def explain(
    error: pydantic.ValidationError,
    tree: Mapping[str, Any],
    assigned: set[tuple[str, ...]],
    places: tuple[str, str],
    cls: type[Any],
    prefix: str = "",
) -> ConfigError:
    """The mistakes in ``tree``, as one error with the code of the first. ``places``: the origin of the keys in
    ``assigned``, and of the others; ``cls``: the configuration.
    """
    keys = [key for key, *_ in _leaves(cls, "")]
    details_of: dict[KeyPath, list[Any]] = {}
    for detail in error.errors(include_url=False):
        details_of.setdefault(_path_of(detail, tree), []).append(detail)
    deepest = {
        path: details
        for path, details in details_of.items()
        if not any(other[: len(path)] == path for other in details_of if len(other) > len(path))
        or details[0]["type"] == "value_error"
    }
    lines: list[ConfigError] = []
    for path, details in deepest.items():
        is_assigned = any(path[: len(key)] == key for key in assigned)
        of_table = [key for key in sorted(assigned) if key[: len(path)] == path]
        if of_table and details[0]["type"] == "unexpected_keyword_argument":
            # The whole key, not the unknown table that it names.
            path, is_assigned = of_table[0], True
        errors = [one["ctx"]["error"] for one in details if one["type"] == "value_error"]
        if errors and isinstance(errors[0], Conflict):
            dot = "." if path else ""
            found, pattern = f"{key_text(path)}{dot}", f"{_pattern(cls, path)}{dot}"
            lines.append(errors[0].at(f"{prefix}{found}", f"{prefix}{pattern}"))
        else:
            place = places[0 if is_assigned else 1]
            lines.append(_explain_one(path, details, place, keys))
    lines.sort(key=lambda line: (line.code != "unknown-key", line.code == "missing-key"))
    more = len(lines) - ERRORS_SHOWN
    text = "; also: ".join(str(line) for line in lines[:ERRORS_SHOWN])
    return ConfigError(text + (f"; and {more} more" if more > 0 else ""), code=lines[0].code)


def first_problem(error: pydantic.ValidationError) -> str:
    """The first mistake in a file that a program wrote, as ``random[0].torch: found 5; expected a string``."""
    detail = error.errors(include_url=False)[0]
    where = f"{key_text(detail['loc'])}: " if detail["loc"] else ""
    if detail["type"] == "missing":
        return f"{where}it is missing"
    if detail["type"] == "json_invalid":
        return one_line(detail["msg"])
    if detail["type"] in ("value_error", "assertion_error"):
        return f"{where}{shortened(one_line(str(detail['ctx']['error'])))}"
    expected = EXPECTED.get(detail["type"]) or one_line(detail["msg"]).removeprefix(
        "Input should be "
    )
    return f"{where}found {shown(detail['input'])}; expected {expected}"


def key_text(path: Sequence[str | int]) -> str:
    """A key as people write it: ``data.train[0].path``."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{one_line(part)}" for part in path)
    return shortened("".join(parts).removeprefix("."))


def shown(value: Any) -> str:
    """A value as JSON writes it, which is nearly TOML."""
    text = json.dumps(value, ensure_ascii=False)
    return shortened(text if text.isprintable() else json.dumps(value))


def toml(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, dict):
        names = {
            key: key if re.fullmatch(r"[\w-]+", str(key), re.ASCII) else toml(str(key))
            for key in value
        }
        return f"{{{', '.join(f'{names[key]} = {toml(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(toml(item) for item in value)}]"
    return json.dumps(value, ensure_ascii=False)


def _path_of(detail: Any, tree: Any) -> KeyPath:
    """The path of an error in ``tree``: pydantic's location without the names of union branches."""
    path: list[str | int] = []
    for part in detail["loc"]:
        is_index = isinstance(tree, list | tuple) and isinstance(part, int)
        if is_index or (isinstance(tree, Mapping) and part in tree):
            path.append(part)
            tree = tree[part]
    if detail["type"] == "missing":
        path.append(detail["loc"][-1])
    return tuple(path)


def _explain_one(
    path: KeyPath, details: Sequence[Any], place: str, keys: Sequence[str]
) -> ConfigError:
    key = key_text(path)
    kinds = {detail["type"] for detail in details}
    for detail in details:
        if detail["type"] == "value_error":
            error = detail["ctx"]["error"]
            return ConfigError(str(error), code=getattr(error, "code", None))
    if "missing" in kinds:
        wanted = next((known for known in keys if known.startswith(f"{key}.")), key)
        text = f"key '{key}' is missing; expected {wanted}=... on the command line or in the run's TOML file"
        return ConfigError(text, code="missing-key")
    if "unexpected_keyword_argument" in kinds:
        return ConfigError(
            f"unknown key '{key}' {place}; {_suggest(key, keys)}", code="unknown-key"
        )
    kinds_wanted = [
        EXPECTED.get(detail["type"]) or detail["msg"].removeprefix("Input should be ")
        for detail in details
    ]
    expected = " or ".join(dict.fromkeys(kinds_wanted))
    value = details[0]["input"]
    ours = foreign_value(key, value)
    remedy = "correct the value" if ours is None else f"did you mean {ours}?"
    found = f"found {key}={shown(value)} {place}"
    return ConfigError(f"{found}; expected {expected}; {remedy}", code="invalid-value")


def _pattern(cls: type[Any], path: KeyPath) -> str:
    """A path as in the code of an error: numbers of list items and names of a user's tables are ``*``."""
    names = [str(part) for part in path]
    parents = [annotation_of(cls, names[:depth]) for depth in range(len(names))]
    return ".".join(
        "*" if isinstance(part, int) or annotation_of_values(parent) is not None else part
        for part, parent in zip(path, parents, strict=True)
    )


def _suggest(key: str, keys: Sequence[str]) -> str:
    """A hint for an unknown key: the key of the same function or name, or one spelled alike."""
    table, _, last = key.rpartition(".")
    if re.search(r"\brewards\[\d+\]$", table):
        return REWARD_KEYS.format(last)
    all_elsewhere, instead = foreign_keys()
    elsewhere = all_elsewhere.get(last) or all_elsewhere.get(key.replace(".", "_"), ())
    in_table = [f"{table}.{pattern.rpartition('.')[2]}" for pattern in elsewhere]  # critic.lr
    for patterns in (in_table, elsewhere):
        here = [f"'{known}'" for pattern in patterns for known in fnmatch.filter(keys, pattern)]
        if here:
            return f"did you mean {' or '.join(dict.fromkeys(here))}?"
    if last in instead and IS_TRAINING in keys:
        return instead[last]
    same = [known for known in keys if known == last or known.endswith(f".{last}")]
    if same:
        return f"did you mean '{same[0]}'?"
    if elsewhere and IS_TRAINING in keys:
        name = elsewhere[0].removeprefix("*.")
        return f"other commands have '{name}' for it, this one does not"
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else "'taut COMMAND --help' lists every key"


@dataclass_transform(frozen_default=True, kw_only_default=True)
def configclass(cls: type[T]) -> type[T]:
    """A frozen, keyword-only dataclass whose values are validated and whose unknown keys are refused, as are keys that
    contradict each other by its table ``rules``.

    The string under a field is its documentation (``documentation``). A validator is built when the first value is
    made: a command needs few of the classes that it could use.
    """
    conflicts.install(cls)
    setattr(cls, "__repr__", _repr)  # noqa: B010 (mypy takes no assignment to a method)
    settings = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True)
    result: Any = pydantic_dataclass(frozen=True, kw_only=True, config=settings)(cls)
    conflicts.verify(result)
    return result  # type: ignore[no-any-return]  # pydantic's own type for it is not type[T]


def _repr(config: Any) -> str:
    """The keys that differ from their defaults."""
    keys = ", ".join(f"{name}={getattr(config, name)!r}" for name in changed(config))
    return f"{type(config).__name__}({keys})"


def documentation(cls: type[Any]) -> dict[str, str]:
    """The string under each field of a configuration class, its bases' included, in one line."""
    found: dict[str, str] = {}
    for base in filter(is_table, reversed(cls.__mro__)):
        found |= _strings_under_fields(sys.modules[base.__module__]).get(base.__qualname__, {})
    return {name: text for name, text in found.items() if name in fields_of(cls)}


@cache
def _strings_under_fields(module: types.ModuleType) -> dict[str, dict[str, str]]:
    """Class -> field -> the string under it, for the classes of a module; empty where its source is not there."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError):
        return {}
    found: dict[str, dict[str, str]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = f"{prefix}{getattr(child, 'name', '')}"
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                visit(child, f"{name}.<locals>.")
            elif isinstance(child, ast.ClassDef):
                found[name] = {
                    field.target.id: " ".join(text.value.value.replace("``", "`").split())
                    for field, text in pairwise(child.body)
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                    if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                    if isinstance(text.value.value, str)
                }
                visit(child, f"{name}.")

    visit(tree, "")
    return found


class Decision(NamedTuple):
    """A setting that taut chose because the configuration leaves it open, with the reason. Printed at the start, and in
    the run log.
    """

    name: str
    value: str
    reason: str


VERBS = ("excludes", "needs", "in", "is", "required", "where")
"""How a clause of a rule begins where it does not begin with a key."""


class Row(NamedTuple):
    """One key of a configuration, for documentation."""

    key: str
    type: str
    default: str
    doc: str
    rules: tuple[str, ...] = ()
    """The keys and values that it excludes and needs."""

    @property
    def text(self) -> str:
        """The documentation, with what the key excludes and needs."""
        rules = "; ".join(self.rules)
        if rules.split(" ")[0].strip(",") in VERBS:
            rules = rules[0].upper() + rules[1:]
        return f"{self.doc} {rules}." if rules else self.doc


class Assignment(NamedTuple):
    """A value for a key, from the command line or from Python."""

    path: tuple[str, ...]
    value: Any


def load(cls: type[T], path: Path | None, overrides: Sequence[str] = ()) -> T:
    """The configuration in a TOML or YAML file (or none) with ``a.b=value`` set on top."""
    assignments = [_parse_override(cls, text) for text in overrides]
    return _build(cls, read_settings(path), assignments, ("on the command line", _place(path)))


def from_mapping(cls: type[T], mapping: Mapping[str, Any], path: Path | None = None) -> T:
    """The configuration in Python values: nested mappings, dotted keys and configclass instances, in any mixture."""
    place = "in the arguments"
    assignments = list(_flatten(cls, mapping, ()))
    return _build(
        cls, read_settings(path), assignments, (place, place if path is None else _place(path))
    )


def replace(config: T, mapping: Mapping[str, Any]) -> T:
    """A configuration with other values for some keys, which are as in ``from_mapping``."""
    cls, place = type(config), "in the arguments"
    return _build(cls, to_dict(config), list(_flatten(cls, mapping, ())), (place, place))


def override(config: T, overrides: Sequence[str]) -> T:
    """A configuration with ``a.b=value`` set on top."""
    cls, place = type(config), "on the command line"
    return _build(
        cls, to_dict(config), [_parse_override(cls, text) for text in overrides], (place,) * 2
    )


def restore(cls: type[T], saved: Mapping[str, Any], place: str, prefix: str = "") -> T:
    """The configuration of a mapping from ``to_dict``. ``place``: its origin, for errors; ``prefix``: what stands
    before keys that contradict each other.
    """
    return _build(cls, dict(saved), [], (place, place), prefix)


def user_path(text: str, key: str) -> Path:
    """The path in a key, with ``~`` expanded, whether or not it exists."""
    try:
        path = home_path(text)
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, or no home
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{key}={shown(text)} cannot be looked up: {reason}; expected a path; correct it"
        ) from error
    return path


def read_url(text: str, key: str, secret_key: str) -> str:
    """The URL of an http server in ``key``: host and path, no slash at the end. ``secret_key``: the key that names the
    environment variable of its secret.
    """
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
        is_plain = parts.username is None and not parts.query and not parts.fragment
    except ValueError:
        parts, host, port, is_plain = urlsplit(""), None, None, False
    if parts.scheme not in ("http", "https") or not host or port == 0 or not is_plain:
        # What is not plain may hold a secret: then no more than the host is shown.
        rest = f": has more than host and path{f' ({host})' if host else ''}"
        problem = f"={text}: cannot be used" if is_plain else rest
        raise ConfigError(
            f"{key}{problem}; expected a URL of host and path, as in http://127.0.0.1:8000/v1; correct it; a key or "
            f"password goes into the environment variable that {secret_key} names"
        )
    return text.rstrip("/")


def read_secret(variable: str | None, key: str) -> str | None:
    """The secret in the environment variable named by ``key``; None where it names none. No message contains it."""
    if variable is None:
        return None
    secret = os.environ.get(variable, "").strip()
    if not secret:
        raise ConfigError(
            f"{key}={variable}: no environment variable of this name is set; expected it to hold the server's key; "
            f"export it, correct the name, or remove {key}"
        )
    return secret


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as JSON-able values."""
    plain = pydantic.TypeAdapter(type(config)).dump_python(config, mode="json")
    assert isinstance(plain, dict)
    return plain


_described: dict[type[Any], tuple[Row, ...]] = {}


def describe(cls: type[Any]) -> tuple[Row, ...]:
    """Every key with its type, default and documentation, in the order of the fields."""
    if cls not in _described:
        _described[cls] = tuple(_rows(cls))
    return _described[cls]


def with_rules(rows: Iterable[Row], clauses: Iterable[tuple[str, str]]) -> Iterator[Row]:
    """The rows with what is said of them or of a table that they are in. ``clauses``: key -> what it excludes."""
    said: dict[str, list[str]] = {}
    for key, clause in clauses:
        clauses_of = said.setdefault(key, [])
        first = next((n for n, it in enumerate(clauses_of) if it.startswith("excludes ")), None)
        if clause.startswith("excludes ") and first is not None:
            clauses_of[first] += f", {clause.removeprefix('excludes ')}"
        else:
            clauses_of.append(clause)
    for row in rows:
        names = row.key.split(".")
        keys = [".".join(names[:depth]) for depth in range(len(names), 0, -1)]
        rules = [
            f"{'' if key == row.key else f'{key} '}{it}" for key in keys for it in said.get(key, ())
        ]
        yield row._replace(rules=tuple(rules))


def _rows(cls: type[Any]) -> Iterator[Row]:
    rows = (
        Row(
            key,
            type_name(info.annotation),
            "required"
            if info.is_required()
            else written(info.get_default(call_default_factory=True)),
            doc,
        )
        for key, info, doc in _leaves(cls, "")
    )
    return with_rules(rows, conflicts.clauses_by_key(cls))


def type_name(annotation: Any) -> str:
    """A type in TOML's words: ``integer | none``."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (types.UnionType, typing.Union):
        return " | ".join(map(type_name, arguments))
    if origin in (list, tuple):
        item = type_name(arguments[0])
        return f"list of ({item})" if "|" in item else f"list of {item}"
    if origin is dict or dataclasses.is_dataclass(annotation):
        return "table"
    names = {int: "integer", float: "number", str: "string", bool: "true | false"}
    return "none" if annotation is types.NoneType else names.get(annotation) or annotation.__name__


def _build(
    cls: type[T],
    tree: dict[str, Any],
    assignments: Sequence[Assignment],
    places: tuple[str, str],
    prefix: str = "",
) -> T:
    """``places``: the origins of the assignments, and of the tree."""
    _require_disjoint(cls, [assignment.path for assignment in assignments], places[0])
    tree = _plain(tree, (), places[1])
    for path, value in assignments:
        _assign(tree, Assignment(path, _plain(value, path, places[0])), places[0])
    assigned = {assignment.path for assignment in assignments}
    try:
        return pydantic.TypeAdapter(cls).validate_json(json.dumps(tree), strict=True)
    except pydantic.ValidationError as error:
        raise explain(error, tree, assigned, places, cls, prefix) from error


def _place(path: Path | None) -> str:
    return "on the command line" if path is None else f"at {path.name}"


def read_settings(path: Path | None) -> dict[str, Any]:
    """The content of a TOML or YAML file, by its suffix, unchecked; empty without a path."""
    if path is None:
        return {}
    kind = "YAML" if path.suffix in YAML else "TOML"
    if (path / "config.json").is_file():
        raise ConfigError(
            f"found the model {path} where a TOML or YAML file of settings may stand; write model={path}"
        )
    if path.is_dir():
        raise ConfigError(
            f"found the directory {path}; expected a TOML or YAML file of settings; give its path (of a run's "
            "directory, taut show --step N, taut resume, taut rollouts and taut page take the name)"
        )
    try:
        raw = files.read_regular(path, LARGEST)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; expected a {kind} file; give its path"
        ) from error
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path} is not UTF-8 at line {line}; expected UTF-8; convert it"
        ) from error
    settings = _read_yaml(path, text) if kind == "YAML" else _read_toml(path, text)
    if isinstance(method := settings.get("method"), str):
        settings["method"] = method.replace("-", "_")  # as the command is called
    return settings


def _read_yaml(path: Path, text: str) -> dict[str, Any]:
    from taut.io import yaml_tables

    try:
        return yaml_tables.read(text)
    except yaml_tables.NotRead as error:
        raise ConfigError(
            f"{path} cannot be read as YAML: {error}; correct it (lines of key: value)"
        ) from error


def _read_toml(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}; expected key = value lines") from error
    except (ValueError, RecursionError) as error:
        line = _line_not_held(text)
        raise ConfigError(
            f"{path} cannot be read at line {line}: {error}; expected key = value lines"
        ) from error


def _line_not_held(text: str) -> int:
    """The line with a value that Python cannot hold, such as an integer of 5,000 digits: tomllib does not report it."""
    lines = text.split("\n")

    def is_in_first(count: int) -> bool:
        try:
            tomllib.loads("\n".join(lines[:count]))
        except tomllib.TOMLDecodeError:  # cut in the middle of a value
            return False
        except (ValueError, RecursionError):
            return True
        return False

    return bisect.bisect_left(range(len(lines)), True, key=is_in_first)


def _parse_override(cls: type[Any], text: str) -> Assignment:
    key, equals, raw = text.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise ConfigError(
            f"found '{key_text([text])}' on the command line; expected key=value, as in seed=1"
        )
    return Assignment(path, _parse_value(annotation_of(cls, path), raw, ".".join(path)))


_CHARACTERS = re.compile(r"\[[^][{}\"'=,]+\]\S")
"""How a pattern of file names may begin: ``[ab]*.jsonl``."""
_BARE = re.compile(
    r"(?<=[\[,=])(\s*)(?!(?:true|false)\b)([^\s\d\"'{}\[\],=][^\s\"'{}\[\],=]*)(?=\s*[,\]}])"
)
"""A text without quotes in a list or table."""


def _parse_value(annotation: Any, raw: str, key: str) -> Any:
    """``raw`` as TOML, unless only the text itself is of a kind the field takes."""
    if raw == "none" and _accepts(annotation, None):
        return None
    is_text_alone = annotation in (None, str, str | None)
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except (ValueError, RecursionError):
        items = _bare_items(raw)
        if items and _accepts(annotation, items):
            return items
        begins = {"[": "a list", "{": "a table"}.get(raw.lstrip()[:1])
        if begins and not is_text_alone and not _CHARACTERS.match(raw):
            words = {"True": "true", "False": "false"}  # as Python has them
            quoted = _BARE.sub(lambda it: it[1] + words.get(it[2], f'"{it[2]}"'), raw)
            wrong = "texts in it need quotes" if quoted != raw else "a bracket or a comma is wrong"
            example = f"'{key}={quoted}'" if quoted != raw else "['a', 'b'] or {a = 1}"
            raise ConfigError(
                f"found {shortened(f'{key}={raw}')} on the command line; expected {begins}, and {wrong}; write TOML, "
                f"as in {example}"
            ) from None
        value: Any = raw
    else:
        value = parsed["value"] if set(parsed) == {"value"} else raw
    if _accepts(annotation, value):
        return value
    # Where the field also takes a list, a malformed list is reported as a list, not taken as text.
    if (is_text_alone or not isinstance(value, list | dict)) and _accepts(annotation, raw):
        return raw
    is_one = not isinstance(value, str) or "," not in value
    return [value] if is_one and _accepts(annotation, [value]) else value


def _bare_items(raw: str) -> list[str]:
    """The texts of ``[a,b]``; empty where a text has a character with another meaning in TOML."""
    inside = re.fullmatch(r"\s*\[([^][{}()\"'=\\]*)\]\s*", raw)
    items = [item.strip() for item in inside[1].split(",")] if inside else []
    if items and not items[-1]:
        items.pop()  # a comma at the end, as in TOML
    return items if all(items) else []


def _accepts(annotation: Any, value: Any) -> bool:
    if annotation is None:
        return False
    try:
        text = json.dumps(_plain(value, (), ""))
        pydantic.TypeAdapter(annotation).validate_json(text, strict=True)
    except (pydantic.ValidationError, ConfigError):
        return False
    return True


def _plain(value: Any, path: KeyPath, place: str) -> Any:
    """A value in JSON's types. Raises ConfigError, with the key, for a value that a configuration cannot hold."""
    if len(path) > DEEPEST:
        raise ConfigError(
            f"found '{key_text(path)}' {place}, nested deeper than {DEEPEST}; "
            "expected a key that 'taut COMMAND --help' lists"
        )
    if is_table(type(value)):
        return to_dict(value)
    if isinstance(value, Mapping):
        for key in value:
            _require_text(key, (*path, str(key)), place)
        return {key: _plain(item, (*path, key), place) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, (*path, index), place) for index, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if type(value).__module__ == "numpy" and hasattr(value, "item") and value.ndim == 0:
        value = value.item()
    if isinstance(value, date | time | datetime):
        return str(value)
    if isinstance(value, str):
        return _require_text(value, path, place)
    if isinstance(value, int) and not -WIDEST <= value < WIDEST:
        raise ConfigError(
            f"found an integer of {value.bit_length()} bits for '{key_text(path)}' {place}; expected at most 64"
        )
    if value is None or isinstance(value, int | float):
        return value
    raise ConfigError(
        f"found a value of type {type(value).__name__} {place} for '{key_text(path)}'; "
        "expected numbers, strings, booleans, lists and mappings; where a key names code, FILE.py:name"
    )


def _require_text(value: Any, path: KeyPath, place: str) -> str:
    """A string that can be written as UTF-8."""
    is_text = isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)
    if not is_text:
        raise ConfigError(
            f"found '{key_text(path)}' {place}, which is not Unicode; expected Unicode text"
        )
    return str(value)


def _flatten(
    cls: type[Any], mapping: Mapping[str, Any], prefix: tuple[str, ...]
) -> Iterator[Assignment]:
    for key, value in mapping.items():
        path = (*prefix, *str(key).split("."))
        if is_table(type(value)):
            value = to_dict(value)
        if isinstance(value, Mapping) and is_table(annotation_of(cls, path)):
            yield from _flatten(cls, value, path)
        else:
            yield Assignment(path, value)


def _require_disjoint(cls: type[Any], paths: Sequence[tuple[str, ...]], place: str) -> None:
    """Raise ConfigError for a key that is set twice, a key next to its own table, and a table set as a whole."""
    seen: set[tuple[str, ...]] = set()
    for path in paths:
        if path in seen:
            raise ConfigError(f"key '{key_text(path)}' is set twice {place}; expected once")
        seen.add(path)
        annotation = annotation_of(cls, path)
        if is_table(annotation):
            example = f"{'.'.join(path)}.{next(iter(fields_of(annotation)))}"
            raise ConfigError(
                f"'{'.'.join(path)}' {place} is a table; expected its keys one by one, as in {example}=..."
                + (f"; {hint}" if (hint := foreign_keys()[1].get(".".join(path))) else "")
            )
    for path in seen:
        for length in range(1, len(path)):
            if path[:length] in seen:
                raise ConfigError(
                    f"'{key_text(path[:length])}' and '{key_text(path)}' are both set {place}; expected one of them"
                )


def _assign(tree: dict[str, Any], assignment: Assignment, place: str) -> None:
    *parents, last = assignment.path
    for depth, parent in enumerate(parents, start=1):
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(
                f"'{key_text(assignment.path)}' {place} sets a key of '{key_text(parents[:depth])}', "
                f"which has the value {shown(tree)}; expected one of them"
            )
    tree[last] = assignment.value


def _leaves(cls: type[Any], prefix: str) -> Iterator[tuple[str, FieldInfo, str]]:
    """Every key that is no table: its name, field and documentation."""
    docs = documentation(cls)
    for name, info in fields_of(cls).items():
        annotation: Any = info.annotation
        if is_table(annotation):
            yield from _leaves(annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info, docs.get(name, "")


ALIASES_OF_DTYPES = {
    "bf16": "bfloat16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "single": "float32",
    "fp64": "float64",
    "f64": "float64",
    "double": "float64",
}
"""Names of compute dtypes elsewhere -> here."""
HALF_DTYPES = ("float16", "fp16", "f16", "half")


def read_dtype(name: object) -> object:
    """The name of a compute dtype here. Raises ValueError for float16, in which taut does not compute."""
    plain = name.removeprefix("torch.") if isinstance(name, str) else name
    if plain in HALF_DTYPES:
        raise ValueError(
            f"found dtype={name}, and taut does not compute in float16, which needs its loss scaled; expected "
            "bfloat16, float32 or float64; set dtype=bfloat16, or float32 where the hardware has no bfloat16"
        )
    return ALIASES_OF_DTYPES.get(plain, plain) if isinstance(plain, str) else name


ComputeDtype: TypeAlias = Annotated[
    Literal["float64", "float32", "bfloat16"],
    BeforeValidator(
        read_dtype,
        json_schema_input_type=Literal["float64", "float32", "bfloat16", "fp64", "fp32", "bf16"],
    ),
]
"""A compute dtype in a configuration, where bf16 and the like are accepted too."""


CADENCE = r"^(?P<number>0\.\d*[1-9]\d*|[1-9]\d*(\.\d+)?) ?(?P<unit>epoch|minute)s?$"


def require_cadence(value: object) -> object:
    """``value`` if it says how often something is done."""
    is_steps = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if is_steps or (isinstance(value, str) and re.match(CADENCE, value)):
        return value
    raise PydanticCustomError("cadence", "no cadence")


def read_cadence(every: int | str) -> tuple[str, str]:
    """The number of a valid ``Every`` as it is written, and its unit: step, epoch or minute."""
    if isinstance(every, int):
        return str(every), "step"
    found = re.match(CADENCE, every)
    assert found is not None, f"{every!r} was validated"
    return found["number"], found["unit"]


Every: TypeAlias = Annotated[int | str, BeforeValidator(require_cadence)]
"""How often something is done: a number of steps (0: never), ``0.5 epochs`` or ``30 minutes``."""
