"""Where records come from: JSONL, JSON, CSV, TSV and parquet files, and Hugging Face data sets by directory or name.

A source yields ``(number, record)``: the physical line for JSONL, the record's number from 1 for all other formats.
Blank lines of a JSONL file are skipped. A record that cannot be read is a DataError that names file and line, and the
column of broken JSON.

The digest of a source covers its bytes, so that a cache keyed by it cannot be stale. Each file also has a stamp. If it
has changed by the end of reading, DataError is raised, since the digest would name other content than was read.

Arrow writes a null for each key that another row has; nulls inside objects count as absent. An Arrow row that Python
cannot hold (text that is not UTF-8, a year beyond 9999) is a DataError that names it. ``datasets`` and ``pyarrow`` are
imported here, when needed, and used for Arrow only: their reader of JSON accepts NaN, and names a broken row by its
number among those that are not blank instead of its line.

Does not know what columns mean (``schema.py``).
"""

from __future__ import annotations

import csv
import hashlib
import json
import lzma
import os
import re
import sys
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import yaml
from pydantic import Field

from taut.config import configclass, home_path, user_path
from taut.data.json_io import listed, read_json, read_json_list, shown
from taut.data.schema import Format
from taut.errors import DataError
from taut.io import files, hub

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


@configclass
class Source:
    """One data set of a mixture."""

    path: str
    """A .jsonl, .json, .csv, .tsv or .parquet file, or a Hugging Face data set: its directory, or
    its name as owner/name or hf://name."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """How many times each row is seen per epoch; 0.5 is half of the rows, drawn again each epoch."""
    split: str | None = None
    """Hugging Face data sets: the split; required if there is more than one."""
    name: str | None = None
    """Hugging Face data sets: the configuration."""
    revision: str | None = None
    """Hugging Face data sets by name: a commit, tag or branch."""
    format: Format | None = None
    """As data.format, for this source."""
    columns: dict[str, str] | None = None
    """As data.columns, for this source."""
    system: str | None = None
    """As data.system, for this source; empty for none."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Values of the template's variables for the rows of this source alone; what is saved keeps those of
    data.chat_template_kwargs."""


class Stamp(NamedTuple):
    """The state of a file when its digest was taken."""

    path: Path
    size: int
    modified_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path, status: os.stat_result) -> Stamp:
        return cls(path, status.st_size, status.st_mtime_ns, status.st_ino)

    def change(self) -> str | None:
        """How the file has changed since; None: it has not."""
        try:
            now = Stamp.of(self.path, self.path.stat())
        except OSError as error:
            return f"{self.path} is gone ({error.strerror})"
        if now.size != self.size:
            return f"{self.path} had {self.size:,} bytes and has {now.size:,}"
        return None if now == self else f"{self.path} was written again"


def changes(stamps: Iterable[Stamp]) -> list[str]:
    """How files have changed since their stamps, by size, time and inode; nothing is read."""
    return [change for stamp in stamps if (change := stamp.change()) is not None]


@dataclass(frozen=True)
class Opened:
    """A source that exists, with the digest of its content."""

    path: str
    """As the user wrote it; sample ids begin with it."""
    digest: str
    stamps: tuple[Stamp, ...]
    """The stamp of each file that the digest covers."""
    _records: Any = field(repr=False)
    _lines: Any = field(default=None, repr=False)
    """The lines of a JSONL file; None: of another format."""

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """The records as lines of JSON, without line ends: of a JSONL file its own bytes. A DataError is raised for a
        value that JSON has no place for.
        """
        if self._lines is None:
            for number, record in self.records():
                yield number, _as_line(record, f"{self.path}:{number}")
            return
        self._require_unchanged()
        yield from self._lines()
        self._require_unchanged()

    def records(self) -> Records:
        """The records from the start. A DataError is raised at the end if they are not what the digest covers."""
        for number, record in self.attempts():
            if isinstance(record, DataError):
                self._require_unchanged()
                raise record
            yield number, record

    def attempts(self) -> Records:
        """The records, with the error of one that cannot be read in its place. Only JSONL goes on after an error: other
        formats do not show where the next record begins.
        """
        self._require_unchanged()
        try:
            yield from self._records()
        except (DataError, OSError) as error:
            self._require_unchanged()  # another process may have cut the file
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"{self.path}: cannot be read: {error.strerror or error}; expected a readable file"
            ) from None
        self._require_unchanged()

    def _require_unchanged(self) -> None:
        if changed := changes(self.stamps):
            raise DataError(
                f"{self.path}: the data changed while they were read: {changed[0]}; expected them to stay as they "
                "are; begin again when they are written"
            )


def open_source(source: Source) -> Opened:
    """Find a source and hash its content. Nothing is parsed yet."""
    path = user_path(source.path, "data")
    if not path.is_file():
        parts = source.path.split("/")
        # owner/name, unless a directory ``owner`` exists here: then it is a mistyped path
        is_name = len(parts) == 2 and all(parts) and source.path[0] not in ".~"
        is_name = is_name and not source.path.endswith(SUFFIXES) and not Path(parts[0]).exists()
        if path.is_dir() or is_name or source.path.startswith("hf://"):
            return _open_hugging_face(source, path)
        raise DataError(
            f"found no file or directory {source.path}; expected a {', '.join(SUFFIXES)} file, a data set directory, "
            "or the owner/name of a Hugging Face data set; check the path"
        )
    for key in ("split", "name", "revision"):
        if getattr(source, key) is not None:
            raise DataError(
                f"data: {key} is set for the file {source.path}; expected it for Hugging Face data sets only"
            )
    suffix = path.suffix.lower()
    if suffix not in _READERS:
        raise DataError(
            f"data: {source.path} ends in {suffix!r}; expected one of {', '.join(_READERS)}; rename it"
        )
    digest, stamps = _digest([path])
    if hub.is_pointer(path):
        raise DataError(
            f"data: {source.path} is a git-lfs pointer; expected the file that it stands for; fetch it: git lfs pull, "
            "or hf download --repo-type dataset"
        )
    return Opened(
        source.path,
        f"{suffix}:{digest}",
        stamps,
        lambda: _READERS[suffix](path, source.path),
        (lambda: _jsonl_lines(path)) if suffix == ".jsonl" else None,
    )


def folder_of(source: Source, named: str | None, key: str) -> str:
    """The folder of relative paths of images: ``named``, the setting ``key``; else that of the data."""
    if named is not None:
        return str(user_path(named, key).absolute())
    path = home_path(source.path).absolute()
    return str(path if path.is_dir() else path.parent)


def _digest(paths: list[Path]) -> tuple[str, tuple[Stamp, ...]]:
    """The SHA-256 of the files' digests, and the stamps of the files before they were read."""
    total, stamps = hashlib.sha256(), []
    for path in paths:
        try:
            with path.open("rb") as file:
                stamps.append(Stamp.of(path.absolute(), os.fstat(file.fileno())))
                total.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise DataError(
                f"data: cannot read {path}: {error.strerror}; check its permissions"
            ) from None
    return total.hexdigest(), tuple(stamps)


