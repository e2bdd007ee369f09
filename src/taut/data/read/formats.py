"""Formats of data files: JSONL, JSON, CSV and TSV, plain or compressed (.gz, .zst); parquet and Arrow.

    for number, record in read_records(path, "train.jsonl.gz"): ...

The number is the physical line for JSONL, the record's number from 1 for all other formats. Blank lines of a JSONL file
are skipped. A record that cannot be read is a DataError that names file and line, and the column of broken JSON; so is
a compressed or Arrow file that breaks off. Memory and time are bounded by limits on the size of a row of text with the
blank lines before it, and on the expansion of a compressed file.

Arrow writes a null for each key that another row has; nulls inside the objects of a column count as absent. A value of
Arrow's type ``arrow.json``, or of the feature Json in the metadata of ``datasets``, is text in the file and is read as
JSON, at any depth; nulls in it are those of the data. An Arrow row that Python cannot hold (text that is not UTF-8, a
year beyond 9999) is a DataError that names it. ``pyarrow`` is imported when needed: for Arrow, and to decompress .zst.

Does not know where files come from (``sources.py``) or what columns mean (``schema.py``).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from taut.data.read.json_io import listed, read_json, read_json_list, shown
from taut.errors import DataError

Records: TypeAlias = Iterator[tuple[int, Any]]
BUFFER = 2**17
"""Bytes that are decompressed at a time."""
BATCH = 256
"""Rows of an Arrow file read at a time: with pictures in them they are large."""
ARROW_FAILURES = (ValueError, ArithmeticError, LookupError, TypeError, NotImplementedError)
"""Errors of values that Python cannot hold: text that is not UTF-8, a year beyond 9999."""
STREAM_FAILURES = (OSError, EOFError, zlib.error)
"""Errors of compressed files that break off or are damaged."""
PLAIN = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
"""Formats of text, which may be compressed."""
COMPRESSIONS = (".gz", ".zst")
ROW_LIMIT = 2**27
"""Largest row of a file of text, with the blank lines before it, in bytes, of which a line counts LINE more."""
LINE = 256
EXPANSION, SMALL, WHOLE = 1000, 2**28, 2**31
"""A compressed file has at most EXPANSION times its bytes, or SMALL; JSON, which is read whole, at most WHOLE."""
FORMATS = (*PLAIN, ".parquet", ".arrow")
SUFFIXES = (*FORMATS, *(plain + compression for plain in PLAIN for compression in COMPRESSIONS))


def suffix_of(path: str | Path) -> str | None:
    """The suffix of a data file, as ``.jsonl.gz``; None for any other file."""
    name = Path(path).name.lower()
    return next(
        (suffix for suffix in sorted(SUFFIXES, key=len, reverse=True) if name.endswith(suffix)),
        None,
    )


def format_of(path: str | Path) -> str:
    """The suffix of a data file without that of its compression."""
    suffix = suffix_of(path)
    assert suffix is not None, "the path of a data file"
    return "." + suffix.split(".")[1].replace("ndjson", "jsonl")


def read_records(path: Path, name: str, *, as_lines: bool = False) -> Records:
    """The records of a file, numbered; ``name`` is what errors call the file.

    ``as_lines``: of JSONL the bytes of each line that is not blank, without its end. The error of a line of JSONL takes
    the record's place; other formats raise it, since they do not show where the next record begins.
    """
    number = 0
    try:
        reader = _READERS[format_of(path)]
        for number, record in reader(path, name):
            if reader is _read_lines and not as_lines:
                record = record_of(record, f"{name}:{number}")
            yield number, record
    except STREAM_FAILURES as error:
        if suffix_of(path) == format_of(path):
            raise
        raise DataError(
            f"{name}: the compressed file breaks off or is damaged after row {number} ({first_line(error)}); expected "
            "a whole file; get it again"
        ) from None


def columns_of(path: Path, name: str) -> list[str] | None:
    """The columns that all rows of a file have, sorted; None for JSON, whose rows have their own."""
    import pyarrow

    kind = format_of(path)
    if kind in (".csv", ".tsv"):
        with _open_text(path) as file:
            try:
                return sorted(next(csv.reader(file, delimiter=_delimiter(path)), []))
            except (csv.Error, UnicodeDecodeError, *STREAM_FAILURES):
                return None  # the error is raised with its row, when it is read
    if kind in (".parquet", ".arrow"):
        try:
            with _arrow_file(path) as (schema, _):
                return sorted(schema.names)
        except (pyarrow.ArrowException, OSError, *ARROW_FAILURES):
            return None  # as above
    return None


def _open(path: Path) -> io.BufferedReader:
    """The bytes of a file, decompressed."""
    name = path.name.lower()
    if name.endswith(".gz"):
        return io.BufferedReader(_Expanded(gzip.open(path), path), BUFFER)
    if name.endswith(".zst"):
        import pyarrow

        opened = pyarrow.input_stream(str(path), compression="zstd")
        return io.BufferedReader(_Expanded(opened, path), BUFFER)
    return path.open("rb")


class _Expanded(io.RawIOBase):
    """The bytes of a compressed file. Raises DataError where they are too many for its size."""

    def __init__(self, file: Any, path: Path) -> None:
        self.file, self.path = file, path
        self.left = _most_bytes(path)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        number = int(self.file.readinto(buffer))
        self.left -= number
        if self.left < 0:
            raise _too_large(self.path)
        return number

    def close(self) -> None:
        self.file.close()
        super().close()


def _most_bytes(path: Path) -> int:
    """Maximum size of a compressed file when it is expanded."""
    most = max(SMALL, EXPANSION * path.stat().st_size)
    return min(most, WHOLE) if format_of(path) == ".json" else most


def _too_large(path: Path) -> DataError:
    return DataError(
        f"{path.name}: its bytes expand to more than {_most_bytes(path):,}; decompress it if that is right"
    )


def _open_text(path: Path) -> io.TextIOWrapper:
    return io.TextIOWrapper(_open(path), encoding="utf-8-sig", newline="")


def _delimiter(path: Path) -> str:
    return "\t" if format_of(path) == ".tsv" else ","


def _read_lines(path: Path, name: str) -> Records:
    number = size = 0
    with _open(path) as file:
        while line := file.readline(ROW_LIMIT):
            number += 1
            if (size := size + len(line) + LINE) > ROW_LIMIT:
                raise _too_long(name, number)
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if content := line.rstrip():
                size = 0
                yield number, content


def _too_long(name: str, number: int) -> DataError:
    return DataError(
        f"{name}:{number}: more than {ROW_LIMIT:,} bytes, or {ROW_LIMIT // LINE:,} lines, before a row ends; cut it"
    )


def record_of(line: bytes, place: str) -> Any:
    """The record of a line of JSONL, or the DataError of one that cannot be read."""
    try:
        return read_json(_decode(line, place))
    except DataError as error:
        return error
    except ValueError as error:
        hint = "; if the file is one list, name it .json" if line[:1] == b"[" else ""
        return DataError(f"{_broken_json(error, place)}{hint}")


def as_line(record: Any, place: str) -> bytes:
    """A record as a line of JSONL, without the line's end."""
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{place}: the row cannot be written as JSON ({first_line(error)}); expected text, numbers, lists and "
            "objects; leave the column out of the file"
        ) from None


