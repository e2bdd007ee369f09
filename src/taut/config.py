"""TOML and dotted overrides -> a frozen tree of dataclasses. Knows no component.

A configuration is a class made with ``configclass``; classes nest. ``load`` reads a TOML file and sets ``a.b=value``
on top; ``from_mapping`` does the same with Python values. Both refuse what no field reads, values of another kind than
the field's, and keys set twice. Values are checked, never rewritten: what is in force is what was written.

The value of an override is TOML (``1e-4``, ``true``, ``[1, 2]``); what is not TOML, or is of no kind the field takes,
is taken as the text it is (``out=1`` is a directory called 1). ``none`` unsets a field that may be unset.

Imports nothing of ours but errors. Anyone may import it.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, dataclass_transform

import pydantic
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic.fields import FieldInfo

from taut.errors import ConfigError

T = TypeVar("T")

KeyPath = tuple[str | int, ...]

ERRORS_SHOWN = 3
"""How many mistakes one message names."""

EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a table",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_type": "an integer",
    "list_type": "a list",
    "string_type": "a string",
    "tuple_type": "a list",
}
"""pydantic's error types in our words."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def configclass(cls: type[T]) -> type[T]:
    """A frozen, keyword-only dataclass whose values are validated and whose unknown keys are refused.

    The string under a field is its documentation (``taut show`` prints it).
    """
    settings = pydantic.ConfigDict(
        extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )
    made: Any = pydantic_dataclass(frozen=True, kw_only=True, config=settings)(cls)
    _inherit_documentation(made)
    return made  # type: ignore[no-any-return]  # pydantic's own type for it is not type[T]


def _inherit_documentation(cls: type[Any]) -> None:
    """Give fields that come from a base class its documentation: pydantic reads that of the class alone."""
    for base in filter(_is_table, cls.__mro__[1:]):
        for name, info in fields_of(base).items():
            if fields_of(cls)[name].description is None:
                fields_of(cls)[name].description = info.description


class Row(NamedTuple):
    """One key of a configuration, for people."""

    key: str
    type: str
    default: str
    doc: str


class Assignment(NamedTuple):
    """A value for a key, from the command line or from Python."""

    path: tuple[str, ...]
    value: Any


def load(cls: type[T], path: Path | None, overrides: Sequence[str] = ()) -> T:
    """The configuration in a TOML file (or none) with ``a.b=value`` set on top."""
    assignments = [_parse_override(cls, text) for text in overrides]
    return _build(cls, _read_toml(path), assignments, ("on the command line", _place(path)))


def from_mapping(cls: type[T], mapping: Mapping[str, Any], path: Path | None = None) -> T:
    """The same from Python values: nested mappings, dotted keys and configclass instances, mixed as you like."""
    place = "in the arguments"
    assignments = list(_flatten(cls, mapping, ()))
    return _build(
        cls, _read_toml(path), assignments, (place, place if path is None else _place(path))
    )


def replace(config: T, mapping: Mapping[str, Any]) -> T:
    """A configuration with other values for some keys, given as to ``from_mapping``."""
    cls, place = type(config), "in the arguments"
    return _build(cls, to_dict(config), list(_flatten(cls, mapping, ())), (place, place))


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as JSON-able values."""
    plain = pydantic.TypeAdapter(type(config)).dump_python(config, mode="json")
    assert isinstance(plain, dict)
    return plain


def describe(cls: type[Any]) -> list[Row]:
    """Every key with its type, default and documentation, in the order of the fields."""
    return [
        Row(
            key,
            type_name(info.annotation),
            _default(info),
            " ".join((info.description or "").split()),
        )
        for key, info in _leaves(cls, "")
    ]


def type_name(annotation: Any) -> str:
    """A type as it is written in TOML's words: ``integer | none``."""
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
) -> T:
    """``places``: where the assignments come from, and where the tree does."""
    _require_disjoint(cls, [assignment.path for assignment in assignments], places[0])
    for assignment in assignments:
        _assign(tree, assignment, places[0])
    assigned = {assignment.path for assignment in assignments}
    try:
        text = json.dumps(tree, default=_plain)
        return pydantic.TypeAdapter(cls).validate_json(text, strict=True)
    except pydantic.ValidationError as error:
        raise ConfigError(_explain(cls, error, tree, assigned, places)) from error


