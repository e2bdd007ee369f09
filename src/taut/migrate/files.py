"""Files of settings, YAML or JSON, with the line of each key.

A key given twice keeps its last value, as in every framework, and is told. Imports errors and ``recipe.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import yaml

from taut.errors import ConfigError
from taut.io import files
from taut.migrate.recipe import Setting, flattened, plain

SUFFIXES = (".yaml", ".yml", ".json")


class FileSettings(NamedTuple):
    """A file of settings."""

    settings: list[Setting]
    unread: list[str]


def read_text(path: Path) -> str:
    """The file's text. Raises ConfigError where there is none."""
    try:
        return files.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(
            f"{path} cannot be read ({why}); expected a recipe: YAML, JSON or a shell script"
        ) from error


def read_settings(path: Path) -> FileSettings:
    """The settings of a YAML or JSON file. Raises ConfigError for one that is neither."""
    loader = yaml.SafeLoader(read_text(path))
    loader.name = path.name
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path}:1 holds no settings; expected `key: value` lines")
        pairs = [
            (str(key.value), loader.construct_object(value, deep=True), key.start_mark.line + 1)
            for key, value in node.value
        ]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else 1
        what = getattr(error, "problem", None) or str(error)
        raise ConfigError(
            f"{path}:{line} is not YAML ({' '.join(str(what).split())}); put the line right"
        ) from error
    finally:
        loader.dispose()
    settings: dict[str, Setting] = {}
    unread = []
    for key, value, line in pairs:
        place = f"{path.name}:{line}"
        if key in settings:
            unread.append(f"{place}: {key} is given again; the value of line {line} holds")
        settings[key] = Setting(key, plain(value), place)
    return FileSettings([one for part in settings.values() for one in flattened(part)], unread)
