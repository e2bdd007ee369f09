"""A stream: rows that arrive while a run trains, in windows that are recorded on disk.

    window k     the rows [k W, (k + 1) W), W = data.streaming_window; the last has fewer, where the stream ends
    position p   of the run's samples: window k holds the positions [first_k, first_k + size_k), and its samples are
                 permuted among themselves by a keyed permutation of (seed, k)

So the samples of a step are a pure function of the rows, the seed and the step; there is no shuffle buffer to save.
Where answers are compared, rows take the place of samples.

    CACHE/streams/<run>/record.json         key of the settings, windows that are kept, files that were read
                        first.jsonl         the first rows, unchanged
                        00000000/ ...       the windows that are kept, a shard each (cache.py)

One process records (``Recorder``): its thread reads rows, tokenizes a window and writes it, one window ahead of
training. A window is a shard on disk before a step uses it, so a resumed run reads recorded windows from disk, and
reads the stream after the last one. Each window has the digest of all windows up to it. A checkpoint keeps the digest
of its last window, and a run that finds another one there is refused.

The first window is kept for checks, the stop check and the golden prompts. So are the windows from the oldest
checkpoint on (``Recorder.floor``); the others are removed. ``Preview`` shows the first rows of a stream: it records
nothing and does not wait.

Does not know where rows come from (``read/stream_reader.py``), or steps (``methods/method.py``).
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import pydantic
from typing_extensions import TypedDict

from taut.data.dataset import (
    Dataset,
    SourceShards,
    key_of,
    limits_of,
    require_fitting,
    sources,
)
from taut.data.large_epoch import keyed_permutation
from taut.data.read.in_memory import given_iterable
from taut.data.read.sources import IN_FILE
from taut.data.read.stream_reader import (
    START,
    FolderRows,
    IterableRows,
    Position,
    SeenFiles,
    StreamReader,
    StreamRow,
)
from taut.data.render.render import Renderer
from taut.data.rows.schema import AnyRow, Columns, read_kept
from taut.data.settings import ITERABLE, DataConfig, Kind
from taut.data.store import cache
from taut.data.store.shards import Shard, Shards
from taut.data.tokenize import TokenizeJob, tokenize_records
from taut.errors import ConfigError, OutputError, StreamError, TautError
from taut.io import files
from taut.io.console import counted, warn_if_slow

RECORD, FIRST = "record.json", "first.jsonl"
FOLDER = "streams"
"""Folder of the cache with the records of streams."""
NUM_FIRST = 256
"""Number of first rows that are kept unchanged."""
POLL = 1.0
"""Seconds between looks for new rows, and between messages of the ranks while they wait."""
PATIENCE = 5.0
"""Seconds to wait for the reading thread at the end."""


class Window(TypedDict):
    """A recorded window."""

    number: int
    first: int
    """Number of samples, or of rows whose answers are compared, before it."""
    size: int
    names: list[str]
    """Files of its rows."""
    shard: cache.ManifestShard
    digest: str
    """Digest of all windows up to this one."""
    position: Position
    """Position of the stream after it."""


class _Record(TypedDict):
    """``record.json``."""

    key: str
    out: str
    windows: list[Window]
    taken: SeenFiles


class TokenizedWindow(NamedTuple):
    """A window before it is recorded."""

    names: tuple[str, ...]
    """Names of the files of its rows."""
    shard: Shard


@dataclass(frozen=True)
class Recipe:
    """Makes windows of the rows of a stream."""

    path: str
    """Name of the stream in errors."""
    key: str
    """Hash of all that a window depends on besides its rows."""
    num_rows: int
    """Number of rows of a window."""
    unit: Literal["num_samples", "num_groups"]
    """Unit of positions: samples, or rows whose answers are compared."""
    columns: Columns
    tokenize: Callable[[Sequence[tuple[int, Any]], tuple[str, ...]], Shard]

    def make(self, rows: Sequence[StreamRow]) -> TokenizedWindow:
        names = tuple(dict.fromkeys(row.name for row in rows))
        number_of = {name: number for number, name in enumerate(names)}
        records = [(number_of[row.name] * IN_FILE + row.number, row.record) for row in rows]
        return TokenizedWindow(names, self.tokenize(records, names))

    def describe(
        self,
        content: TokenizedWindow,
        before: Window | None,
        listed: cache.ManifestShard,
        position: Position,
    ) -> Window:
        """Record a window whose shard is written, as ``listed`` says. ``position``: of the stream after it."""
        digest = hashlib.sha256(
            f"{before['digest'] if before else ''} {listed['meta']}".encode()
        ).hexdigest()
        return {
            "number": before["number"] + 1 if before else 0,
            "first": before["first"] + before["size"] if before else 0,
            "size": listed[self.unit],
            "names": list(content.names),
            "shard": listed,
            "digest": digest,
            "position": position,
        }


class Status(NamedTuple):
    """Progress of the reading process."""

    windows: list[Window]
    """New windows."""
    seconds: float
    """Seconds since the last row came; 0 while rows are read."""
    has_ended: bool
    error: TautError | None


class WindowReader(Protocol):
    """Reads the windows of a stream."""

    def want(self, stop: int) -> None:
        """Read on until a window has the position before ``stop``."""

    def status(self, after: int) -> Status:
        """The windows after number ``after``, once there are any, or after ``POLL`` seconds."""

    def shard(self, window: Window) -> Shard:
        """The samples of a window."""

    def first(self) -> list[StreamRow]:
        """The first rows, unchanged."""

    def close(self) -> None:
        """Stop reading."""


class Recording(NamedTuple):
    """The run that a stream is recorded for."""

    out: Path
    goes_on: bool
    """Whether it may continue from the record of an earlier process."""
    is_writer: bool
    """Whether this process reads and records, for all ranks."""
    gather: Callable[[Any], list[Any]]
    """Every rank's value."""


