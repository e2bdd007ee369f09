"""A model directory before the library reads it: its files are files, and config.json asks for nothing absurd.

The library trusts both: it waits for ever at a FIFO in the place of a file, and builds a list of as many layers, or a
table of as many labels, as config.json names. What is refused here is refused before anything is allocated.

May import errors and durable. ``load.py`` imports it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from taut import durable
from taut.errors import ModelError

MOST_LAYERS = 2_000
"""More than twice as many as the deepest published model has."""
MOST = 2**24
"""Of anything else that is counted: labels, experts, heads, positions of a learned table."""
LARGEST = 2**31 - 1
"""Largest token id, and largest context."""
SMALL = 2**20
"""A size that costs nothing, whatever the weights are."""
LAYERS = re.compile(r"(num|n)_(\w+_)?layers?|(encoder|decoder)_layers|depth")
COUNTS = re.compile(r"(num|n)_\w+")
SIZES = re.compile(
    r"((\w+_)?(hidden|intermediate|vocab)_size|head_dim|n_embd|n_inner|(num|n)_(\w+_)?heads?)"
)
"""Sizes of weights."""
CONTEXTS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
TOKEN_IDS = re.compile(r"(\w+_)?token_(id|ids|index)")
PARTS = re.compile(r"(text|vision|audio|decoder|encoder)_config|rope_(scaling|parameters)")
"""Keys whose values are tables."""


def require_readable(directory: Path, *, needs_weights: bool) -> None:
    """Raise ModelError for what the library could not read in bounded time and memory, or would misread."""
    for file in sorted(directory.iterdir()):
        _require_file(file)
    place = directory / "config.json"
    config = _read_table(place)
    for index in directory.glob("*.index.json"):
        files = _read_table(index).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
            raise _refusal(index, "weight_map is no table of file names")
        if odd := next((name for name in files.values() if Path(name).name != name), None):
            raise _refusal(index, f"it names the weights {odd[:100]!r}; expected files next to it")
    largest = None
    if needs_weights:
        weights = [file for kind in ("*.safetensors", "*.bin") for file in directory.glob(kind)]
        num_bytes = sum(file.stat().st_size for file in weights if file.is_file())
        largest = max(SMALL, 2 * num_bytes)  # a number takes at least 4 bits
    settings = {place: config}
    if (generation := directory / "generation_config.json").is_file():
        settings[generation] = _read_table(generation)
    for file, table in settings.items():
        for key, value in _items(table):
            if reason := _objection(key, value, largest):
                raise _refusal(file, f"found {key}={_shown(value)}; expected {reason}")


def _require_file(path: Path) -> None:
    if path.is_dir() or not path.exists():  # a link to nothing is as good as no file
        return
    try:
        durable.open_regular(path).close()
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read: {error.strerror or error}; copy the model again"
        ) from error


def _read_table(path: Path) -> dict[str, Any]:
    try:
        found = durable.read_json(path)
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read: {error.strerror or error}; copy the model again"
        ) from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({error}); copy it from the base model") from error
    if not isinstance(found, dict):
        raise _refusal(path, f"found a {type(found).__name__}; expected a JSON object")
    return found


def _items(table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every key of a table and of the tables and lists in it, with its value."""
    left: list[tuple[str, Any]] = list(table.items())
    while left:
        key, value = left.pop()
        yield key, value
        if isinstance(value, dict):
            left.extend((str(name), item) for name, item in value.items())
        elif isinstance(value, list):
            left.extend((key, item) for item in value)


def _objection(key: str, value: Any, largest: int | None) -> str:
    """What a value should be, where it is not that; empty if it is."""
    if isinstance(value, float) and math.isnan(value):
        return "a number"
    if key == "architectures" and not isinstance(value, list | str | None):
        return "a list of names"
    if PARTS.fullmatch(key) and not isinstance(value, dict | None):
        return "a table"
    if TOKEN_IDS.fullmatch(key) and not isinstance(value, list | None):
        is_id = type(value) is int and abs(value) <= LARGEST
        return "" if is_id else f"a token id, at most {LARGEST:,}"
    if not isinstance(value, int) or isinstance(value, bool):
        return ""
    if key in CONTEXTS and not 0 < value <= LARGEST:
        return f"a length from 1 to {LARGEST:,}"
    if LAYERS.fullmatch(key) and not 0 <= value <= MOST_LAYERS:
        return f"at most {MOST_LAYERS:,} layers"
    if SIZES.fullmatch(key) and (value < 0 or (largest is not None and value > largest)):
        return f"a size of weights that have at most {largest:,} numbers" if largest else "a size"
    if COUNTS.fullmatch(key) and value > MOST:
        return f"at most {MOST:,}"
    return ""


def _shown(value: Any) -> str:
    """A number or text, short; a table or list may be nested too deeply to be written."""
    return str(value)[:40] if isinstance(value, int | float | str) else f"a {type(value).__name__}"


def _refusal(path: Path, reason: str) -> ModelError:
    return ModelError(f"{path}: {reason}; copy it from the base model")