def _read_jsonl(path: Path, name: str) -> Records:
    for number, line in _jsonl_lines(path):
        place = f"{name}:{number}"
        try:
            yield number, read_json(_decode(line, place))
        except DataError as error:
            yield number, error
        except ValueError as error:
            yield number, _broken_json(error, place)


def _jsonl_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, without what follows the JSON, by number."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                yield number, line.rstrip()


def _as_line(record: Any, place: str) -> bytes:
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{place}: the row cannot be written as JSON ({_first_line(error)}); expected text, numbers, lists and "
            "objects; leave the column out of the file"
        ) from None


def _decode(raw: bytes, place: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: byte {error.start + 1} is not UTF-8; expected UTF-8; convert the file"
        ) from None


def _broken_json(error: ValueError, place: str) -> DataError:
    if not isinstance(error, json.JSONDecodeError):
        return DataError(
            f"{place}: JSON that cannot be read ({error}); expected a plain JSON object"
        )
    line = f"line {error.lineno}, " if error.lineno > 1 else ""
    return DataError(
        f"{place}: broken JSON at {line}column {error.colno}: {error.msg}; expected a JSON object; correct it"
    )


def _read_json(path: Path, name: str) -> Records:
    text = _decode(path.read_bytes().removeprefix(b"\xef\xbb\xbf"), name)
    if text.lstrip()[:1] == "[":
        number = 0
        try:
            for number, row in enumerate(read_json_list(text), start=1):
                yield number, row
        except ValueError as error:
            raise _broken_json(error, f"{name}:{number + 1}") from None
        return
    try:
        rows = read_json(text)
    except ValueError as error:
        broken = _broken_json(error, name)
        hint = (
            "; if it holds one object a line, name it .jsonl" if "Extra data" in str(error) else ""
        )
        raise DataError(f"{broken}{hint}") from None
    raise DataError(f"{name}: the file holds {shown(rows)}; expected a list of objects")