# -- a record on disk


def folder_of(directory: Path, out: Path) -> Path:
    """The record of the run in ``out``."""
    name = hashlib.sha256(str(out.absolute()).encode()).hexdigest()[:32]
    return directory / FOLDER / name


class Recorded:
    """The windows of a run on disk, for a process that does not write them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def shard(self, window: Window) -> Shard:
        place = self.folder / _name(window)
        try:
            return cache.read_shard(place, window["shard"])
        except cache.FAILURES as error:
            raise StreamError(
                f"{place}: the recorded rows are damaged ({cache.reason_of(error)}); expected them as they were "
                f"written; remove {self.folder} to read the stream again from its first row"
            ) from None

    def first(self) -> list[StreamRow]:
        path = self.folder / FIRST
        try:
            lines = files.read_text(path).split("\n")[:-1]
        except (OSError, UnicodeDecodeError) as error:
            raise StreamError(
                f"{path} cannot be read: {error}; expected the first rows of the stream; remove {self.folder}"
            ) from None
        return [StreamRow(*json.loads(line)) for line in lines]

    def want(self, stop: int) -> None:
        """Another process reads."""

    def status(self, after: int) -> Status:
        """Nothing new: another process reads."""
        return Status([], 0.0, False, None)

    def close(self) -> None:
        """Nothing to close."""


class Recorder(Recorded):
    """Reads a stream in a thread of its own, and records its windows."""

    def __init__(
        self,
        directory: Path,
        out: Path,
        recipe: Recipe,
        reader_after: Callable[[Position, SeenFiles | None], StreamReader],
        *,
        goes_on: bool,
    ) -> None:
        """``goes_on``: take over the windows that an earlier process recorded for this run."""
        super().__init__(folder_of(directory, out))
        self.recipe, self.out = recipe, str(out.absolute())
        self.windows: list[Window] = []
        self.floor = 0
        """Windows that end before this position are removed."""
        self._condition = threading.Condition()
        self._stop, self._arrived_at = 0, time.monotonic()
        self._is_idle = self._is_closed = self._has_ended = False
        self._error: TautError | None = None
        with self._as_output_error():
            self.folder.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(self.folder.parent, self.folder)
            lock = cache.locked(self.folder)
            if lock is None:
                raise OutputError(
                    f"{self.folder}: another process records the stream of {out}, or its file system has no locks; "
                    "expected neither; wait for it, or name another out"
                )
            self._lock: int | None = lock
            try:
                # Continue after the windows of an earlier process, and remove what does not belong to them.
                record = _read_record(self.folder) if goes_on else None
                taken: SeenFiles | None = None
                position, kept = START, {cache.LOCK}
                if record is not None and record["key"] == recipe.key and record["windows"]:
                    self.windows, taken = record["windows"], record["taken"]
                    position = self.windows[-1]["position"]
                    kept |= {RECORD, FIRST, *(_name(window) for window in self.windows)}
                cache.keep_only(self.folder, kept)
                self.source_reader = reader_after(position, taken)
            except BaseException:
                os.close(lock)
                raise
        self._thread = threading.Thread(target=self._run, name="taut stream", daemon=True)
        self._thread.start()

    def want(self, stop: int) -> None:
        with self._condition:
            self._stop = max(self._stop, stop)
            self._condition.notify_all()

    def status(self, after: int) -> Status:
        with self._condition:
            self._condition.wait_for(
                lambda: (
                    any(window["number"] > after for window in self.windows[-1:])
                    or self._has_ended
                    or self._error is not None
                ),
                POLL,
            )
            windows = [window for window in self.windows if window["number"] > after]
            seconds = time.monotonic() - self._arrived_at if self._is_idle else 0.0
            return Status(windows, seconds, self._has_ended, self._error)

    def close(self) -> None:
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        self._thread.join(PATIENCE)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # -- the thread

    def _run(self) -> None:
        error: TautError | None = None
        try:
            with self._as_output_error():
                self._read()
        except TautError as failure:
            error = failure
        except Exception as failure:  # noqa: BLE001 (raised by the thread that trains)
            error = StreamError(f"{self.recipe.path}: {type(failure).__name__}: {failure}")
        with self._condition:
            self._error, self._has_ended = error, error is None
            self._condition.notify_all()

    def _read(self) -> None:
        source_reader, rows = iter(self.source_reader), list[StreamRow]()
        while True:
            # Begin a window only where training wants the one before it.
            with self._condition:
                if not rows:
                    self._condition.wait_for(
                        lambda: (
                            self._is_closed
                            or not self.windows
                            or self.windows[-1]["first"] < self._stop
                        )
                    )
                if self._is_closed:
                    return
            # Read a row, and wait where there is none yet.
            try:
                row = next(source_reader)
            except StopIteration:
                break
            with self._condition:
                self._is_idle = row is None
                if row is None:
                    self._condition.wait_for(lambda: self._is_closed, POLL)
                    continue
            self._arrived_at = time.monotonic()
            # Validate it at once, and record a window when it is full.
            read_kept(row.record, f"{row.name}:{row.number}", self.recipe.columns)
            rows.append(row)
            if len(rows) == self.recipe.num_rows:
                self._add(rows)
                rows = []
        if rows:
            self._add(rows)

    def _add(self, rows: Sequence[StreamRow]) -> None:
        """Record a window, and remove those that no run needs any more."""
        # Tokenize the window, and write its shard.
        position = self.source_reader.position
        content = self.recipe.make(rows)
        before = self.windows[-1] if self.windows else None
        fresh = self.folder / ".window.partial"
        shutil.rmtree(fresh, ignore_errors=True)
        listed = cache.write_shard(fresh, content.shard)
        window = self.recipe.describe(content, before, listed, position)
        fresh.rename(self.folder / _name(window))
        files.sync(self.folder)
        if before is None:
            # what JSON does not have is in columns that nobody reads: a row of another kind is refused
            lines = [json.dumps(list(row), default=str) for row in rows[:NUM_FIRST]]
            files.write_text(self.folder / FIRST, "".join(f"{line}\n" for line in lines))
        # Write the record of the windows that are kept, then remove the others.
        old = [it for it in self.windows if it["number"] and it["first"] + it["size"] < self.floor]
        kept = [it for it in self.windows if it not in old]
        record: _Record = {
            "key": self.recipe.key,
            "out": self.out,
            "windows": [*kept, window],
            "taken": self.source_reader.seen,
        }
        files.write_text(self.folder / RECORD, json.dumps(record))
        for gone in old:
            shutil.rmtree(self.folder / _name(gone), ignore_errors=True)
        with self._condition:
            self.windows = [*kept, window]
            self._condition.notify_all()

    @contextmanager
    def _as_output_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(
                f"the rows of a stream cannot be recorded in {self.folder}: {error.strerror or error}; expected a "
                "directory with space; set data.cache or TAUT_CACHE"
            ) from None


def _name(window: Window) -> str:
    return f"{window['number']:08d}"


def _read_record(folder: Path) -> _Record | None:
    """The record in a folder; None if there is no valid one."""
    try:
        content = files.read_regular(folder / RECORD, cache.MANIFEST_LIMIT)
        return pydantic.TypeAdapter(_Record).validate_json(content, strict=True)
    except (OSError, ValueError):
        return None


def _remove_abandoned(folder: Path, own: Path) -> None:
    """Remove the records of other runs whose output directory is gone."""
    for path in folder.iterdir():
        record = None if path == own else _read_record(path)
        if record is None or Path(record["out"]).exists():
            continue
        lock = cache.locked(path)
        if lock is not None:  # else that run is about to make its directory
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


# -- a look at the first rows


class Preview:
    """The first rows of a stream, in memory. The stream ends where there is no row yet."""

    def __init__(self, recipe: Recipe, source_reader: StreamReader) -> None:
        self.recipe, self.source_reader = recipe, source_reader
        self._rows: list[StreamRow] = []
        self._shards: dict[int, Shard] = {}
        self._last: Window | None = None
        self._iterator = iter(source_reader)

    def want(self, stop: int) -> None:
        """``status`` reads."""

    def status(self, after: int) -> Status:
        rows: list[StreamRow] = []
        for row in self._iterator:
            if row is None:
                break
            rows.append(row)
            if len(rows) == self.recipe.num_rows:
                break
        if not rows:
            return Status([], 0.0, True, None)
        content = self.recipe.make(rows)
        listed: Any = {**vars(content.shard.counts), "meta": "", "sizes": {}}
        self._last = self.recipe.describe(content, self._last, listed, self.source_reader.position)
        self._shards[self._last["number"]] = content.shard
        self._rows = self._rows or rows[:NUM_FIRST]
        return Status([self._last], 0.0, False, None)

    def shard(self, window: Window) -> Shard:
        return self._shards[window["number"]]

    def first(self) -> list[StreamRow]:
        return self._rows

    def close(self) -> None:
        """Nothing to close."""


# -- the stream of a run


@dataclass(eq=False)
class Stream:
    """The recorded windows as training sees them, the same on every rank. All ranks call ``require`` alike."""

    recipe: Recipe
    reader: WindowReader
    timeout: float
    """Seconds without a new row after which ``require`` gives up."""
    num_ids: int
    """Number of ids that the model has rows for."""
    gather: Callable[[Any], list[Any]] = lambda value: [value]
    """Every rank's value; the first one's reader reads."""
    windows: list[Window] = field(default_factory=list)
    """Windows that all ranks know of, in order, without those that training has left behind."""
    expected: tuple[int, str] | None = None
    """A window's number, and the digest that a checkpoint has of it."""
    _opened: dict[int, SourceShards] = field(default_factory=dict)
    """Windows that were used last."""
    _data: Dataset | None = None

    @property
    def stop(self) -> int:
        """The position after the last one that all ranks know of."""
        return self.windows[-1]["first"] + self.windows[-1]["size"] if self.windows else 0

    def require(self, stop: int, why: str, remedy: str, follow: Callable[[float], None]) -> None:
        """Wait until the positions before ``stop`` are known. ``follow`` is called about once a second with the seconds
        since the last row came. Raises StreamError on all ranks where there is no more to wait for: ``why`` they are
        needed, and ``remedy``.
        """
        self.reader.want(stop)
        while self.stop < stop:
            last = self.windows[-1]["number"] if self.windows else -1
            status: Status = self.gather(self.reader.status(last))[0]
            self.windows += status.windows
            missing = stop - self.stop
            if missing <= 0:
                break
            if status.error is not None:
                raise StreamError(str(status.error)) from status.error
            units, fault = "samples" if self.recipe.unit == "num_samples" else "rows", ""
            if status.has_ended:
                fault = f"the stream ended after {counted(self.stop, units)}"
            else:
                follow(status.seconds)
                if status.seconds > self.timeout:
                    fault = f"no new row for {status.seconds:,.0f} seconds (data.streaming_timeout)"
            if fault:
                raise StreamError(
                    f"{self.recipe.path}: {fault}; {why} needs {counted(missing, units)} more; {remedy}"
                )
        # The rows that were read have to be those that the checkpoint was trained on.
        if self.expected is None:
            return
        number, digest = self.expected
        found = next((window for window in self.windows if window["number"] == number), None)
        if found is None or found["digest"] != digest:
            raise StreamError(
                f"{self.recipe.path}: the rows differ from those that the checkpoint was trained on; expected the "
                "same; bring the files back as they were, or begin a new run"
            )
        self.expected = None

    def at(self, start: int, stop: int, seed: int | None) -> tuple[Dataset, list[int]]:
        """The samples at known positions: a data set, and their indices in it. ``seed``: that of each window's
        permutation; without one the samples are in the order of rows.
        """
        windows = [w for w in self.windows if w["first"] < stop and w["first"] + w["size"] > start]
        if not windows or windows[0]["first"] > start:
            raise StreamError(
                f"{self.recipe.path}: position {start:,} is before the oldest window that is recorded; expected the "
                "newest checkpoint, from which on they are kept; resume from that one"
            )
        # Open the windows, keeping those that are open.
        if self._data is None or [w["number"] for w in windows] != list(self._opened):
            opened = self._opened
            self._opened = {w["number"]: opened.get(w["number"]) or self.part(w) for w in windows}
            self._data = Dataset(list(self._opened.values()))
        # The samples at the positions, by the permutation of each window.
        indices: list[int] = []
        before = 0
        for window in windows:
            first, size = window["first"], window["size"]
            inside = np.arange(max(start, first) - first, min(stop, first + size) - first)
            if seed is not None:
                inside = keyed_permutation(inside, size, [seed, window["number"]])
            indices += (before + inside).tolist()
            before += size
        return self._data, indices

    def holding(self, position: int) -> Window:
        """The window that has a position."""
        return next(w for w in self.windows if w["first"] <= position < w["first"] + w["size"])

    def part(self, window: Window) -> SourceShards:
        """A window as a source of samples."""
        names = tuple(window["names"])
        shards = Shards.of([self.reader.shard(window)])
        path, key = self.recipe.path, f"{self.recipe.key} {window['digest']}"
        part = SourceShards(path, names, 1.0, key, shards, path, (), names)
        if beyond := part.first_id_over(self.num_ids):
            raise StreamError(
                f"{beyond[0]}: has token {beyond[1]}, and the model has {self.num_ids:,} rows; expected the model's "
                "own tokenizer; take added tokens out and name them in tokens.add"
            )
        return part

    def leave(self, position: int, floor: int) -> None:
        """Windows that end before ``position`` are not asked for again by this process, those that end before ``floor``
        by none.
        """
        if isinstance(self.reader, Recorder):
            self.reader.floor = floor
        self.windows = [
            w for w in self.windows if not w["number"] or w["first"] + w["size"] >= position
        ]

    def first_rows(self) -> Iterator[AnyRow]:
        """The first rows, read and not rendered."""
        for name, number, record in self.reader.first():
            row = read_kept(record, f"{name}:{number}", self.recipe.columns)
            if row is not None:
                yield row


