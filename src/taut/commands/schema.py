"""``taut schema [METHOD]``: the JSON schema of a run's TOML file, with which an editor completes and checks its keys.

    taut schema dpo > dpo.schema.json

The first line of the file, for editors that use Taplo, is ``#:schema dpo.schema.json``. The schema requires no key,
because the command line may set the keys that the file leaves out. Of the rules of a class (conflicts.py) those that a
schema can express are in ``allOf``, the others as text in ``x-conflicts``. Imports no torch.
"""

from __future__ import annotations

import difflib
import json
import sys
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from taut.config import configclass, documentation
from taut.conflicts import Condition, Rule, default_of, lines_of, parse
from taut.errors import ConfigError
from taut.methods import METHODS, command_of


@configclass
class Schema:
    """Print a JSON schema."""

    method: str = "sft"
    """The training method whose runs the schema is for."""


def run(config: Schema) -> int:
    """Print the schema."""
    method = config.method.replace("-", "_")
    if method not in METHODS:
        near = difflib.get_close_matches(method, METHODS, n=1)
        hint = f"did you mean {near[0]}" if near else f"expected one of {', '.join(METHODS)}"
        raise ConfigError(f"found method={config.method}, which is no method; {hint}")
    sys.stdout.write(json.dumps(schema_of(method), indent=1, ensure_ascii=False) + "\n")
    return 0


def schema_of(method: str) -> dict[str, Any]:
    """The JSON schema of the TOML file of a run."""
    schema = TypeAdapter(METHODS[method]).json_schema(schema_generator=_Schema)
    schema["properties"]["method"] = {"const": method}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": f"A run of {command_of(method)}",
    }


class _Schema(GenerateJsonSchema):
    """pydantic's JSON schema with the documentation of keys and the rules of classes. Titles made of the names of
    fields are left out, and what is required: a key may stand on the command line.
    """

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def dataclass_schema(self, schema: Any) -> Any:
        cls, found = schema["cls"], super().dataclass_schema(schema)
        found.pop("required", None)
        for name, text in documentation(cls).items():
            found["properties"][name]["description"] = text
        others = []
        for line in lines_of(cls):
            text = line.replace("`", "")
            for rule in parse(line):
                if (broken := _files_that_break(rule, cls)) is None:
                    others.append(text)
                else:
                    found.setdefault("allOf", []).append({"not": broken, "$comment": text})
        return found | ({"x-conflicts": [*dict.fromkeys(others)]} if others else {})


def _files_that_break(rule: Rule, cls: type[Any]) -> dict[str, Any] | None:
    """A schema of the files that break a rule whatever the command line sets. None where a schema cannot say it."""
    settings = [*rule.keys, *rule.when]
    if not settings or any(one.judge or one.is_unset for one in settings):
        return None
    if any(one.judge or not one.operator for one in rule.wanted):
        return None
    found = [_tables_where(one, cls) for one in settings]
    found += [_tables_where(one, cls, is_broken=True) for one in rule.wanted]
    return {"allOf": found} if len(found) > 1 else found[0]


def _tables_where(one: Condition, cls: type[Any], *, is_broken: bool = False) -> dict[str, Any]:
    """A schema of tables in which a key is set so that a condition holds, or so that it does not: ``is_broken``."""
    *tables, name = one.key.split(".")
    default = default_of(cls, one.key)
    limits = {">": "exclusiveMinimum", ">=": "minimum", "<": "exclusiveMaximum", "<=": "maximum"}
    if not one.operator:
        is_plain = default is None or isinstance(default, bool | int | float | str)
        value: dict[str, Any] = {"not": {"const": default}} if is_plain else {}
    elif one.operator in limits:
        value = {"type": "number", limits[one.operator]: one.values[0]}
    else:
        value = {"enum": [*one.values]}
        if isinstance(default, list | dict):
            value = {"anyOf": [value, {"type": "array", "contains": value}]}
    if one.operator and (one.operator == "!=") != is_broken:
        value = {"not": value}
    found = {"properties": {name: value}, "required": [name]}
    for table in reversed(tables):
        found = {"properties": {table: found}, "required": [table]}
    return found
