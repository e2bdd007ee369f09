"""The formats of data files: JSONL, JSON, CSV and TSV, as they are or compressed (.gz, .zst); parquet and Arrow.

    for number, record in read(path, "train.jsonl.gz"): ...

The number is the physical line for JSONL, the record's number from 1 for all other formats. Blank lines of a JSONL file
are skipped. A record that cannot be read is a DataError that names file and line, and the column of broken JSON; so is
a compressed or Arrow file that breaks off.

Arrow writes a null for each key that another row has; nulls inside objects count as absent. An Arrow row that Python
cannot hold (text that is not UTF-8, a year beyond 9999) is a DataError that names it. ``pyarrow`` is imported when
needed: for Arrow, and to decompress .zst.

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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from taut.data.json_io import listed, read_json, read_json_list, shown
from taut.errors import DataError

Records: TypeAlias = Iterator[tuple[int, Any]]
BATCH = 256
"""Rows of an Arrow file read at a time: with pictures in them they are large."""
ARROW_FAILURES = (ValueError, ArithmeticError, LookupError, TypeError, NotImplementedError)
"""Errors of values that Python cannot hold: text that is not UTF-8, a year beyond 9999."""
STREAM_FAILURES = (OSError, EOFError, zlib.error)
"""Errors of compressed files that break off or are damaged."""
PLAIN = (".jsonl", ".json", ".csv", ".tsv")
"""Formats of text, which may be compressed."""
COMPRESSIONS = (".gz", ".zst")
FORMATS = (*PLAIN, ".parquet", ".arrow")
SUFFIXES = (*FORMATS, *(plain + compression for plain in PLAIN for compression in COMPRESSIONS))


def suffix_of(path: str | Path) -> str | None:
    """The suffix of a data file, as ``.jsonl.gz``; None: it has another."""
    name = Path(path).name.lower()
    return next(
        (suffix for suffix in sorted(SUFFIXES, key=len, reverse=True) if name.endswith(suffix)),
        None,
    )


def format_of(path: str | Path) -> str:
    """The suffix of a data file without that of its compression."""
    suffix = suffix_of(path)
    assert suffix is not None, "the path of a data file"
    return "." + suffix.split(".")[1]


def read(path: Path, name: str) -> Records:
    """The records of a file. ``name``: what errors call it."""
    return _to_the_end(_READERS[format_of(path)](path, name), path, name)


def read_lines(path: Path, name: str) -> Records:
    """The lines of a JSONL file that are not blank, as bytes, without what follows the JSON."""
    return _to_the_end(_jsonl_lines(path), path, name)


def _to_the_end(items: Records, path: Path, name: str) -> Records:
    """The items. Raises DataError where a compressed file breaks off."""
    number = 0
    try:
        for number, item in items:
            yield number, item
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
                return None  # told with its row when it is read
    if kind in (".parquet", ".arrow"):
        try:
            with _arrow_file(path) as (schema, _):
                return sorted(schema.names)
        except (pyarrow.ArrowException, OSError, *ARROW_FAILURES):
            return None  # as above
    return None


def _open(path: Path) -> gzip.GzipFile | io.BufferedReader:
    """The bytes of a file, decompressed."""
    name = path.name.lower()
    if name.endswith(".gz"):
        return gzip.open(path)
    if name.endswith(".zst"):
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    return path.open("rb")


def _open_text(path: Path) -> io.TextIOWrapper:
    return io.TextIOWrapper(_open(path), encoding="utf-8-sig", newline="")


def _delimiter(path: Path) -> str:
    return "\t" if format_of(path) == ".tsv" else ","


def _read_jsonl(path: Path, name: str) -> Records:
    for number, line in _jsonl_lines(path):
        yield number, record_of(line, f"{name}:{number}")


def _jsonl_lines(path: Path) -> Records:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                yield number, line.rstrip()


def record_of(line: bytes, place: str) -> Any:
    """The record of a line of JSONL, or the DataError of one that cannot be read."""
    try:
        return read_json(_decode(line, place))
    except DataError as error:
        return error
    except ValueError as error:
        return _broken_json(error, place)


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
    number = 0
    try:
        with _open_text(path) as file:
            reader = csv.reader(file, delimiter=_delimiter(path), strict=True)
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


@contextmanager
def _arrow_file(path: Path) -> Iterator[tuple[Any, Iterator[Any]]]:
    """The schema and the batches of a parquet file, or of an Arrow IPC file or stream."""
    import pyarrow
    import pyarrow.parquet

    if format_of(path) == ".parquet":
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file.schema_arrow, file.iter_batches(batch_size=BATCH)
        return
    with pyarrow.OSFile(str(path)) as file:
        is_stream = file.read(6) != b"ARROW1"
        file.seek(0)
        reader = pyarrow.ipc.open_stream(file) if is_stream else pyarrow.ipc.open_file(file)
        batches = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
        yield reader.schema, (piece for batch in batches for piece in _pieces(batch))


def _pieces(batch: Any) -> Iterator[Any]:
    return (batch.slice(start, BATCH) for start in range(0, batch.num_rows, BATCH))


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
    ".jsonl": _read_jsonl,
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
                            f"{name}:{number + 1}: the row cannot be read ({first_line(error)}); correct it"
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
            f"{name}: not a {kind} file that can be read after row {number} ({first_line(error)}); write it again"
        ) from None


def _to_rows(batch: Any) -> list[Any]:
    """Validated first: Arrow trusts the offsets in a file, and a damaged one would read beyond its memory."""
    batch.validate(full=True)
    rows: list[Any] = batch.to_pylist()
    return rows


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
