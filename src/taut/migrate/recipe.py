"""A recipe of another framework, in one shape: framework, method, and every setting with the place where it stands.

Values are what the framework's parser would make of the text: numbers, true and false, lists, tables. A table is a
setting of its own and so is each thing in it (``gradient_checkpointing_kwargs.use_reentrant``).

Imports errors only. Everything in ``compat`` imports it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Framework = Literal["trl", "open-r1", "swift", "openrlhf"]
Method = Literal["sft", "dpo", "grpo", "ppo", "kto", "rloo", "reward", "other"]

WORDS: Mapping[str, Any] = {"true": True, "false": False, "none": None, "null": None}


class Setting(NamedTuple):
    """One option of a recipe."""

    key: str
    value: Any
    place: str
    """``FILE:LINE``."""
    obstacle: str = ""
    """Why the value is not known: a variable that the script does not assign."""


class Unknown(NamedTuple):
    """A key that the framework has no option of."""

    key: str
    place: str
    nearest: str | None
    is_in_file: bool
    """It stands in a file of settings, not on the command line."""


@dataclass(frozen=True)
class Recipe:
    """What a framework is asked to do."""

    framework: Framework
    library: str
    """The package whose code runs: open-r1 trains with trl."""
    options_of: str
    """The release by whose options keys are known or not."""
    version: str
    """Of the library."""
    version_reason: str
    method: Method
    method_reason: str
    settings: Mapping[str, Setting]
    model: str | None
    data: str | None
    place: str
    """Where the command stands, or the file."""
    launcher: tuple[str, ...] = ()
    """The words before the framework's own: accelerate launch --config_file zero3.yaml."""
    is_script: bool = False
    """The training script was started directly, not by the framework's command."""
    has_command: bool = False
    """The words that start it are known."""
    environment: Mapping[str, Setting] = field(default_factory=dict)
    """Variables that the script or the file sets for the command, by name."""
    unread: tuple[str, ...] = ()
    """What could not be resolved, one a line."""
    unknown: tuple[Unknown, ...] = ()

    def value(self, key: str, default: Any = None) -> Any:
        """A setting's value; ``default`` where it is not set or not known."""
        setting = self.settings.get(key)
        return default if setting is None or setting.obstacle else setting.value


def parsed(text: str) -> Any:
    """The value that a word on a command line, or a text in YAML, stands for."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    if text[:1] in "{[":
        with suppress(json.JSONDecodeError):
            return json.loads(text)
    return text


def plain(value: Any) -> Any:
    """A value of a file, with the texts in it parsed (``1e-5`` is a text in YAML)."""
    if isinstance(value, str):
        return parsed(value)
    if isinstance(value, list):
        return [plain(one) for one in value]
    return value


def flattened(setting: Setting) -> list[Setting]:
    """The setting and, of a table, each thing in it."""
    if not isinstance(setting.value, dict):
        return [setting]
    inner = (
        Setting(f"{setting.key}.{key}", plain(value), setting.place)
        for key, value in setting.value.items()
    )
    return [setting, *(one for part in inner for one in flattened(part))]
