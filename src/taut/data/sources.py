"""Where rows come from: JSONL, JSON, CSV, TSV and parquet files, and Hugging Face data sets by
directory or name.

A source yields ``(number, record)``: the physical line for JSONL, the record's number from 1 for
all else. Blank lines of a JSONL file are passed over. What cannot be read is a DataError that names
file and line, and column for broken JSON. Arrow (parquet, Hugging Face) writes a null for each key
that another row has; nulls inside objects are taken as absent there.

The digest of a source covers its bytes, so that a cache keyed by it cannot be stale. Owns
``datasets`` and ``pyarrow``, imported when needed. Does not know what columns mean
(``columns.py``). Imported by ``dataset.py``.
"""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from taut.config import configclass
from taut.data.columns import Format
from taut.data.formats import shown
from taut.errors import DataError

Records: TypeAlias = Iterator[tuple[int, Any]]
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


@configclass
class Source:
    """One data set of a mixture."""

    path: str
    """A .jsonl, .json, .csv, .tsv or .parquet file, or a Hugging Face data set: its directory, or
    its name as owner/name or hf://name."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """How often each row is seen per epoch; 0.5 is half of the rows, chosen anew each epoch."""
    split: str | None = None
    """Hugging Face data sets: which split; needed where there is more than one."""
    name: str | None = None
    """Hugging Face data sets: which configuration."""
    revision: str | None = None
    """Hugging Face data sets by name: a commit, tag or branch."""
    format: Format | None = None
    """As data.format, for this source."""
    columns: dict[str, str] | None = None
    """As data.columns, for this source."""


@dataclass(frozen=True)
class Opened:
    """A source that exists, with the digest of its content."""

    path: str
    """As the user wrote it; sample ids begin with it."""
    digest: str
    _records: Any = field(repr=False)

    def records(self) -> Records:
        """Read it from the start."""
        yield from self._records()


def open_source(source: Source) -> Opened:
    """Find a source and hash its content. Nothing is parsed yet."""
    path = Path(source.path).expanduser()
    if path.is_file():
        return _open_file(source, path)
    if path.is_dir() or _is_hub_name(source.path):
        return _open_hugging_face(source, path)
    raise DataError(
        f"found no file or directory {source.path}; expected a {', '.join(SUFFIXES)} file, a data set directory, "
        "or the owner/name of a Hugging Face data set; check the path"
    )


def _open_file(source: Source, path: Path) -> Opened:
    for key in ("split", "name", "revision"):
        if getattr(source, key) is not None:
            raise DataError(
                f"data: {key} is set for the file {source.path}; expected it for Hugging Face "
                "data sets only"
            )
    readers = {
        ".jsonl": _read_jsonl,
        ".json": _read_json,
        ".csv": _read_csv,
        ".tsv": _read_csv,
        ".parquet": _read_parquet,
    }
    suffix = path.suffix.lower()
    if suffix not in readers:
        raise DataError(
            f"data: {source.path} ends in {suffix!r}; expected one of {', '.join(SUFFIXES)}; "
            "rename it"
        )
    return Opened(
        source.path, f"{suffix}:{_digest([path])}", lambda: readers[suffix](path, source.path)
    )


def _digest(paths: list[Path]) -> str:
    """The SHA-256 of the files' own."""
    total = hashlib.sha256()
    for path in paths:
        try:
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise DataError(
                f"data: cannot read {path}: {error.strerror}; check its permissions"
            ) from None
    return total.hexdigest()


def _read_jsonl(path: Path, name: str) -> Records:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                yield number, _parse_json(line.rstrip(), f"{name}:{number}")


def _parse_json(raw: bytes, place: str) -> Any:
    try:
        return json.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: byte {error.start + 1} is not UTF-8; expected UTF-8; convert the file"
        ) from None
    except json.JSONDecodeError as error:
        where = (
            f"column {error.colno}"
            if error.lineno == 1
            else f"line {error.lineno}, column {error.colno}"
        )
        raise DataError(
            f"{place}: broken JSON at {where}: {error.msg}; expected a JSON object; correct it"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{place}: JSON that cannot be read ({error}); expected a plain JSON object"
        ) from None


