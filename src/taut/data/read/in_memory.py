"""Rows given as Python objects in place of a path: they are written to a file, which the configuration then names.

    taut.sft(model="DIR", data={"train": rows, "eval": held_out}, out="runs/a")

Rows are a list of dicts, a ``datasets.Dataset``, a pandas DataFrame or a pyarrow Table; in a mixture they are the
``path`` of a source. A pandas Series, a numpy array and any other sequence, as a column of a Dataset, hold dicts or
texts, which are the column of the Series' name, or ``text``; fields of a structured array are columns. A list becomes
JSONL, the others parquet, under CACHE/rows, named by the SHA-256 of the file. The
configuration has ``rows:<name>``, so it can be saved, resumed and compared like any other; sample ids are ``rows:17``.
``datasets``, ``pandas`` and ``pyarrow`` are used only where an object of theirs is given.

Any other iterable is a stream (``stream.py``), for data.train alone: it is read while the run trains, and the
configuration has ``iterable:``.

Does not know which rows a method trains on (``schema.py``).
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

from taut.config import annotation_of
from taut.data.read.sources import IN_MEMORY, IN_MEMORY_FOLDER
from taut.data.settings import ITERABLE, Source
from taut.data.store.cache import directory_of
from taut.errors import DataError
from taut.io import files

SCALARS = (str, int, float, bool, type(None))
_iterables: list[Iterable[Any]] = []
"""The iterable that was given last, if any."""


def as_paths(
    cls: type[Any], keys: Mapping[str, Any], prefix: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The keys of a configuration of ``cls``, nested or dotted, with a path in place of rows."""
    paths = {}
    for key, value in keys.items():
        path = (*prefix, *str(key).split("."))
        if _names_source(annotation_of(cls, path)):
            paths[key] = _as_path(value, ".".join(path))
        elif isinstance(value, Mapping):
            paths[key] = as_paths(cls, value, path)
        else:
            paths[key] = value
    return paths


def _names_source(annotation: Any) -> bool:
    """Whether the value of a key may be, or contain, a Source."""
    return annotation is Source or any(map(_names_source, get_args(annotation)))


def _as_path(value: Any, key: str) -> Any:
    """A value of ``key`` with a path in place of rows."""
    if isinstance(value, Mapping) and "path" in value:
        return {**value, "path": _as_path(value["path"], f"{key}.path")}
    if isinstance(value, list | tuple):
        is_mixture = any(not isinstance(item, Mapping) or "path" in item for item in value)
        if not is_mixture and value:
            return _keep(".jsonl", lambda path: _write_list(path, value, key))
        return [_as_path(item, key) for item in value]
    if (values := _values_of(value, key)) is not None:
        name, items = values
        rows = [item if isinstance(item, Mapping) else {name: item} for item in items]
        return _keep(".jsonl", lambda path: _write_list(path, rows, key))
    if (batches := _batches_of(value, key)) is not None:
        return _keep(".parquet", lambda path: _write_parquet(path, batches, key))
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | Source):
        if key not in ("data.train", "data.train.path"):
            raise DataError(
                f"found an iterable for {key}; expected rows that can be read again, as a list; give list(...) of it"
            )
        _iterables[:] = [value]
        return ITERABLE
    return value


def given_iterable() -> Iterable[Any]:
    """The iterable that was given for data.train in this process."""
    if not _iterables:
        raise DataError(
            f"data.train={ITERABLE} was given from Python, and this process has none; expected it again; resume from "
            'Python, with data={"train": ITERABLE} and resume=True'
        )
    return _iterables[0]


def _values_of(value: Any, key: str) -> tuple[str, list[Any]] | None:
    """The values of a column, an array or another sequence, with the column's name; None for what is none of these."""
    is_array = hasattr(value, "tolist") and hasattr(value, "dtype")
    if is_array and value.ndim != 1:
        raise DataError(
            f"found an array of {value.ndim} dimensions for {key}; expected rows, which are one; give a list of dicts"
        )
    name = value.name if isinstance(getattr(value, "name", None), str) else "text"
    if is_array:
        names, values = getattr(value.dtype, "names", None), value.tolist()
        return name, [dict(zip(names, it, strict=True)) for it in values] if names else values
    is_sequence = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return (name, list(value)) if is_sequence else None


