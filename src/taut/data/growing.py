"""A source whose rows are tokenized while a run trains on them, so that a large file does not delay its first step.

The order of samples is drawn over their number (``order.py``), and of such a source each row is one sample. So all that
has to be known before the first step is the number of rows: the lines of its files are counted. Then

    a row that a step takes     is tokenized when it is taken, by every rank for itself
    all rows, in their order    are tokenized by a process beside the run, which fills the cache

and once the cache has them, samples come from there. Samples, their ids, their order and the steps are those of rows
that were tokenized before. What is decided, checked and told of the data before the first step is of the first rows.

A row that is refused ends the run: when a step takes it, or when the process beside it comes to it. So does a row that
is not one sample, since the order counts on that. ``reason_to_wait`` names the sources that are tokenized first.
"""

from __future__ import annotations

import os
import pickle
from array import array
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from taut.data.read import formats
from taut.data.read.sources import IN_FILE, OpenSource, open_source
from taut.data.render.render import Renderer
from taut.data.settings import Source
from taut.data.store import cache
from taut.data.store.shards import Shard, Shards
from taut.data.tokenize import (
    ENVIRONMENT,
    TokenizeJob,
    WorkerDied,
    choose_workers,
    tokenize_records,
    tokenize_source,
)
from taut.errors import DataError, TautError
from taut.io import limited_call
from taut.io.worker_process import Helper, begin, how_it_ended

FIRST_ROWS = 500
"""Rows that are read before the first step, and by ``taut show``."""
ROWS = "rows "
"""Before the key of a source, as the digest of samples that are not all tokenized."""
COMMAND = "from taut.data.growing import serve; serve({}, {})"
MOST_TAKEN = 4096
"""Rows of steps that are kept, about."""
NICE = 5
"""By how much the process beside the run gives way to it."""
REMEDY = "tokenize the rows first: taut tokenize, with the same keys"


def reason_to_wait(opened: OpenSource, renderer: Renderer) -> str:
    """Why all rows of a source have to be read before the first step; empty if they need not."""
    if renderer.image_store is not None:
        return "the model takes pictures, which are looked at with their rows"
    if not type(renderer.tokenizer).__module__.startswith("transformers."):
        return "the tokenizer's code comes with the model"
    suffixes = {stamp.path.suffix for stamp in opened.stamps}
    if not (opened.has_lines and suffixes <= {".jsonl", ".ndjson"}):
        return "the rows of plain JSONL alone are counted without being read"
    if opened.share or opened.limit or opened.change is not None:
        return "share, limit, replace, prepend and append take or change rows by what they say"
    return ""


class RunNeeds(NamedTuple):
    """What a run that is about to train needs of its data."""

    num_ids: int
    """Number of ids that the model has rows for."""
    reason_to_wait: str
    """Why the run needs all rows before its first step; empty if it does not."""


class Work(NamedTuple):
    """What the process beside the run is sent."""

    source: Source
    digest: str
    """Of the content, which must not have changed since."""
    job: TokenizeJob
    directory: Path
    """The cache."""
    key: str
    """Name of the source there."""
    num_workers: int | None