def _place(path: Path | None) -> str:
    return "on the command line" if path is None else f"at {path.name}"


def _read_toml(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; expected a TOML file; give its path"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}; expected key = value lines") from error


def _parse_override(cls: type[Any], text: str) -> Assignment:
    key, equals, raw = text.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise ConfigError(f"found {text!r} on the command line; expected key=value, as in seed=1")
    return Assignment(path, _parse_value(_annotation(cls, path), raw))


def _parse_value(annotation: Any, raw: str) -> Any:
    """``raw`` as TOML, unless only the text itself is of a kind the field takes."""
    if raw == "none" and _accepts(annotation, None):
        return None
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return raw
    if set(parsed) != {"value"}:
        return raw
    value = parsed["value"]
    is_scalar = not isinstance(value, list | dict)
    is_text = is_scalar and not _accepts(annotation, value) and _accepts(annotation, raw)
    return raw if is_text else value


def _accepts(annotation: Any, value: Any) -> bool:
    if annotation is None:
        return False
    try:
        text = json.dumps(value, default=_plain)
        pydantic.TypeAdapter(annotation).validate_json(text, strict=True)
    except pydantic.ValidationError:
        return False
    return True


def _plain(value: Any) -> Any:
    """What JSON has no word for and a configuration may hold."""
    if _is_table(type(value)):
        return to_dict(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, date | time | datetime):
        return str(value)
    raise ConfigError(
        f"found a value of type {type(value).__name__} in the arguments; "
        "expected numbers, strings, booleans, lists and mappings"
    )


def _flatten(
    cls: type[Any], mapping: Mapping[str, Any], prefix: tuple[str, ...]
) -> Iterator[Assignment]:
    for key, value in mapping.items():
        path = (*prefix, *key.split("."))
        if _is_table(type(value)):
            value = to_dict(value)
        if isinstance(value, Mapping) and _is_table(_annotation(cls, path)):
            yield from _flatten(cls, value, path)
        else:
            yield Assignment(path, value)


def _require_disjoint(cls: type[Any], paths: Sequence[tuple[str, ...]], place: str) -> None:
    """No key twice, no key beside its own table, no table as a whole."""
    seen: set[tuple[str, ...]] = set()
    for path in paths:
        if path in seen:
            raise ConfigError(f"key '{'.'.join(path)}' is set twice {place}; expected once")
        seen.add(path)
        annotation = _annotation(cls, path)
        if _is_table(annotation):
            example = f"{'.'.join(path)}.{next(iter(fields_of(annotation)))}"
            raise ConfigError(
                f"'{'.'.join(path)}' {place} is a table; expected its keys one by one, as in {example}=..."
            )
    for path in seen:
        for length in range(1, len(path)):
            if path[:length] in seen:
                raise ConfigError(
                    f"'{'.'.join(path[:length])}' and '{'.'.join(path)}' are both set {place}; expected one of them"
                )


def _assign(tree: dict[str, Any], assignment: Assignment, place: str) -> None:
    *parents, last = assignment.path
    for depth, parent in enumerate(parents, start=1):
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(
                f"'{'.'.join(assignment.path)}' {place} sets a key of '{'.'.join(parents[:depth])}', "
                f"which has the value {tree!r}; expected one of them"
            )
    tree[last] = assignment.value


def fields_of(cls: type[Any]) -> dict[str, FieldInfo]:
    """The fields of a configclass, by name."""
    fields: dict[str, FieldInfo] = cls.__pydantic_fields__
    return fields


