"""Rows of a large file that are tokenized while a run trains on them, so that its first step does not wait for them.

The order of samples is drawn over their number (``order.py``), and of such a file each row is one sample. So all that
has to be known before the first step is the number of rows: lines are counted. Then

    the rows that a step takes    are tokenized when it is prepared, by every rank for itself
    all rows, in their order      are tokenized by a process beside the run, which fills the cache

and once the cache has them, samples come from there. Samples, their ids, their order and the steps are those of rows
that were tokenized before. What is decided, checked and told of the data before the first step is of the first rows.

A row that is refused ends the run: when a step takes it, or when the process beside the run comes to it. So does a row
that is not one sample, since the order counts on that. If that process is killed, steps tokenize their rows to the end.
Which runs and sources wait for all rows instead, and why, is a decision: ``RunConfig.why_all_rows``, ``load_growing``.
"""

from __future__ import annotations

import os
import pickle
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from taut.config import Decision
from taut.data import dataset
from taut.data.read import formats
from taut.data.read.sources import IN_FILE, OpenSource
from taut.data.render.render import Renderer
from taut.data.settings import DataConfig
from taut.data.store import cache
from taut.data.store.shards import Shard, Shards
from taut.data.tokenize import ENVIRONMENT, LARGE, TokenizeJob, tokenize_records
from taut.errors import DataError, TautError
from taut.io import limited_call
from taut.io.worker_process import Helper, begin

FIRST_ROWS = 500
"""Rows that are read before the first step, and by ``taut show``."""
ROWS = "rows "
"""Before the key of a source, in place of the digest of samples that are not all tokenized."""
COMMAND = "from taut.data.growing import serve; serve({}, {})"
NICE = 5
"""By how much the process beside the run gives way to it."""
BOM = b"\xef\xbb\xbf"


def load_growing(
    config: DataConfig, renderer: Renderer, max_length: int, wait: str, **options: Any
) -> dataset.Dataset:
    """Load data.train for a run that is about to train. ``wait``: why the run needs all rows before its first step;
    empty if it does not. ``options``: those of ``load_dataset``.
    """
    load = partial(dataset.load_dataset, config, "train", renderer, max_length, **options)
    data = load(first_rows=None if wait else FIRST_ROWS)
    part = data.parts[0]
    if part.is_first_look:
        ((_, columns, opened, _),) = dataset.open_sources(config, "train", options["kind"])
        is_whole = opened.num_lines is not None and not (opened.limit or opened.change)
        if is_whole and len(data) == data.report.num_rows:
            limits, identity = dataset.limits_of(config, max_length), renderer.identity()
            key = dataset.key_of(opened.digest, columns, limits, identity, has_images=False)
            job = TokenizeJob(opened.path, opened.names, columns, limits, renderer)
            shards = Growing(part.shards, opened, job, cache.directory_of(config.cache) / key)
            return GrowingDataset(replace(part, shards=shards, key=key), load)
        wait = "its rows are no whole files of plain JSONL, whose lines are counted, or are not one sample each"
        data = load()
    if wait and not data.report.is_cached and sum(stamp.size for stamp in part.stamps) > LARGE:
        data.tokenized = Decision("data.tokenized", "before the first step", f"{part.path}: {wait}")
    return data