def _read_json(path: Path, name: str) -> Records:
    raw = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    try:
        rows = _parse_json(raw, name)
    except DataError as error:
        if "Extra data" in str(error):
            raise DataError(f"{error}; if it holds one object a line, name it .jsonl") from None
        raise
    if not isinstance(rows, list):
        raise DataError(f"{name}: the file holds {shown(rows)}; expected a list of objects")
    yield from enumerate(rows, start=1)


def _read_csv(path: Path, name: str) -> Records:
    csv.field_size_limit(sys.maxsize)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    number = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            header = next(reader, [])
            if len(set(header)) < len(header):
                raise DataError(
                    f"{name}: a column is named twice in {', '.join(header)[:80]}; rename one"
                )
            for number, cells in enumerate((cells for cells in reader if cells), start=1):
                if len(cells) != len(header):
                    raise DataError(
                        f"{name}:{number}: {len(cells)} cells; expected {len(header)}, as in the "
                        "header; "
                        "put cells that contain delimiters in double quotes"
                    )
                yield number, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise DataError(f"{name}:{number + 1}: broken CSV: {error}; correct the quoting") from None
    except UnicodeDecodeError:
        raise DataError(
            f"{name}: not UTF-8 after row {number}; expected UTF-8; convert the file"
        ) from None


def _read_parquet(path: Path, name: str) -> Records:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024):
            for record in batch.to_pylist():
                number += 1
                yield number, _without_nulls(record)
    except (pyarrow.ArrowException, OSError) as error:
        first = str(error).splitlines()[0]
        raise DataError(
            f"{name}: not a parquet file that can be read ({first}); write it anew"
        ) from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _is_hub_name(path: str) -> bool:
    """owner/name, unless a directory of that owner is here: then it is a path with a slip in it."""
    if path.startswith("hf://"):
        return True
    parts = path.split("/")
    is_path = len(parts) != 2 or not all(parts) or path[0] in ".~" or path.endswith(SUFFIXES)
    return not is_path and not Path(parts[0]).exists()


def _open_hugging_face(source: Source, path: Path) -> Opened:
    import datasets

    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(str(path))
        else:
            where = str(path) if path.is_dir() else source.path.removeprefix("hf://")
            loaded = datasets.load_dataset(
                where, source.name, revision=source.revision, keep_in_memory=False
            )
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error  # datasets says only that something went wrong
        first = (str(cause).splitlines() or [type(cause).__name__])[0]
        raise DataError(
            f"data: {source.path} cannot be loaded as a Hugging Face data set: {first}; "
            "check the path or name, and the configuration if it has several"
        ) from None
    table = _choose_split(loaded, source)
    files = [Path(entry["filename"]) for entry in table.cache_files]
    if not files:
        raise DataError(
            f"data: {source.path} is held in memory by datasets; unset "
            "HF_DATASETS_IN_MEMORY_MAX_SIZE"
        )
    digest = _digest(sorted(files)) + f":{source.name}:{source.split}:{len(table)}"
    return Opened(source.path, f"hf:{digest}", lambda: _read_table(table))


def _choose_split(loaded: Any, source: Source) -> Any:
    if not isinstance(loaded, dict):
        if source.split is not None:
            raise DataError(f"data: {source.path} has no splits; expected no split; remove it")
        return loaded
    split = source.split or (next(iter(loaded)) if len(loaded) == 1 else None)
    if split not in loaded:
        found = "no split is named" if split is None else f"there is no split {split!r}"
        raise DataError(
            f"data: {source.path}: {found}; expected one of {', '.join(loaded)}; "
            f'set it, as in data.train=[{{ path = "{source.path}", split = "{next(iter(loaded))}" }}]'
        )
    return loaded[split]


def _read_table(table: Any) -> Records:
    for number, record in enumerate(table.with_format(None), start=1):
        yield number, _without_nulls(record)
