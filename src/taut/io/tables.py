"""Tables that grow while a run goes on: rows are appended, and a kill loses none of them.

    writer = TableWriter(out / "rollouts", SCHEMA)
    writer.append([{"step": 3, "text": "..."}, ...])     passed to the system before it returns
    writer.close()
    read_tables(out / "rollouts")                        rows of the whole table, also while it is written

A table is a directory of parts, in the order of their numbers. The newest part is an Arrow IPC stream,
``000007.arrows``, to which batches are appended; where it has ``SEAL_BYTES`` it is sealed: written again as Parquet,
``000007.parquet``, renamed into its place, and the stream removed. A stream that ends within a batch, as its writer
was killed, is read up to there.

Every table has a column ``step``, and rows are appended in the order of steps. A run that goes on from an earlier
step first drops the rows after it (``drop_from``), so that no step is there twice. Its parts may have columns that the
earlier ones lack; each part is read with its own.

No torch here.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from taut.errors import DataError, OutputError
from taut.io import files

SEAL_BYTES = 32 * 2**20
"""Bytes of a stream from which on it is sealed."""
FORMAT = {b"taut_table": b"1"}
"""The metadata of every table's schema: another number is another layout of parts."""
OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd")
PART = re.compile(r"(\d{6})\.(arrows|parquet)")
GROUP_BYTES = 8 * 2**20
"""Bytes in memory of the rows that are compressed together in a sealed part."""
ROWS = 256
"""Rows of a batch that is read from a sealed part."""
NARROW_ROWS = 2**16
"""Rows of a batch where only short columns are read of all rows: a batch takes as long as thousands of its values."""


class _Stream:
    """The part that is being written: whole batches alone."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path, self.schema, self.size = path, schema, 0
        self._begin()
        self._file = files.open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        files.sync(path.parent)

    def _begin(self) -> None:
        self._waiting = io.BytesIO()
        """Bytes of the next batch in the file; the first batch begins with the schema."""
        self._writer = pa.ipc.new_stream(self._waiting, self.schema, options=OPTIONS)

    def append(self, batch: pa.RecordBatch) -> None:
        """Append a batch. Where the system cannot write it (OSError), the file is as it was."""
        try:
            self._writer.write_batch(batch)
            content, at = self._waiting.getvalue(), self.size
            while content:
                written = os.pwrite(self._file, content, at)
                content, at = content[written:], at + written
            self.size = at
        except BaseException:
            os.ftruncate(self._file, self.size)
            raise
        finally:
            self._waiting.seek(0)
            self._waiting.truncate()
            if self.size == 0:
                self._begin()  # the schema has not been written either

    def sync(self) -> None:
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


class TableWriter:
    """Appends rows to the table in ``directory``. Raises OutputError where it cannot be written."""

    def __init__(self, directory: Path, schema: pa.Schema, seal_bytes: int = SEAL_BYTES) -> None:
        self.directory, self.seal_bytes = directory, seal_bytes
        self.schema = schema.with_metadata(FORMAT)
        self._open: _Stream | None = None
        seal_parts(directory)

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows, which have the schema's columns. They survive a kill of this process once this returns; where it
        raises, the table is as it was.
        """
        if not rows:
            return
        try:
            batch = pa.RecordBatch.from_pylist(list(rows), self.schema)
        except UnicodeEncodeError:  # half a surrogate pair, as in a file name that is not UTF-8
            batch = pa.RecordBatch.from_pylist([_encodable(row) for row in rows], self.schema)
        with writing_to(self.directory):
            if self._open is None:
                names = (PART.fullmatch(path.name) for path in self.directory.glob("*"))
                last = max((int(name[1]) for name in names if name), default=0)
                path = self.directory / f"{last + 1:06}.arrows"
                self._open = _Stream(path, self.schema)
            self._open.append(batch)
        if self._open.size >= self.seal_bytes:
            self.close()

    def sync(self) -> None:
        """Force what was appended to the disk: a power failure loses none of it."""
        if self._open is not None:
            with writing_to(self.directory):
                self._open.sync()

    @property
    def num_bytes(self) -> int:
        """The bytes of the table's files."""
        return sum(path.stat().st_size for path in _parts(self.directory))

    def close(self) -> None:
        """Seal the part that is being written; another ``append`` begins a new one."""
        if self._open is None:
            return
        ended, self._open = self._open, None
        with writing_to(self.directory):
            ended.close()
            _seal(ended.path)


def _encodable(value: Any) -> Any:
    """A value with question marks for what UTF-8 cannot encode."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {key: _encodable(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(part) for part in value]
    return value


def seal_parts(directory: Path) -> None:
    """Make the table's directory, and seal what an earlier process was writing in it."""
    with writing_to(directory):
        directory.mkdir(parents=True, exist_ok=True)
        files.clear_leftovers(directory)
        for path in sorted(directory.glob("*.arrows")):
            _seal(path)