def _read_csv(path: Path, name: str) -> Records:
    csv.field_size_limit(sys.maxsize)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    number = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            header = next(reader, [])
            if len(set(header)) < len(header):
                raise DataError(f"{name}: a column is named twice in {listed(header)}; rename one")
            for number, cells in enumerate((cells for cells in reader if cells), start=1):
                if len(cells) != len(header):
                    raise DataError(
                        f"{name}:{number}: {len(cells)} cells; expected {len(header)}, as in the header; put cells "
                        "that contain delimiters in double quotes"
                    )
                yield number, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise DataError(f"{name}:{number + 1}: broken CSV: {error}; correct the quoting") from None
    except UnicodeDecodeError:
        raise DataError(
            f"{name}: not UTF-8 after row {number}; expected UTF-8; convert the file"
        ) from None


# -- Arrow: parquet files and Hugging Face data sets

Records: TypeAlias = Iterator[tuple[int, Any]]
BATCH = 256
"""Rows of an Arrow file read at a time: with pictures in them they are large."""
ARROW_FAILURES = (ValueError, ArithmeticError, LookupError, TypeError, NotImplementedError)
"""Errors of values that Python cannot hold: text that is not UTF-8, a year beyond 9999."""
LOAD_FAILURES = (
    OSError,
    ValueError,
    RuntimeError,
    LookupError,
    TypeError,
    AttributeError,
    ImportError,
    ArithmeticError,
    EOFError,
    yaml.YAMLError,
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
)
"""Errors of ``datasets``, and of the libraries it unpacks files with, on a directory that is no data set."""
CARDS = ("README.md", ".huggingface.yaml")
"""Files of a data set that name its data files."""
CARD_LIMIT = 2**22
"""Largest card, in bytes."""


def _read_parquet(path: Path, name: str) -> Records:
    import pyarrow.parquet

    def batches() -> Iterator[Any]:
        file = pyarrow.parquet.ParquetFile(path)
        counts = Counter(file.schema_arrow.names)
        column, times = counts.most_common(1)[0] if counts else ("", 1)
        if times > 1:
            raise DataError(f"{name}: a column is named twice: {shown(column)}; rename one")
        yield from file.iter_batches(batch_size=BATCH)

    return _read_arrow(batches(), name, "parquet")


_READERS = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}


def _open_hugging_face(source: Source, path: Path) -> Opened:
    """A split of a Hugging Face data set, by directory or name; its rows are in Arrow files."""
    import datasets

    if path.is_dir():
        _require_local(path)
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs is in the error too
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(str(path))
        else:
            where = str(path) if path.is_dir() else source.path.removeprefix("hf://")
            if not path.is_dir():
                hub.settle()
            loaded = datasets.load_dataset(
                where, source.name, revision=source.revision, keep_in_memory=False
            )
    except (*LOAD_FAILURES, datasets.exceptions.DatasetsError) as error:
        if not path.is_dir() and (reason := hub.explain(where, error, "dataset")):
            raise DataError(f"data: {source.path}: {reason}") from None
        cause = error.__cause__ or error  # datasets says only that something went wrong
        raise DataError(
            f"data: {source.path} cannot be loaded as a Hugging Face data set: {_first_line(cause)}; "
            "check the path or name, and the configuration if it has several"
        ) from None
    finally:
        datasets.logging.set_verbosity(verbosity)
    table: Any = loaded
    if isinstance(loaded, dict):
        split = source.split or (next(iter(loaded)) if len(loaded) == 1 else None)
        if split not in loaded:
            fault = "no split is named" if split is None else f"there is no split {split!r}"
            raise DataError(
                f"data: {source.path}: {fault}; expected one of {', '.join(loaded)}; set it, as in "
                f'data.train=[{{ path = "{source.path}", split = "{next(iter(loaded))}" }}]'
            )
        table = loaded[split]
    elif source.split is not None:
        raise DataError(f"data: {source.path} has no splits; expected no split; remove it")
    if not table.cache_files:
        raise DataError(
            f"data: {source.path} is held in memory by datasets; unset HF_DATASETS_IN_MEMORY_MAX_SIZE"
        )
    digest, stamps = _digest(sorted(Path(entry["filename"]) for entry in table.cache_files))
    digest = f"hf:{digest}:{source.name}:{source.split}:{len(table)}"

    def read() -> Records:
        """The rows as they are in the files: images and audio are not decoded."""
        return _read_arrow(table.with_format("arrow").iter(BATCH), source.path, "Hugging Face")

    return Opened(source.path, digest, stamps, read)


