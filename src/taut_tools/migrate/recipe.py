"""A recipe of another framework in one form, and the reader of settings files.

A ``Recipe`` has the framework, the method, and every setting with its place. Values are parsed as by the framework
itself: numbers, true and false, lists, tables. A table is a setting, and so is each of its entries
(``gradient_checkpointing_kwargs.use_reentrant``).

``read_settings`` reads YAML and JSON with the line of each key. A key that occurs twice keeps its last value, as in
every framework, and the repetition is reported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from taut.errors import ConfigError
from taut.io import files

Framework = Literal["trl", "open-r1", "swift", "megatron", "openrlhf", "llamafactory", "axolotl"]
Method = str
"""The framework's own name of a method."""

SUFFIXES = (".yaml", ".yml", ".json")
"""Suffixes of settings files."""
MAX_BYTES, MAX_VALUES, MAX_DEPTH, MAX_DIGITS = 2**18, 5_000, 50, 40
"""Maximum bytes of a file, values of its settings with references resolved, nesting, and characters of a number."""
WORDS: Mapping[str, Any] = {"true": True, "false": False, "none": None, "null": None}


class Setting(NamedTuple):
    """One option of a recipe."""

    key: str
    value: Any
    place: str
    """``FILE:LINE``."""
    obstacle: str = ""
    """Reason why the value is not known, such as a variable that the script does not assign."""


class Unknown(NamedTuple):
    """A key that is no option of the framework."""

    key: str
    place: str
    nearest: str | None
    is_in_file: bool
    """Whether it is in a settings file rather than on the command line."""


@dataclass(frozen=True)
class Recipe:
    """One run of a framework: its method and settings."""

    framework: Framework
    library: str
    """Package whose code runs; open-r1 trains with trl."""
    options_of: str
    """Release whose options decide which keys are unknown."""
    version: str
    """Version of the library."""
    version_reason: str
    method: Method
    method_reason: str
    settings: Mapping[str, Setting]
    model: str | None
    data: str | None
    place: str
    """Place of the command, or the file."""
    launcher: tuple[str, ...] = ()
    """Words before the framework's own: accelerate launch --config_file zero3.yaml."""
    is_script: bool = False
    """Whether the training script is started directly, and not by the framework's command."""
    has_command: bool = False
    """Whether the command that starts the run is known."""
    environment: Mapping[str, Setting] = field(default_factory=dict)
    """Variables that the script or the file sets for the command, by name."""
    expanded: frozenset[str] = frozenset()
    """Variables that the script itself uses."""
    unread: tuple[str, ...] = ()
    """A line for each part that could not be read."""
    assumed: tuple[str, ...] = ()
    """Assumptions under which it was read."""
    unknown: tuple[Unknown, ...] = ()

    def value(self, key: str, default: Any = None) -> Any:
        """A setting's value, or ``default`` if it is not set or unknown."""
        setting = self.settings.get(key)
        return default if setting is None or setting.obstacle else setting.value


def parsed(text: str) -> Any:
    """Parse a word of a command line, or a string of YAML."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for kind in (int, float) if len(text) <= MAX_DIGITS else ():
        with suppress(ValueError):
            return kind(text)
    if text[:1] in "{[":
        with suppress(ValueError):
            return json.loads(text)
    return text


def plain(value: Any) -> Any:
    """Parse the strings in a value of a file (``1e-5`` is a string in YAML)."""
    if isinstance(value, str):
        return parsed(value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def flattened(setting: Setting) -> list[Setting]:
    """A setting and, if it is a table, each of its entries."""
    if not isinstance(setting.value, dict):
        return [setting]
    inner = (
        Setting(f"{setting.key}.{key}", plain(value), setting.place)
        for key, value in setting.value.items()
    )
    return [setting, *(entry for part in inner for entry in flattened(part))]


def read_text(path: Path) -> str:
    """Read the text of a file. Raises ConfigError if it is none."""
    try:
        return files.read_text(path, MAX_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(
            f"{path} cannot be read ({why}); expected a recipe: YAML, JSON, a shell script or Python"
        ) from error


MERGE = "tag:yaml.org,2002:merge"
"""Tag of YAML's key <<, which gives a table the entries that it lacks."""


def _num_values(node: yaml.Node, known: dict[int, int], depth: int) -> int:
    """Count the values of a node with its references resolved. Raises ValueError for one beyond the limits."""
    if depth > MAX_DEPTH:
        raise ValueError(f"settings are nested deeper than {MAX_DEPTH}")
    is_number = node.tag.endswith((":int", ":float"))
    if is_number and isinstance(node, yaml.ScalarNode) and len(node.value) > MAX_DIGITS:
        raise ValueError(f"a number of {len(node.value):,} characters")
    if id(node) not in known:
        parts = [] if isinstance(node, yaml.ScalarNode) else node.value
        flat = chain.from_iterable(parts) if isinstance(node, yaml.MappingNode) else parts
        known[id(node)] = 1 + sum(_num_values(part, known, depth + 1) for part in flat)
    return known[id(node)]


def read_settings(path: Path) -> tuple[list[Setting], list[str]]:
    """Read the settings of a YAML or JSON file, and a line for each repeated key. Raises ConfigError."""
    text = read_text(path)
    # Read keys with their lines; entries that << merges come before the table's own.
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path}:1 holds no settings; expected `key: value` lines")
        if (number := _num_values(node, {}, 0)) > MAX_VALUES:
            raise ValueError(f"{number:.3g} values, with what references (*name) stand for")
        own = [pair for pair in node.value if pair[0].tag != MERGE]
        loader.flatten_mapping(node)
        merged = [pair for pair in node.value if not any(pair is one for one in own)]
        pairs = [
            (str(key.value), loader.construct_object(value, deep=True), key.start_mark.line + 1)
            for key, value in (*merged, *own)
        ]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else 1
        what = getattr(error, "problem", None) or str(error)
        if isinstance(error, yaml.reader.ReaderError):
            line = text.count("\n", 0, error.position) + 1
            what = f"it has the character U+{error.character:04X}"
        raise ConfigError(
            f"{path}:{line} is not YAML ({' '.join(str(what).split())}); put the line right"
        ) from error
    except ConfigError:
        raise
    except ValueError as error:  # an impossible date or number
        raise ConfigError(
            f"{path} has a value that cannot be read ({error}); correct it"
        ) from error
    settings: dict[str, Setting] = {}
    unread = []
    for number, (key, value, line) in enumerate(pairs):
        place = f"{path.name}:{line}"
        if key in settings and any(key == one for one, *_ in pairs[len(merged) : number]):
            unread.append(f"{place}: {key} is given again; the value of line {line} holds")
        settings[key] = Setting(key, plain(value), place)
    return [entry for setting in settings.values() for entry in flattened(setting)], unread