def drop_from(directory: Path, step: int) -> None:
    """Drop the rows of this step and later ones. Nobody may be writing the table."""
    seal_parts(directory)
    with writing_to(directory):
        for path in _parts(directory):
            with pq.ParquetFile(path) as parquet:
                last = max(last for _, last in _steps_of_groups(parquet))
            if last >= step:
                earlier = pc.field("step") < step
                _write_sealed(path, (batch.filter(earlier) for batch in _read_sealed(path)))


def read_tables(
    directory: Path, columns: Sequence[str] | None = None, step: int | None = None
) -> Iterator[pa.RecordBatch]:
    """The batches of a table, in the order in which they were written; of one that is being written, those that are
    whole. ``columns``: only these, null in a part that was written without; ``step``: only its rows, for which no more
    is read than the blocks that have some.

    Raises DataError where a part cannot be read or is of another version.
    """
    for path in _parts(directory):
        for batch in _read_part(path, columns, step):
            found = batch if step is None else batch.filter(pc.field("step") == step)
            if not found.num_rows:
                continue
            if columns is not None:  # one that the part lacks is null
                names, nulls = set(found.schema.names), pa.nulls(found.num_rows)
                arrays = [found[name] if name in names else nulls for name in columns]
                found = pa.RecordBatch.from_arrays(arrays, names=list(columns))
            yield found


def read_schemas(directory: Path) -> Iterator[tuple[Path, pa.Schema]]:
    """Each part of a table that has rows, with its columns."""
    for path in _parts(directory):
        with _reading(path):
            sealed = path.with_suffix(".parquet")
            if path.suffix == ".arrows" and path.exists():
                batch = next(_read_stream(path), None)
                if batch is not None:
                    yield path, batch.schema
            elif sealed.exists():
                with files.open_regular(sealed) as file:
                    yield sealed, pq.read_schema(file)


