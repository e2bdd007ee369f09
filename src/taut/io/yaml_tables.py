"""A YAML document as TOML would have it: tables, lists, texts, numbers and booleans.

Read by the core schema of YAML 1.2, in which values mean what they look like: ``1e-5`` is a number, only ``true`` and
``false`` are booleans (``no`` and ``on`` are texts), and a date is a text. ``null`` is None. As in TOML a key with dots
is a key of a table (``optim.learning_rate: 1e-5``), unless it is in quotes. Refused with their line are keys that are
set twice, keys that are no texts, tags, anchors, and a second document.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import yaml

SCALARS: list[tuple[re.Pattern[str], Callable[[str], Any]]] = [
    (re.compile(r"null|Null|NULL|~|"), lambda text: None),
    (re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    (re.compile(r"[-+]?[0-9]+"), int),
    (re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+"), lambda text: int(text, 0)),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)"), lambda text: float(text.replace(".", ""))),
    (re.compile(r"\.(nan|NaN|NAN)"), lambda text: float("nan")),
]
"""The plain scalars that are no texts: their patterns, and what makes the value."""


class NotRead(ValueError):
    """A document that is refused; the message says the fault and its line."""


def read(text: str) -> dict[str, Any]:
    """The table that a document is; an empty document is an empty table. Raises NotRead."""
    try:
        # refuse what TOML does not have, with its line
        for event in yaml.parse(text, yaml.SafeLoader):
            # an alias stands for more than is written; a tag may make an object
            if getattr(event, "anchor", None) is not None:
                raise _at(event, "found an anchor (& or *); expected the values themselves")
            tag = getattr(event, "tag", None)
            if tag not in (None, "!"):
                raise _at(event, f"found the tag {tag}; expected plain values")
        node = yaml.compose(text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark is not None else ""
        what = error.problem or error.context
        raise NotRead(f"{line}{what}") from None
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split()) or "it is nested too deeply"
        raise NotRead(reason[:200]) from None
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise _at(node, "found no keys; expected lines of key: value")
    return _table(node)


def _at(node: Any, reason: str) -> NotRead:
    return NotRead(f"line {node.start_mark.line + 1}: {reason}")


def _table(node: yaml.MappingNode) -> dict[str, Any]:
    table: dict[str, Any] = {}
    seen: set[str] = set()
    for key, value in node.value:
        fault = ""
        if not isinstance(key, yaml.ScalarNode):
            fault = "found a table or a list as a key; expected a text"
        elif not isinstance(_scalar(key), str) and not key.value.isdigit():  # 1 is "1", as in TOML
            fault = f"found the key {key.value[:80]!r}; expected a text"
        elif key.value in seen:
            fault = f"the key {key.value[:80]!r} is set twice; expected once"
        if fault:
            raise _at(key, fault)
        seen.add(key.value)
        parts = [key.value] if key.style else key.value.split(".")
        _set(table, parts, _value(value), key)
    return table


def _set(table: dict[str, Any], parts: list[str], value: Any, key: yaml.ScalarNode) -> None:
    """Set a key of a table; tables that several keys with dots name are joined."""
    first, *rest = parts
    if rest:
        inside: dict[str, Any] = {}
        _set(inside, rest, value, key)
        value = inside
    if first not in table:
        table[first] = value
        return
    before = table[first]
    if not (isinstance(before, dict) and isinstance(value, dict)):
        raise _at(
            key, f"the key {key.value[:80]!r} sets what another key sets; expected one of them"
        )
    for name, item in value.items():
        _set(before, [name], item, key)


def _value(node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _table(node)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item) for item in node.value]
    assert isinstance(node, yaml.ScalarNode)
    return _scalar(node)


def _scalar(node: yaml.ScalarNode) -> Any:
    """The value of a scalar; in quotes, or in a block, it is a text."""
    if node.style:
        return node.value
    for pattern, make in SCALARS:
        if pattern.fullmatch(node.value):
            try:
                return make(node.value)
            except ValueError as error:  # an integer of 5,000 digits
                raise _at(node, str(error)) from None
    return node.value