def _is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def _annotation(cls: type[Any], path: Sequence[str]) -> Any:
    """The type of the field a dotted key names; None where there is none."""
    annotation: Any = cls
    for name in path:
        if _is_table(annotation) and name in fields_of(annotation):
            annotation = fields_of(annotation)[name].annotation
        else:
            annotation = _value_type(annotation)
    return annotation


def _value_type(annotation: Any) -> Any:
    """The type of the values of ``dict[str, X] | None``; None for what is no such thing."""
    if typing.get_origin(annotation) is dict:
        return typing.get_args(annotation)[1]
    found = [_value_type(branch) for branch in typing.get_args(annotation)]
    return next((value for value in found if value is not None), None)


def _leaves(cls: type[Any], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, info in fields_of(cls).items():
        annotation: Any = info.annotation
        if _is_table(annotation):
            yield from _leaves(annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if value is None:
        return "none"
    return value if isinstance(value, str) and value else json.dumps(value, default=to_dict)


def _explain(
    cls: type[Any],
    error: pydantic.ValidationError,
    tree: Mapping[str, Any],
    assigned: set[tuple[str, ...]],
    places: tuple[str, str],
) -> str:
    """pydantic's errors in one line: unknown keys, values of another kind, missing keys."""
    found: dict[KeyPath, list[Any]] = {}
    for detail in error.errors(include_url=False):
        found.setdefault(_path_of(detail, tree), []).append(detail)
    deepest = {
        path: details
        for path, details in found.items()
        if not any(other[: len(path)] == path for other in found if len(other) > len(path))
        or details[0]["type"] == "value_error"
    }
    keys = [key for key, _ in _leaves(cls, "")]
    lines = []
    for path, details in deepest.items():
        is_assigned = any(path[: len(given)] == given for given in assigned)
        lines.append(_explain_one(path, details, places[0 if is_assigned else 1], keys))
    lines.sort(key=lambda line: ("unknown" not in line, "is missing" in line))
    more = len(lines) - ERRORS_SHOWN
    return "; also: ".join(lines[:ERRORS_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _path_of(detail: Any, tree: Any) -> KeyPath:
    """Where an error is in ``tree``: pydantic's location without the names of union branches."""
    path: list[str | int] = []
    for part in detail["loc"]:
        is_index = isinstance(tree, list | tuple) and isinstance(part, int)
        if is_index or (isinstance(tree, Mapping) and part in tree):
            path.append(part)
            tree = tree[part]
    if detail["type"] == "missing":
        path.append(detail["loc"][-1])
    return tuple(path)


def _first_key(key: str, keys: Sequence[str]) -> str:
    """``key``, or the first key of the table it names."""
    return next((known for known in keys if known.startswith(f"{key}.")), key)


def _explain_one(path: KeyPath, details: Sequence[Any], place: str, keys: Sequence[str]) -> str:
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    kinds = {detail["type"] for detail in details}
    if "value_error" in kinds:
        return str(details[0]["ctx"]["error"])
    if "missing" in kinds:
        wanted = _first_key(key, keys)
        return f"key '{key}' is missing; expected {wanted}=... on the command line or in the run's TOML file"
    if "unexpected_keyword_argument" in kinds:
        return f"unknown key '{key}' {place}; {_suggest(key, keys)}"
    kinds_wanted = [
        EXPECTED.get(detail["type"]) or detail["msg"].removeprefix("Input should be ")
        for detail in details
    ]
    expected = " or ".join(dict.fromkeys(kinds_wanted))
    given = json.dumps(details[0]["input"], ensure_ascii=False)
    return f"found {key}={given} {place}; expected {expected}; correct the value"


def _suggest(key: str, keys: Sequence[str]) -> str:
    last = key.rpartition(".")[2]
    same = [known for known in keys if known.rpartition(".")[2] == last]
    close = same or difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    return "'taut COMMAND --help' lists every key"