def _read_part(
    path: Path, columns: Sequence[str] | None, step: int | None, rows: int = ROWS
) -> Iterator[pa.RecordBatch]:
    wanted = None if columns is None else [*dict.fromkeys(("step", *columns))]
    with _reading(path):
        if path.suffix == ".arrows":
            try:
                yield from _read_stream(path, wanted)
                return
            except FileNotFoundError:  # it has been sealed just now
                path = path.with_suffix(".parquet")
        if path.exists():
            yield from _read_sealed(path, wanted, step, rows)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise DataError where a part cannot be read."""
    try:
        yield
    except (pa.ArrowException, OSError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"cannot read {path}: {reason}; expected a part of a table that a run has written; remove the file to do "
            "without its rows"
        ) from error


class TableReader:
    """Reads a table again and again while it is written. It remembers which steps each part has as long as the part's
    file is the same, so that a question about a step opens the parts that have it and no other.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._steps_of_part: dict[str, tuple[tuple[str, int, int], frozenset[int]]] = {}

    @property
    def steps(self) -> list[int]:
        """The steps of which the table has rows."""
        return sorted(frozenset[int]().union(*(steps for _, steps in self._parts())))

    def read(
        self, columns: Sequence[str] | None = None, step: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """``read_tables``; of columns those that the part has."""
        for path, steps in self._parts():
            if step is None or step in steps:
                for batch in _read_part(path, columns, step):
                    found = batch if step is None else batch.filter(pc.field("step") == step)
                    if found.num_rows:
                        yield found

    def rows_where(
        self,
        column: str,
        value: str,
        columns: Sequence[str] | None = None,
        most_steps: int | None = None,
    ) -> tuple[list[dict[str, Any]], int]:
        """The rows with this value in a column of texts, of the newest ``most_steps`` steps that have some, and the
        number of the other steps. Their other columns are read only of these steps.
        """
        # which steps have such rows, from two columns
        matches = pc.field(column) == value
        places = [
            (step, path)
            for path, _ in self._parts()
            for step in sorted(
                {
                    step
                    for batch in _read_part(path, ["step", column], None, NARROW_ROWS)
                    for step in batch.filter(matches)["step"].to_pylist()
                }
            )
        ]
        # the other columns, of the newest steps alone
        num_left = 0 if most_steps is None else max(0, len(places) - most_steps)
        found = []
        for step, path in places[num_left:]:
            wanted = None if columns is None else [*columns, column]
            for batch in _read_part(path, wanted, step):
                found += batch.filter((pc.field("step") == step) & matches).to_pylist()
        return found, num_left

    def _parts(self) -> Iterator[tuple[Path, frozenset[int]]]:
        """Every part, with its steps."""
        for path in _parts(self.directory):
            # a stream may have been sealed by now
            for place in dict.fromkeys((path, path.with_suffix(".parquet"))):
                try:
                    status = place.stat()
                except FileNotFoundError:
                    continue
                key = place.suffix, status.st_size, status.st_mtime_ns
                known = self._steps_of_part.get(path.stem)
                if known is None or known[0] != key:
                    batches = _read_part(place, ["step"], None, NARROW_ROWS)
                    found = (step for b in batches for step in pc.unique(b["step"]).to_pylist())
                    known = key, frozenset(found)
                    self._steps_of_part[path.stem] = known
                yield place, known[1]
                break


def _seal(stream: Path) -> None:
    """Turn a stream into a sealed part."""
    sealed = stream.with_suffix(".parquet")
    if not sealed.exists():
        _write_sealed(sealed, _read_part(stream, None, None))
    stream.unlink()


def _write_sealed(path: Path, batches: Iterable[pa.RecordBatch]) -> None:
    """Write a part, in row groups of about GROUP_BYTES. One without rows is removed."""
    groups = (pa.Table.from_batches(group) for group in _grouped(batches))
    first = next(groups, None)
    if first is None:
        path.unlink(missing_ok=True)
        return
    with (
        files.replacing(path) as partial,
        pq.ParquetWriter(partial, first.schema, compression="zstd") as parquet,
    ):
        for table in chain([first], groups):
            parquet.write_table(table)


def _read_stream(path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """The whole batches of a stream. Half a batch at its end is what a writer left that was killed, or writes now."""
    with files.open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            stream = pa.ipc.open_stream(file)
            _require_format(path, stream.schema)
            if columns is not None:
                file.seek(0)
                fields = [i for i, name in enumerate(stream.schema.names) if name in set(columns)]
                options = pa.ipc.IpcReadOptions(included_fields=fields)
                stream = pa.ipc.open_stream(file, options=options)
            while True:
                yield stream.read_next_batch()
        except StopIteration:
            return
        except (pa.ArrowInvalid, OSError):
            if file.tell() < size:  # not at its end: damaged
                raise


def _read_sealed(
    path: Path,
    columns: Sequence[str] | None = None,
    step: int | None = None,
    rows: int = ROWS,
) -> Iterator[pa.RecordBatch]:
    with files.open_regular(path) as file, pq.ParquetFile(file) as parquet:
        _require_format(path, parquet.schema_arrow)
        groups = [
            number
            for number, (first, last) in enumerate(_steps_of_groups(parquet))
            if step is None or first <= step <= last
        ]
        yield from parquet.iter_batches(rows, row_groups=groups, columns=columns)


def _steps_of_groups(parquet: pq.ParquetFile) -> list[tuple[int, int]]:
    """The first and the last step of each row group, from its statistics."""
    index = parquet.schema_arrow.get_field_index("step")
    groups = [parquet.metadata.row_group(i) for i in range(parquet.metadata.num_row_groups)]
    found = [group.column(index).statistics for group in groups]
    return [(int(one.min), int(one.max)) for one in found]


def _grouped(batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """The batches that have rows, several together up to GROUP_BYTES."""
    group: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if batch.num_rows:
            group.append(batch)
            size += batch.nbytes
        if size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _require_format(path: Path, schema: pa.Schema) -> None:
    found = (schema.metadata or {}).get(b"taut_table", b"none")
    if found != FORMAT[b"taut_table"]:
        raise DataError(
            f"{path} is a table of version {found.decode(errors='replace')[:20]}; expected version "
            f"{FORMAT[b'taut_table'].decode()}; read it with the taut that wrote it"
        )


def _parts(directory: Path) -> list[Path]:
    """The parts of a table in their order. A stream whose sealed part is there is left out: it was to be removed."""
    names = sorted(path.name for path in directory.glob("*") if PART.fullmatch(path.name))
    sealed = {name.removesuffix(".parquet") for name in names if name.endswith(".parquet")}
    return [
        directory / name
        for name in names
        if name.endswith(".parquet") or name.removesuffix(".arrows") not in sealed
    ]


def read_column(path: Path, name: str) -> list[bytes]:
    """Read the values that ``write_column`` wrote. Raises DataError where the file cannot be read."""
    try:
        with files.open_regular(path) as file, pq.ParquetFile(file) as parquet:
            column: list[bytes] = parquet.read(columns=[name])[name].to_pylist()
    except (pa.ArrowException, OSError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"cannot read {path}: {reason}; expected what a run has written") from error
    return column


def write_column(path: Path, name: str, values: Sequence[bytes]) -> None:
    """A Parquet file with one column of bytes."""
    with files.replacing(path) as partial:
        pq.write_table(pa.table({name: pa.array(values, pa.binary())}), partial, compression="zstd")


@contextmanager
def writing_to(directory: Path) -> Iterator[None]:
    """Raise OutputError where the system cannot write."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"cannot write {directory}: {error.strerror or error}; expected a place with room that may be written; "
            "free it or choose another out"
        ) from error