def _decode(raw: bytes, place: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: byte {error.start + 1} is not UTF-8; expected UTF-8; {_conversion(raw)}"
        ) from None


def _conversion(raw: bytes) -> str:
    """Command that converts a file of these bytes to UTF-8."""
    encoding = "UTF-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "CP1252"
    return f"convert it: iconv -f {encoding} -t UTF-8 FILE > NEW"


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
    with _open(path) as file:
        text = _decode(file.read().removeprefix(b"\xef\xbb\xbf"), name)
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
    number = size = 0

    def lines(file: io.TextIOWrapper) -> Iterator[str]:
        """The lines of one row, whose size is counted until it is complete."""
        nonlocal size
        while line := file.readline(ROW_LIMIT):
            if (size := size + len(line) + LINE) > ROW_LIMIT:
                raise _too_long(name, number + 1)
            yield line

    try:
        with _open_text(path) as file:
            # The header: a column named twice, or another delimiter, would give other rows than the user means.
            reader = csv.reader(lines(file), delimiter=_delimiter(path), strict=True)
            header = next(reader, [])
            if len(set(header)) < len(header):
                raise DataError(f"{name}: a column is named twice in {listed(header)}; rename one")
            other = next((mark for mark in ";\t|" if len(header) == 1 and mark in header[0]), None)
            if other is not None:
                raise DataError(
                    f"{name}: the header is one column, {shown(header[0])}, with {other!r} in it; expected cells "
                    f"separated by {_delimiter(path)!r}; write the file so"
                )
            for number, cells in enumerate((cells for cells in reader if cells), start=1):
                if len(cells) != len(header):
                    raise DataError(
                        f"{name}:{number}: {len(cells)} cells; expected {len(header)}, as in the header; put cells "
                        "that contain delimiters in double quotes"
                    )
                size = 0
                yield number, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise DataError(f"{name}:{number + 1}: broken CSV: {error}; correct the quoting") from None
    except UnicodeDecodeError:
        with _open(path) as raw:
            hint = _conversion(raw.read(100))
        raise DataError(f"{name}: not UTF-8 after row {number}; expected UTF-8; {hint}") from None