def _batches_of(value: Any, key: str) -> Iterator[Any] | None:
    """The rows of a table as Arrow's batches; None for anything else. Only a loaded library can have made a table."""
    loaded: Any = sys.modules
    pandas, pyarrow, datasets = map(loaded.get, ("pandas", "pyarrow", "datasets"))
    if datasets is not None and isinstance(value, datasets.DatasetDict):
        first = next(iter(value), "train")
        raise DataError(
            f"found a DatasetDict for {key}, with the splits {', '.join(value)}; expected one of them; give it as "
            f"splits[{first!r}]"
        )
    if datasets is not None and isinstance(value, datasets.Dataset):
        return (
            batch for table in value.with_format("arrow").iter(1024) for batch in table.to_batches()
        )
    # A DataFrame becomes a Table.
    if pandas is not None and isinstance(value, pandas.DataFrame):
        pyarrow = import_module("pyarrow")
        try:
            value = pyarrow.Table.from_pandas(value, preserve_index=False)
        except (pyarrow.ArrowException, TypeError, ValueError) as error:
            raise DataError(
                f"the DataFrame of {key} cannot be written: {' '.join(str(error).split())[:200]}; expected columns of "
                "one type each; correct it, or give a list of dicts"
            ) from None
    if pyarrow is not None and isinstance(value, pyarrow.Table):
        batches: Iterator[Any] = iter(value.to_batches())
        return batches
    return None


def _write_parquet(path: Path, batches: Iterator[Any], key: str) -> None:
    import pyarrow
    import pyarrow.parquet

    first = next(batches, None)
    if first is None:
        raise DataError(f"the table of {key} has no rows; expected at least one; give others")
    with pyarrow.parquet.ParquetWriter(path, first.schema) as writer:
        writer.write_batch(first)
        for batch in batches:
            writer.write_batch(batch)


def _write_list(path: Path, rows: Sequence[Mapping[str, Any]], key: str) -> None:
    with path.open("w", encoding="utf-8", errors="surrogatepass") as file:
        for number, row in enumerate(rows, start=1):
            require_json(row, f"rows:{number} of {key}", "")
            file.write(json.dumps(row, ensure_ascii=False, default=_without_numpy) + "\n")


def _without_numpy(value: Any) -> Any:
    """A value with Python's own numbers and lists in place of numpy's, as DataFrames give them."""
    return value.tolist() if type(value).__module__ == "numpy" else value


def require_json(value: Any, place: str, inside: str) -> None:
    """Raise DataError, with row and key, for a value that JSON cannot represent."""
    value = _without_numpy(value)
    if isinstance(value, Mapping):
        for name, item in value.items():
            if not isinstance(name, str):
                raise DataError(
                    f"{place}: {inside or 'the row'} has the key {name!r}, of type {type(name).__name__}; expected text"
                )
            require_json(item, place, f"{inside}.{name}" if inside else name)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            require_json(item, place, f"{inside}[{index}]")
    elif type(value) not in SCALARS or (isinstance(value, float) and not math.isfinite(value)):
        found = (
            f"{value}" if isinstance(value, float) else f"a value of type {type(value).__name__}"
        )
        raise DataError(
            f"{place}: {inside} is {found}; expected text, a finite number, a boolean, None, a list or "
            "a dict; convert it"
        )


def _keep(suffix: str, write: Any) -> str:
    """Write rows with ``write`` to a file that is named by its content. Returns their path in a configuration."""
    folder = directory_of(None) / IN_MEMORY_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(prefix=".", suffix=".partial", dir=folder)
    os.close(number)
    partial = Path(name)
    try:
        write(partial)
        kept = folder / f"{files.digest(partial)[:32]}{suffix}"
        if not kept.is_file():
            files.sync(partial)
            partial.replace(kept)
            files.sync(folder)
    finally:
        partial.unlink(missing_ok=True)
    return f"{IN_MEMORY}{kept.name}"
