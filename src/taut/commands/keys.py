"""What ``taut COMMAND --help`` and ``taut schema`` say of keys, without importing the classes that define them.

These classes stand next to what they configure, so importing them takes seconds and needs torch. ``make docs`` writes
their keys to keys.json and schema.json in this folder; a test holds both files to the classes.

    keys.json     {"tables": {"taut.methods.sft:Sft": {"steps": [type, default, doc], "data": "taut....:DataConfig"}},
                   "notes": {"taut.methods.sft:Sft": {"optim.learning_rate": "taut sft: ..."}}}
    schema.json   {"$defs": {"DataConfig": ...}, "methods": {"sft": ...}}, each a JSON schema

Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from taut.config import Row, describe


def rows_of(config: str) -> list[Row] | None:
    """Every key of a configuration, named as ``module:class``; None where the class is not of this package."""
    kept = _read("keys.json")
    if config not in kept["tables"]:
        return None
    notes = kept["notes"].get(config, {})
    return [_noted(row, notes) for row in _flattened(kept["tables"], config, "")]


def described(cls: type[Any]) -> list[Row]:
    """Every key of a configuration class, with the defaults of its method."""
    notes = cls.defaults_by_method() if hasattr(cls, "defaults_by_method") else {}
    return [_noted(row, notes) for row in describe(cls)]


def schema_of(method: str) -> dict[str, Any] | None:
    """The JSON schema of a run's TOML file; None where the method is not of this package."""
    kept = _read("schema.json")
    if method not in kept["methods"]:
        return None
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **kept["methods"][method],
        "$defs": kept["$defs"],
    }


def _flattened(tables: dict[str, Any], name: str, prefix: str) -> Iterator[Row]:
    for key, value in tables[name].items():
        if isinstance(value, str):
            yield from _flattened(tables, value, f"{prefix}{key}.")
        else:
            yield Row(f"{prefix}{key}", *value)


def _noted(row: Row, notes: dict[str, str]) -> Row:
    return row._replace(doc=f"{row.doc} {notes.get(row.key, '')}".rstrip())


def _read(name: str) -> Any:
    return json.loads(files("taut.commands").joinpath(name).read_text(encoding="utf-8"))
