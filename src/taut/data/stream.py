"""A stream: rows that arrive while a run trains, in windows that are recorded as they come.

    window k     the rows [k W, (k + 1) W), W = data.streaming_window; the last has fewer, where the stream ends
    position p   of the run's samples: window k holds the positions [first_k, first_k + size_k), and its samples are
                 permuted among themselves by a keyed permutation of (seed, k)

So the samples of a step are a pure function of the rows, the seed and the step; no buffer of a shuffle has to be saved.
Where answers are compared, rows take the place of samples.

    CACHE/streams/<run>/record.json         key of the settings, windows that are kept, files that were taken
                        first.jsonl         the first rows, as they came
                        00000000/ ...       the windows that are kept, a shard each (cache.py)

One process records (``Recorder``): a thread of it reads rows, tokenises a window and writes it, one window ahead of
training. A window is a shard on disk before a step has it, so a run that goes on reads it there, and reads on after the
last one. Each window has the digest of all windows up to it. A checkpoint keeps that of its last one, and a run that
finds another there is refused.

The first window is kept: it is what checks, the stop check and the golden prompts look at. So are the windows from the
oldest checkpoint on (``Recorder.floor``); the others are removed. ``Preview`` is a stream of which the first rows are
looked at: nothing is recorded, and it does not wait.

Does not know where rows come from (``arrivals.py``), or steps (``methods/method.py``).
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

from taut.data import cache
from taut.data.arrivals import (
    START,
    Arrivals,
    Arrived,
    FolderRows,
    IterableRows,
    Position,
    Taken,
)
from taut.data.dataset import DataConfig, Dataset, SourcePart, key_of, require_fitting, sources
from taut.data.entries import Entry, Shards
from taut.data.given_rows import given_iterable
from taut.data.large_epoch import keyed_permutation
from taut.data.render import Limits, Renderer
from taut.data.schema import AnyRow, Columns, Kind, read_any
from taut.data.sources import IN_FILE, ITERABLE
from taut.data.tokenise import entry_of
from taut.errors import ConfigError, OutputError, StreamError, TautError
from taut.io import files
from taut.io.console import counted, told_when_slow

RECORD, FIRST = "record.json", "first.jsonl"
FOLDER = "streams"
"""The folder of records, in the cache."""
NUM_FIRST = 256
"""Rows that are kept as they came."""
POLL = 1.0
"""Seconds between looks for new rows, and between messages of the ranks while one waits."""
PATIENCE = 5.0
"""Seconds that the thread which reads is waited for at the end."""


class Window(TypedDict):
    """A recorded window."""

    number: int
    first: int
    """Samples, or rows whose answers are compared, before it."""
    size: int
    names: list[str]
    """The files of its rows."""
    shard: cache.Listed
    digest: str
    """Of all windows up to this one."""
    position: Position
    """Where reading goes on after it."""


class _Record(TypedDict):
    """``record.json``."""

    key: str
    out: str
    windows: list[Window]
    taken: Taken


class Made(NamedTuple):
    """A window before it is recorded."""

    names: tuple[str, ...]
    entry: Entry


@dataclass(frozen=True)
class Recipe:
    """How the rows of a stream become windows."""

    path: str
    """What errors call the stream."""
    key: str
    """The hash of all that a window depends on besides its rows."""
    num_rows: int
    """Rows of a window."""
    unit: Literal["num_samples", "num_groups"]
    """What is permuted and counted: samples, or rows whose answers are compared."""
    columns: Columns
    tokenise: Callable[[Sequence[tuple[int, Any]], tuple[str, ...]], Entry]

    def make(self, rows: Sequence[Arrived]) -> Made:
        names = tuple(dict.fromkeys(row.name for row in rows))
        number_of = {name: number for number, name in enumerate(names)}
        records = [(number_of[row.name] * IN_FILE + row.number, row.record) for row in rows]
        return Made(names, self.tokenise(records, names))

    def describe(
        self, made: Made, before: Window | None, shard: cache.Listed, position: Position
    ) -> Window:
        digest = hashlib.sha256(
            f"{before['digest'] if before else ''} {shard['meta']}".encode()
        ).hexdigest()
        return {
            "number": before["number"] + 1 if before else 0,
            "first": before["first"] + before["size"] if before else 0,
            "size": shard[self.unit],
            "names": list(made.names),
            "shard": shard,
            "digest": digest,
            "position": position,
        }


class Status(NamedTuple):
    """What the process that reads tells the others."""

    windows: list[Window]
    """Those that are new."""
    seconds: float
    """Since the last row came; 0 while rows are read."""
    has_ended: bool
    error: TautError | None


class Reader(Protocol):
    """What reads a stream."""

    def want(self, stop: int) -> None:
        """Read on until a window has the position before ``stop``."""

    def status(self, after: int) -> Status:
        """The windows after number ``after``, once there are any, or after ``POLL`` seconds."""

    def entry(self, window: Window) -> Entry:
        """The samples of a window."""

    def first(self) -> list[Arrived]:
        """The first rows, as they came."""

    def close(self) -> None:
        """Read no more."""


class Recording(NamedTuple):
    """The run that a stream is recorded for."""

    out: Path
    goes_on: bool
    """Whether it may go on with what a process before has recorded."""
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

    def entry(self, window: Window) -> Entry:
        place = self.folder / _name(window)
        try:
            return cache.read_shard(place, window["shard"])
        except cache.FAILURES as error:
            raise StreamError(
                f"{place}: the recorded rows are damaged ({error}); expected them as they were written; remove "
                f"{self.folder}: the stream is read again from its first row, if that is still there"
            ) from None

    def first(self) -> list[Arrived]:
        path = self.folder / FIRST
        try:
            lines = files.read_text(path).split("\n")[:-1]
        except (OSError, UnicodeDecodeError) as error:
            raise StreamError(
                f"{path} cannot be read: {error}; expected the first rows of the stream; remove {self.folder}"
            ) from None
        return [Arrived(*json.loads(line)) for line in lines]

    def want(self, stop: int) -> None:
        """Another process reads."""

    def status(self, after: int) -> Status:
        """Another process tells."""
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
        arrivals_after: Callable[[Position, Taken | None], Arrivals],
        *,
        goes_on: bool,
    ) -> None:
        """``goes_on``: whether the windows that a process before recorded for this run are taken over."""
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
                taken = self._take_over() if goes_on else None
                self._empty()
                position = self.windows[-1]["position"] if self.windows else START
                self.arrivals = arrivals_after(position, taken)
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
            self._condition.wait_for(lambda: self._has_news(after), POLL)
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

    def _has_news(self, after: int) -> bool:
        is_there = bool(self.windows) and self.windows[-1]["number"] > after
        return is_there or self._has_ended or self._error is not None

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
        arrivals, rows = iter(self.arrivals), list[Arrived]()
        while True:
            with self._condition:
                if not rows:
                    self._condition.wait_for(lambda: self._is_closed or not self._is_ahead)
                if self._is_closed:
                    return
            try:
                row = next(arrivals)
            except StopIteration:
                break
            with self._condition:
                self._is_idle = row is None
                if row is None:
                    self._condition.wait_for(lambda: self._is_closed, POLL)
                    continue
            self._arrived_at = time.monotonic()
            read_any(row.record, f"{row.name}:{row.number}", self.recipe.columns)  # refused at once
            rows.append(row)
            if len(rows) == self.recipe.num_rows:
                self._add(rows)
                rows = []
        if rows:
            self._add(rows)

    @property
    def _is_ahead(self) -> bool:
        """Whether there is a whole window more than training wants."""
        return bool(self.windows) and self.windows[-1]["first"] >= self._stop

    def _add(self, rows: Sequence[Arrived]) -> None:
        """Record a window, and remove those that no run needs any more."""
        position = self.arrivals.position
        made = self.recipe.make(rows)
        before = self.windows[-1] if self.windows else None
        fresh = self.folder / ".window.partial"
        shutil.rmtree(fresh, ignore_errors=True)
        shard = cache.write_shard(fresh, made.entry)
        window = self.recipe.describe(made, before, shard, position)
        fresh.rename(self.folder / _name(window))
        files.sync(self.folder)
        if before is None:
            # what JSON does not have is in columns that nobody reads: a row of another kind is refused
            lines = [json.dumps(list(row), default=str) for row in rows[:NUM_FIRST]]
            files.write_text(self.folder / FIRST, "".join(f"{line}\n" for line in lines))
        old = [it for it in self.windows if it["number"] and it["first"] + it["size"] < self.floor]
        kept = [it for it in self.windows if it not in old]
        self._write([*kept, window])
        for gone in old:
            shutil.rmtree(self.folder / _name(gone), ignore_errors=True)
        with self._condition:
            self.windows = [*kept, window]
            self._condition.notify_all()

    def _write(self, windows: list[Window]) -> None:
        record: _Record = {
            "key": self.recipe.key,
            "out": self.out,
            "windows": windows,
            "taken": self.arrivals.taken,
        }
        files.write_text(self.folder / RECORD, json.dumps(record))

    # -- what a process before left

    def _take_over(self) -> Taken | None:
        record = _read_record(self.folder)
        if record is None or record["key"] != self.recipe.key:
            return None
        self.windows = record["windows"]
        return record["taken"] if self.windows else None

    def _empty(self) -> None:
        """Remove what does not belong to the windows."""
        kept = {cache.LOCK, *(_name(window) for window in self.windows)}
        if self.windows:
            kept |= {RECORD, FIRST}
        cache.keep_only(self.folder, kept)

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
    """None where there is none that taut wrote."""
    try:
        content = files.read_regular(folder / RECORD, cache.MANIFEST_LIMIT)
        return pydantic.TypeAdapter(_Record).validate_json(content, strict=True)
    except (OSError, ValueError):
        return None


def _remove_abandoned(folder: Path, own: Path) -> None:
    """Remove the records of other runs whose directory is gone."""
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
    """The first rows of a stream, in memory. What is not there is not waited for: the stream ends there."""

    def __init__(self, recipe: Recipe, arrivals: Arrivals) -> None:
        self.recipe, self.arrivals = recipe, arrivals
        self._rows: list[Arrived] = []
        self._entries: dict[int, Entry] = {}
        self._last: Window | None = None
        self._iterator = iter(arrivals)

    def want(self, stop: int) -> None:
        """``status`` reads."""

    def status(self, after: int) -> Status:
        rows: list[Arrived] = []
        for row in self._iterator:
            if row is None:
                break
            rows.append(row)
            if len(rows) == self.recipe.num_rows:
                break
        if not rows:
            return Status([], 0.0, True, None)
        made = self.recipe.make(rows)
        counts = made.entry.counts
        shard: Any = {**vars(counts), "meta": "", "sizes": {}}
        self._last = self.recipe.describe(made, self._last, shard, self.arrivals.position)
        self._entries[self._last["number"]] = made.entry
        self._rows = self._rows or rows[:NUM_FIRST]
        return Status([self._last], 0.0, False, None)

    def entry(self, window: Window) -> Entry:
        return self._entries[window["number"]]

    def first(self) -> list[Arrived]:
        return self._rows

    def close(self) -> None:
        """Nothing to close."""


# -- what training sees


@dataclass(eq=False)
class Stream:
    """The recorded windows as training sees them, the same on every rank. All ranks call ``require`` alike."""

    recipe: Recipe
    reader: Reader
    timeout: float
    """Seconds without a new row after which ``require`` gives up."""
    num_ids: int
    """Ids that the model has rows for."""
    gather: Callable[[Any], list[Any]] = lambda value: [value]
    """Every rank's value; the first one's reader reads."""
    windows: list[Window] = field(default_factory=list)
    """Those that all ranks know of, in order; not those that training has left behind."""
    expected: tuple[int, str] | None = None
    """A window's number, and the digest that a checkpoint has of it."""
    _opened: dict[int, SourcePart] = field(default_factory=dict)
    """The windows that were asked for last."""
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
            units = "samples" if self.recipe.unit == "num_samples" else "rows"
            end = f"{why} needs {counted(missing, units)} more; {remedy}"
            if status.has_ended:
                raise StreamError(
                    f"{self.recipe.path}: the stream ended after {counted(self.stop, units)}; {end}"
                )
            if status.seconds > self.timeout:
                raise StreamError(
                    f"{self.recipe.path}: no new row for {status.seconds:,.0f} seconds (data.streaming_timeout); {end}"
                )
            follow(status.seconds)
        self._compare()

    def _compare(self) -> None:
        """Raise StreamError where the windows are not those that the checkpoint was trained on."""
        if self.expected is None:
            return
        number, digest = self.expected
        found = next((window for window in self.windows if window["number"] == number), None)
        if found is None or found["digest"] != digest:
            raise StreamError(
                f"{self.recipe.path}: the rows that the checkpoint was trained on are not those that are recorded, or "
                "read again; expected the same rows; bring the files back as they were, or begin a new run"
            )
        self.expected = None

    def at(self, start: int, stop: int, seed: int | None) -> tuple[Dataset, list[int]]:
        """The samples at positions that are known: a data set, and their indices in it. ``seed``: of the permutation of
        each window; None: in the order of rows.
        """
        windows = [w for w in self.windows if w["first"] < stop and w["first"] + w["size"] > start]
        if not windows or windows[0]["first"] > start:
            raise StreamError(
                f"{self.recipe.path}: position {start:,} is before the oldest window that is recorded; expected the "
                "newest checkpoint, from which on they are kept; resume from that one"
            )
        if self._data is None or [w["number"] for w in windows] != list(self._opened):
            opened = self._opened
            self._opened = {w["number"]: opened.get(w["number"]) or self.part(w) for w in windows}
            self._data = Dataset(list(self._opened.values()))
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

    def part(self, window: Window) -> SourcePart:
        """A window as a source of samples."""
        names = tuple(window["names"])
        shards = Shards.of([self.reader.entry(window)])
        path, key = self.recipe.path, f"{self.recipe.key} {window['digest']}"
        part = SourcePart(path, names, 1.0, key, shards, path, (), names)
        if beyond := part.first_beyond(self.num_ids):
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
            yield read_any(record, f"{name}:{number}", self.recipe.columns)


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
    """The stream that ``config.train`` names, when its first window is there. ``compares``: whether a row's answers are
    compared; ``recording``: of the run that trains on it, None: a look at the first rows.
    """
    if renderer.image_store is not None:
        raise ConfigError(
            "data.train is a stream, and the model takes pictures; expected a model of text: the rows of a stream are "
            "read by a thread of their own, which has no store of pictures; name files without data.streaming"
        )
    require_fitting(config, kind)
    ((source, columns),) = sources(config, "train", kind)
    limits = Limits(max_length, config.too_long, config.min_length, config.without_targets)
    own_renderer: Renderer = pickle.loads(
        pickle.dumps(renderer)
    )  # its template's process is one thread's
    content = f"stream of {source.path} {source.share} {config.streaming_window}"
    path = source.path.removesuffix(":")
    recipe = Recipe(
        path,
        key_of(content, columns, limits, renderer.identity(), has_images=False),
        config.streaming_window,
        "num_groups" if compares else "num_samples",
        columns,
        lambda records, names: entry_of(records, path, names, columns, limits, own_renderer),
    )

    def arrivals_after(position: Position, taken: Taken | None) -> Arrivals:
        if source.path == ITERABLE:
            return IterableRows(given_iterable(), position)
        return FolderRows(source, config.streaming_settle, position, taken)

    reader: Reader
    if recording is None:
        if source.path == ITERABLE:
            raise ConfigError(
                "data.train is an iterable, and rows that are looked at would be gone from it; expected files to look "
                "at; name some (a run looks at its first window before it trains)"
            )
        reader, gather = Preview(recipe, arrivals_after(START, None)), None
    else:
        directory, gather = cache.directory_of(config.cache), recording.gather
        if recording.is_writer:
            reader = Recorder(
                directory, recording.out, recipe, arrivals_after, goes_on=recording.goes_on
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
    with told_when_slow(waits):
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
                    f"{recipe.path}: no new row for {status.seconds:,.0f} seconds (data.streaming_timeout), and the "
                    f"first window has fewer than {counted(recipe.num_rows, 'rows')}; expected more; lower "
                    "data.streaming_window, or begin again when they are there"
                )