class StreamDataset(Dataset):
    """The first window of a stream: what there is to look at. Training takes its samples from ``stream``."""

    def __init__(self, stream: Stream, longest: int) -> None:
        self.stream = stream
        recipe = stream.recipe
        decision = f"{recipe.path}: a stream, {counted(recipe.num_rows, 'rows')} a window; here is the first window"
        super().__init__([stream.part(stream.windows[0])], [decision])
        self._longest = longest

    @property
    def longest(self) -> int:
        """The largest number of tokens that a sample may have: most rows are yet to come."""
        return self._longest


# -- opening


def open_stream(
    config: DataConfig,
    kind: Kind,
    renderer: Renderer,
    max_length: int,
    num_ids: int,
    *,
    compares: bool,
    recording: Recording | None,
) -> StreamDataset:
    """Open the stream that ``config.train`` names, and wait for its first window. ``compares``: whether a row's answers
    are compared; ``recording``: that of the run that trains on it; without one only the first rows are shown.
    """
    if renderer.image_store is not None:
        raise ConfigError(
            "data.train is a stream, and the model takes pictures; expected a model of text, since a stream has no "
            "store of pictures; take data.streaming out"
        )
    require_fitting(config, kind)
    ((source, columns),) = sources(config, "train", kind)
    limits = limits_of(config, max_length)
    # The process that renders templates serves one thread, so the thread that reads gets a renderer of its own.
    own_renderer: Renderer = pickle.loads(pickle.dumps(renderer))
    content = f"stream of {source.path} {source.share} {config.streaming_window}"
    path = source.path.removesuffix(":")
    recipe = Recipe(
        path,
        key_of(content, columns, limits, renderer.identity(), has_images=False),
        config.streaming_window,
        "num_groups" if compares else "num_samples",
        columns,
        lambda records, names: tokenize_records(
            TokenizeJob(path, names, columns, limits, own_renderer), records
        ),
    )

    def reader_after(position: Position, taken: SeenFiles | None) -> StreamReader:
        if source.path == ITERABLE:
            return IterableRows(given_iterable(), position)
        return FolderRows(source, config.streaming_settle, position, taken)

    # Show the first rows; or record the stream, on the rank that writes; or read what that rank records.
    reader: WindowReader
    if recording is None:
        if source.path == ITERABLE:
            raise ConfigError(
                "data.train is an iterable, and rows that are looked at would be gone from it; expected files; name "
                "some (a run looks at its first window before it trains)"
            )
        reader, gather = Preview(recipe, reader_after(START, None)), None
    else:
        directory, gather = cache.directory_of(config.cache), recording.gather
        if recording.is_writer:
            reader = Recorder(
                directory, recording.out, recipe, reader_after, goes_on=recording.goes_on
            )
        else:
            reader = Recorded(folder_of(directory, recording.out))
    stream = Stream(
        recipe, reader, config.streaming_timeout, num_ids, gather or (lambda value: [value])
    )
    try:
        stream.windows.append(_first_window(stream))
        return StreamDataset(stream, max_length)
    except BaseException:
        reader.close()
        raise