class Growing(Shards):
    """The samples of the source. Statistics are of the first rows until all are tokenized."""

    def __init__(self, first: Shards, opened: OpenSource, job: TokenizeJob, place: Path) -> None:
        """``place``: of the source in the cache."""
        vars(self).update(vars(first), digest=f"{ROWS}{place.name}")
        self.source, self.job, self.place = opened, job, place
        self.num_first, self.is_whole = first.num_samples, False
        self._taken: dict[int, tuple[Shard, int]] = {}
        """Rows that were tokenized for a step: a shard, and the place in it."""
        # The number of each row, and where its line begins. A blank line is no row.
        self.numbers, self.begins = array("q"), array("q")
        for file, stamp in enumerate(opened.stamps):
            at = 0
            with stamp.path.open("rb") as lines:
                for number, line in enumerate(lines, start=file * IN_FILE + 1):
                    if line.removeprefix(BOM if at == 0 else b"").strip():
                        self.numbers.append(number)
                        self.begins.append(at)
                    at += len(line)
        self.num_rows = self.num_samples = self.num_groups = len(self.numbers)

    def locate(self, index: int) -> tuple[Shard, int]:
        if self.is_whole or index < self.num_first:
            return super().locate(index)
        self.tokenize([index])
        return self._taken[index]

    def row(self, index: int) -> range:
        return range(index, index + 1)

    def row_of(self, index: int) -> int:
        return index

    def tokenize(self, indices: Sequence[int]) -> None:
        """Tokenize rows that are about to be taken: several at a time is faster."""
        rows = sorted({index for index in indices if index >= self.num_first})
        if not self._taken.keys() >= {*rows}:
            self.source.require_unchanged()
            shard = tokenize_records(self.job, map(self._record, rows))
            self._require_one_each(shard.counts.num_samples, len(rows), rows[0])
            self._taken = {index: (shard, at) for at, index in enumerate(rows)}

    def _record(self, index: int) -> tuple[int, Any]:
        """A row's number and its record, or the error of one that cannot be read."""
        number, at = self.numbers[index], self.begins[index]
        with self.source.stamps[number // IN_FILE].path.open("rb") as file:
            file.seek(at)
            line = file.readline(formats.ROW_LIMIT).removeprefix(BOM if at == 0 else b"")
        return number, formats.record_of(line.rstrip(), self.source.place(number))

    def _require_one_each(self, num_samples: int, num_rows: int, first: int) -> None:
        if num_samples != num_rows:
            raise DataError(
                f"{self.source.place(self.numbers[first])}: from there on {num_rows:,} rows make {num_samples:,} "
                "samples, and the order of this run counts on one of each, as the first rows make; expected the same "
                "of all; tokenize the rows first: taut tokenize, with the same keys"
            )

    def take(self) -> bool:
        """Whether all samples are here; they are taken from the cache once it has them."""
        shards = cache.load(self.place.parent, self.place.name)[0] if self.place.is_dir() else None
        if shards is not None:
            self._require_one_each(shards.num_samples, self.num_rows, 0)
            vars(self).update(vars(shards), is_whole=True)
        return self.is_whole


class GrowingDataset(dataset.Dataset):
    """The samples of one source that is tokenized while a run trains on them."""

    def __init__(self, part: dataset.SourceShards, load: partial[dataset.Dataset]) -> None:
        """``load``: loads the samples of all rows, into the cache too."""
        assert isinstance(part.shards, Growing)
        self.growing, self.load, self.helper = part.shards, load, Helper()
        super().__init__([part], [f"{part.path}: tokenized while the run trains"])
        reason = "its rows are counted, and each is one sample; a refused row ends the run"
        self.tokenized = Decision("data.tokenized", "while training", f"{part.path}: {reason}")
        note = f", the last two of the first {self.growing.num_first:,} rows: not all are tokenized"
        self.report = replace(self.report, note=note)

    @property
    def num_read(self) -> int:
        return len(self) if self.growing.is_whole else self.growing.num_first

    def begin(self) -> None:
        """Start the process beside the run."""
        with suppress(OSError):  # as if it were killed at once
            self.helper.start(COMMAND, {**limited_call.environment(), **ENVIRONMENT})
            self.helper.pipe.send_bytes(pickle.dumps((self.load, self.growing.place.parent)))

    def expect(self, steps: Iterable[Sequence[int]], *, rows: bool) -> None:
        """Tokenize the rows of the first of these steps, unless all are in the cache by now. Raises what is wrong with
        a row that the process beside the run came to.
        """
        if self.growing.is_whole:
            return
        error: TautError | None = None
        with suppress(EOFError, OSError):  # it was killed, or runs beside another rank
            error = self.helper.pipe.recv() if self.helper.pipe.poll() else None
        if error is not None:
            raise error
        if self.growing.take():
            vars(self).pop("lengths", None)  # of the first rows
            super().__init__(self.parts, self.report.decisions)
        else:
            self.growing.tokenize(next(iter(steps)))


def serve(descriptor: int, leash: int) -> None:
    """In the process beside the run: tokenize all rows into the cache, and send the error that ended it, or None."""
    pipe, error = begin(descriptor, leash), None
    os.nice(NICE)
    load, directory = pickle.loads(pipe.recv_bytes())
    try:
        load(cache_dir=directory)
    except TautError as failure:
        error = failure
    pipe.send(error)
