"""TOML and dotted overrides -> a frozen tree of dataclasses. Knows no component.

A configuration is a class made with ``configclass``; classes nest. ``load`` reads a TOML file and sets ``a.b=value``
on top; ``from_mapping`` does the same with Python values. Both refuse what no field reads, values of another kind than
the field's, and keys set twice. Values are checked, never rewritten: what is in force is what was written.

The value of an override is TOML (``1e-4``, ``true``, ``[1, 2]``); what is not TOML, or is of no kind the field takes,
is taken as the text it is (``out=1`` is a directory called 1). ``none`` unsets a field that may be unset. The texts of
a list need no quotes, which a shell would take away (``lora.targets=[q_proj,v_proj]``).

Imports nothing of ours but errors and ``explain.py``. Anyone may import it.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar, dataclass_transform

import pydantic
from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic.fields import FieldInfo

from taut import durable
from taut.errors import ConfigError
from taut.explain import KeyPath, explain, key_text, shown

T = TypeVar("T")

LARGEST = 2**24
"""Largest TOML file, in bytes."""
DEEPEST = 32
"""Keys and lists may be nested so deep."""
WIDEST = 2**63
"""TOML's integers are smaller in size."""


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
    return _build(cls, read_toml(path), assignments, ("on the command line", _place(path)))


def from_mapping(cls: type[T], mapping: Mapping[str, Any], path: Path | None = None) -> T:
    """The same from Python values: nested mappings, dotted keys and configclass instances, mixed as you like."""
    place = "in the arguments"
    assignments = list(_flatten(cls, mapping, ()))
    return _build(
        cls, read_toml(path), assignments, (place, place if path is None else _place(path))
    )


def replace(config: T, mapping: Mapping[str, Any]) -> T:
    """A configuration with other values for some keys, given as to ``from_mapping``."""
    cls, place = type(config), "in the arguments"
    return _build(cls, to_dict(config), list(_flatten(cls, mapping, ())), (place, place))


def override(config: T, overrides: Sequence[str]) -> T:
    """A configuration with ``a.b=value`` set on top."""
    cls, place = type(config), "on the command line"
    return _build(
        cls, to_dict(config), [_parse_override(cls, it) for it in overrides], (place,) * 2
    )


def restore(cls: type[T], saved: Mapping[str, Any], place: str) -> T:
    """The configuration that ``to_dict`` gave, from where it was kept: ``place`` is for mistakes in it."""
    return _build(cls, dict(saved), [], (place, place))


def home_path(text: str | os.PathLike[str]) -> Path:
    """The path of a text, ``~`` being the home of the user. ``~name`` is a file's name like any other: neither whether
    there is such a user nor where his home is can be learned by it.
    """
    path = Path(text)
    return path.expanduser() if path.parts[:1] == ("~",) else path


def user_path(text: str, key: str) -> Path:
    """The path that a key names, ``~`` expanded, whether or not anything is there."""
    try:
        path = home_path(text)
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, or no home
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{key}={shown(text)} cannot be looked up: {reason}; expected a path; correct it"
        ) from error
    return path


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
            "required"
            if info.is_required()
            else written(info.get_default(call_default_factory=True)),
            " ".join((info.description or "").replace("``", "`").split()),
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
    tree = _plain(tree, (), places[1])
    for path, value in assignments:
        _assign(tree, Assignment(path, _plain(value, path, places[0])), places[0])
    assigned = {assignment.path for assignment in assignments}
    try:
        return pydantic.TypeAdapter(cls).validate_json(json.dumps(tree), strict=True)
    except pydantic.ValidationError as error:
        keys = [key for key, _ in _leaves(cls, "")]
        raise ConfigError(explain(error, tree, assigned, places, keys)) from error


def _place(path: Path | None) -> str:
    return "on the command line" if path is None else f"at {path.name}"


def read_toml(path: Path | None) -> dict[str, Any]:
    """What a file says, unchecked; nothing without one."""
    if path is None:
        return {}
    try:
        raw = durable.read_regular(path, LARGEST)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; expected a TOML file; give its path"
        ) from error
    try:
        return tomllib.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path} is not UTF-8 at line {line}; expected UTF-8; convert it"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}; expected key = value lines") from error
    except (ValueError, RecursionError) as error:
        line = _line_not_held(raw.decode("utf-8"))
        raise ConfigError(
            f"{path} cannot be read at line {line}: {error}; expected key = value lines"
        ) from error


def _line_not_held(text: str) -> int:
    """Which line has what Python cannot hold, such as an integer of 5,000 digits: tomllib does not say."""
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
    return Assignment(path, _parse_value(_annotation(cls, path), raw))


def _parse_value(annotation: Any, raw: str) -> Any:
    """``raw`` as TOML, unless only the text itself is of a kind the field takes."""
    if raw == "none" and _accepts(annotation, None):
        return None
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except (ValueError, RecursionError):
        items = _bare_items(raw)
        return items if items and _accepts(annotation, items) else raw
    if set(parsed) != {"value"}:
        return raw
    value = parsed["value"]
    # Where a list would do too, a malformed one is told as a list and not taken for a text.
    may_be_text = annotation in (str, str | None) or not isinstance(value, list | dict)
    is_text = may_be_text and not _accepts(annotation, value) and _accepts(annotation, raw)
    return raw if is_text else value


def _bare_items(raw: str) -> list[str]:
    """The texts of ``[a,b]``; none where one has a character that may mean something else than itself."""
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
    """A value in JSON's words. Raises ConfigError, with the key, for what a configuration cannot hold."""
    if len(path) > DEEPEST:
        raise ConfigError(
            f"found '{key_text(path)}' {place}, nested deeper than {DEEPEST}; "
            "expected a key that 'taut COMMAND --help' lists"
        )
    if _is_table(type(value)):
        return to_dict(value)
    if isinstance(value, Mapping):
        for key in value:
            _require_text(key, (*path, str(key)), place)
        return {key: _plain(item, (*path, key), place) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, (*path, index), place) for index, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
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
        "expected numbers, strings, booleans, lists and mappings"
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
            raise ConfigError(f"key '{key_text(path)}' is set twice {place}; expected once")
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


def written(value: Any) -> str:
    """A value as ``describe`` writes defaults: text as it is, but white space in quotes; else JSON."""
    if isinstance(value, str) and value.strip():
        return value
    return "none" if value is None else json.dumps(value, ensure_ascii=False, default=to_dict)


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
"""What a compute dtype is called elsewhere."""
HALF_DTYPES = ("float16", "fp16", "f16", "half")


def read_dtype(name: object) -> object:
    """A compute dtype by the name it has here. Raises ValueError for float16, in which taut does not compute."""
    plain = name.removeprefix("torch.") if isinstance(name, str) else name
    if plain in HALF_DTYPES:
        raise ValueError(
            f"found dtype={name}, and taut does not compute in float16, which needs its loss scaled; expected "
            "bfloat16, float32 or float64; set dtype=bfloat16, or float32 where the hardware has no bfloat16"
        )
    return ALIASES_OF_DTYPES.get(plain, plain) if isinstance(plain, str) else name


ComputeDtype: TypeAlias = Annotated[
    Literal["float64", "float32", "bfloat16"], BeforeValidator(read_dtype)
]
"""A compute dtype in a configuration, where bf16 and the like are accepted too."""