def _require_local(directory: Path) -> None:
    """Raise DataError where a directory has a file that would block, or a card that names data outside of it: the
    library would fetch addresses.
    """
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    for folder, _, names in os.walk(directory):
        for name in names:
            if not (file := Path(folder, name)).exists():
                continue  # a link to nothing
            try:
                files.open_regular(file).close()
            except OSError as error:
                raise DataError(
                    f"data: {file} cannot be read: {error.strerror}; expected a regular file; remove it from the data"
                ) from None
    for card in filter(Path.exists, (directory / name for name in CARDS)):
        try:
            text = files.read_regular(card, CARD_LIMIT).decode("utf-8")
            if card.suffix == ".md":
                block = REGEX_YAML_BLOCK.search(text)
                text = block[2] if block else ""
            for pattern in _patterns(text):
                is_inside = not re.search(r"://|::|^[/~]", pattern)
                if not is_inside or ".." in Path(pattern).parts:
                    raise DataError(
                        f"data: {card} names the data {pattern[:100]!r}; expected files in {directory}; get the data "
                        "first, and name the file or directory"
                    )
        except OSError as error:
            raise DataError(
                f"data: {card} cannot be read: {error.strerror}; correct it, or remove it"
            ) from None
        except (ValueError, RecursionError, yaml.YAMLError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"data: {card} cannot be read: {_first_line(error)}; expected YAML; correct it, or remove it"
            ) from None


def _patterns(text: str) -> Iterator[str]:
    """The file names, patterns and folders that the configurations of a card, in YAML, name as data."""
    if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text, yaml.SafeLoader)):
        raise ValueError(
            "it repeats parts by reference (*name), which may stand for any number of parts"
        )
    card = yaml.safe_load(text)
    configs = card.get("configs") if isinstance(card, dict) else None
    left: list[Any] = [
        config.get(key)
        for config in (configs if isinstance(configs, list) else [])
        if isinstance(config, dict)
        for key in ("data_files", "data_dir")
    ]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)


def _read_arrow(batches: Iterable[Any], name: str, kind: str) -> Records:
    """The rows of Arrow's batches or tables."""
    import pyarrow

    number = 0
    try:
        for batch in batches:
            try:
                rows = _to_rows(batch)
            except ARROW_FAILURES:
                # one by one, to name the row that Python cannot hold
                for index in range(batch.num_rows):
                    try:
                        (row,) = _to_rows(batch.slice(index, 1))
                    except ARROW_FAILURES as error:
                        raise DataError(
                            f"{name}:{number + 1}: the row cannot be read ({_first_line(error)}); correct it"
                        ) from None
                    number += 1
                    yield number, _without_nulls(row)
                continue
            for row in rows:
                number += 1
                yield number, _without_nulls(row)
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, *ARROW_FAILURES) as error:
        raise DataError(
            f"{name}: not a {kind} file that can be read after row {number} ({_first_line(error)}); write it again"
        ) from None


def _to_rows(batch: Any) -> list[Any]:
    """Validated first: Arrow trusts the offsets in a file, and a damaged one would read beyond its memory."""
    batch.validate(full=True)
    rows: list[Any] = batch.to_pylist()
    return rows


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