@contextmanager
def _arrow_file(path: Path) -> Iterator[tuple[Any, Iterator[Any]]]:
    """The schema and the batches of a parquet file, or of an Arrow IPC file or stream."""
    import pyarrow
    import pyarrow.parquet

    if format_of(path) == ".parquet":
        with pyarrow.parquet.ParquetFile(path) as file:
            groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
            if sum(group.total_byte_size for group in groups) > _most_bytes(path):
                raise _too_large(path)
            yield file.schema_arrow, file.iter_batches(batch_size=BATCH)
        return
    with pyarrow.OSFile(str(path)) as file:
        is_stream = file.read(6) != b"ARROW1"
        file.seek(0)
        reader = pyarrow.ipc.open_stream(file) if is_stream else pyarrow.ipc.open_file(file)
        batches = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
        pieces = (
            batch.slice(start, BATCH)
            for batch in batches
            for start in range(0, batch.num_rows, BATCH)
        )
        yield reader.schema, pieces


def _read_columns(path: Path, name: str) -> Records:
    def batches() -> Iterator[Any]:
        with _arrow_file(path) as (schema, found):
            column, times = next(iter(Counter(schema.names).most_common(1)), ("", 1))
            if times > 1:
                raise DataError(f"{name}: a column is named twice: {shown(column)}; rename one")
            yield from found

    kind = "parquet" if format_of(path) == ".parquet" else "complete Arrow"
    return read_arrow(batches(), name, kind)


_READERS = {
    ".jsonl": _read_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_columns,
    ".arrow": _read_columns,
}


def read_arrow(batches: Iterable[Any], name: str, kind: str) -> Records:
    """The rows of Arrow's batches or tables."""
    import pyarrow

    number = 0
    readers: dict[str, Callable[[Any], Any]] | None = None
    try:
        for batch in batches:
            if readers is None:  # the batches of a source have one schema
                readers = _json_readers(batch.schema)
            # All rows at once; one by one where that fails, to name the row that Python cannot hold.
            rows: list[Any] | None = None
            with suppress(*ARROW_FAILURES):
                rows = _to_rows(batch)
            for index in range(batch.num_rows):
                try:
                    row = rows[index] if rows is not None else _to_rows(batch.slice(index, 1))[0]
                except ARROW_FAILURES as error:
                    raise DataError(
                        f"{name}:{number + 1}: the row cannot be read ({first_line(error)}); correct it"
                    ) from None
                number += 1
                yield number, _as_record(row, readers, f"{name}:{number}")
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, *ARROW_FAILURES) as error:
        raise DataError(
            f"{name}: not a {kind} file that can be read after row {number} ({first_line(error)}); write it again"
        ) from None


def _to_rows(batch: Any) -> list[Any]:
    """Convert a batch to Python's objects."""
    # Arrow trusts the offsets in a file: a damaged one would read beyond its memory.
    batch.validate(full=True)
    rows: list[Any] = batch.to_pylist()
    return rows


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def _json_readers(schema: Any) -> dict[str, Callable[[Any], Any]]:
    """A reader of the JSON in its values, for each column that has any."""
    try:
        noted = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, LookupError, TypeError):  # not what ``datasets`` writes
        noted = {}
    readers = {field.name: _json_reader(field.type, _inside(noted, field.name)) for field in schema}
    return {name: read for name, read in readers.items() if read is not None}


def _inside(feature: Any, name: str) -> Any:
    """The feature of a struct's field; the fields of a Sequence of objects are lists of its own."""
    if not isinstance(feature, dict):
        return None
    if isinstance(feature.get("_type"), str):
        return {"_type": "List", "feature": _inside(feature.get("feature"), name)}
    return feature.get(name)


def _json_reader(kind: Any, feature: Any) -> Callable[[Any], Any] | None:
    """A reader of the JSON in values of a type, if there can be any. ``feature``: the type as ``datasets`` has it."""
    import pyarrow.types

    is_noted = isinstance(feature, dict) and feature.get("_type") == "Json"
    if is_noted or getattr(kind, "extension_name", "") == "arrow.json":
        return lambda value: read_json(value) if isinstance(value, str) else value
    if pyarrow.types.is_struct(kind):
        fields = {
            field.name: _json_reader(field.type, _inside(feature, field.name)) for field in kind
        }
        inner = {name: read for name, read in fields.items() if read is not None}
        return (lambda value: value and _with_json(value, inner)) if inner else None
    if pyarrow.types.is_nested(kind) and hasattr(kind, "value_type"):
        own = (
            feature.get("feature") if isinstance(feature, dict) else next(iter(feature or ()), None)
        )
        item = _json_reader(kind.value_type, own)
        return None if item is None else lambda values: values and [item(value) for value in values]
    return None


def _with_json(value: Any, readers: dict[str, Callable[[Any], Any]]) -> Any:
    """An object with the JSON in its fields read."""
    return value | {name: read(value[name]) for name, read in readers.items() if name in value}


def _as_record(row: Any, readers: dict[str, Callable[[Any], Any]], place: str) -> Any:
    record = {name: _without_nulls(value) for name, value in row.items()}
    try:
        return _with_json(record, readers) if readers else record
    except ValueError as error:
        raise DataError(
            f"{place}: a value of type Json is not JSON ({error}); expected JSON; correct it"
        ) from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