class Growing(Shards):
    """The samples of such a source. What is told of all samples (lengths, incidents) is of the first rows until all are
    tokenized.
    """

    def __init__(self, first: Shards, opened: OpenSource, work: Work, num_ids: int) -> None:
        """``first``: the first rows; ``num_ids``: number of ids that the model has rows for."""
        vars(self).update(vars(first))
        self.source, self.work, self.num_ids = opened, work, num_ids
        self.num_first, self.is_whole = first.num_samples, False
        self.digest = f"{ROWS}{work.key}"
        self._helper = Helper()
        self._taken: dict[int, tuple[Shard, int]] = {}
        """Rows that were tokenized for a step: a shard, and the place in it."""
        # The number of each row, and where its line begins. A blank line is no row.
        self.numbers, self.begins = array("q"), array("q")
        for file, stamp in enumerate(opened.stamps):
            at = 0
            with stamp.path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").strip():
                        self.numbers.append(file * IN_FILE + number)
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
        missing = sorted({i for i in indices if i >= self.num_first and i not in self._taken})
        if self.is_whole or not missing:
            return
        if len(self._taken) > MOST_TAKEN:
            self._taken.clear()
        self.source.require_unchanged()
        records = [(self.numbers[index], self._record(index)) for index in missing]
        shard = tokenize_records(self.work.job, records)
        self._require_fitting(Shards.of([shard]), len(missing))
        self._taken |= {index: (shard, at) for at, index in enumerate(missing)}

    def _record(self, index: int) -> Any:
        """The record of a row. Raises DataError where its line cannot be read."""
        file_number, line_number = divmod(self.numbers[index], IN_FILE)
        with self.source.stamps[file_number].path.open("rb") as file:
            file.seek(self.begins[index])
            line = file.readline(formats.ROW_LIMIT)
        line = line.removeprefix(b"\xef\xbb\xbf" if line_number == 1 else b"").rstrip()
        record = formats.record_of(line, self.source.place(self.numbers[index]))
        if isinstance(record, DataError):
            raise record
        return record

    def _require_fitting(self, shards: Shards, num_rows: int) -> None:
        """Raise DataError where samples are not those that the order counts on, or that the model can read."""
        for shard in shards if shards.num_samples != num_rows else ():
            lines, counts = np.unique(shard.arrays["line"], return_counts=True)
            if counts.max() > 1:
                raise DataError(
                    f"{self.source.place(int(lines[counts.argmax()]))}: the row makes {counts.max()} samples, and the "
                    f"order of this run counts on one of each, as the first rows make; expected the same; {REMEDY}"
                )
        largest = max(summary.largest_id for summary in shards.summaries)
        if largest >= self.num_ids:
            raise DataError(
                f"{self.source.path}: has token {largest}, and the model has {self.num_ids:,} rows; expected the "
                "model's own tokenizer; take added tokens out and name them in tokens.add"
            )

    # -- the process beside the run

    def begin(self) -> None:
        """Start to tokenize all rows into the cache."""
        try:
            self._helper.start(COMMAND, {**limited_call.environment(), **ENVIRONMENT})
            self._helper.pipe.send_bytes(pickle.dumps(self.work))
        except OSError as error:
            raise WorkerDied(
                f"{self.source.path}: the system starts no process to tokenize it: {error.strerror or error}; expected "
                f"one beside the run; {REMEDY}"
            ) from None

    def is_done(self) -> bool:
        """Whether all rows are in the cache. Raises what is wrong with one of them."""
        if not self._helper.pipe.poll():
            return False
        try:
            error = self._helper.pipe.recv()
        except (EOFError, OSError):
            raise WorkerDied(
                f"{self.source.path}: the process that tokenized it {how_it_ended(self._helper.reap())}; expected it "
                f"to run until the end; {REMEDY}"
            ) from None
        if error is not None:
            raise error
        return True

    def take(self) -> None:
        """Take the samples from the cache; a rank that does not find them there goes on as before."""
        shards, _ = cache.load(self.work.directory, self.work.key)
        if shards is not None:
            self._require_fitting(shards, self.num_rows)
            vars(self).update(vars(shards), is_whole=True)

    def close(self) -> None:
        self._helper.end()


def serve(descriptor: int, leash: int) -> None:
    """In the process beside the run: tokenize a source into the cache, and send the error that ended it, or None."""
    pipe = begin(descriptor, leash)
    os.nice(NICE)
    work: Work = pickle.loads(pipe.recv_bytes())
    error: TautError | None = None
    try:
        opened = open_source(work.source)
        if opened.digest != work.digest:
            raise DataError(
                f"{opened.path}: the data changed after the run had begun; expected them to stay as they are; begin "
                "again when they are written"
            )
        num_workers, _ = choose_workers(opened, work.job.renderer, work.num_workers)
        make = partial(tokenize_source, work.job, opened, num_workers)
        cache.save(work.directory, work.key, make)
    except TautError as failure:
        error = failure
    pipe.send(error)