def _first_window(stream: Stream) -> Window:
    """The first window; the process that reads waits for it, the others come after it."""
    # A rank that does not write finds the window that the first rank has recorded.
    recipe, reader = stream.recipe, stream.reader
    if type(reader) is Recorded:
        record = _read_record(reader.folder)
        if record is None or not record["windows"]:
            raise StreamError(
                f"{reader.folder}: this rank finds no window of {recipe.path} there; expected what the first rank has "
                "recorded; set data.cache or TAUT_CACHE to a directory that all ranks see"
            )
        return record["windows"][0]
    waits = f"waits for the first {counted(recipe.num_rows, 'rows')} of {recipe.path}"
    with warn_if_slow(waits):
        while True:
            status = reader.status(-1)
            if status.windows:
                return status.windows[0]
            if status.error is not None:
                raise status.error
            if status.has_ended:
                raise StreamError(
                    f"{recipe.path}: there is no row; expected at least one complete file; see what the directory has "
                    "(docs/data.md says when a file is complete)"
                )
            if status.seconds > stream.timeout:
                raise StreamError(
                    f"{recipe.path}: no new row for {status.seconds:,.0f} seconds (data.streaming_timeout); expected "
                    f"{counted(recipe.num_rows, 'rows')} for the first window; lower data.streaming_window, or "
                    "begin again later"
                )
