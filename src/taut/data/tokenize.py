"""Rows of a source to shards: read, render, fit to length; in this process, or in several.

    cache.save(directory, key, partial(tokenize_source, job, opened, num_workers))

A block is BATCH_ROWS rows that follow each other, fewer if they hold many images. Blocks are tokenized apart and joined
in their order, so shards and errors do not depend on ``num_workers``. This process reads the records, writes the
shards, and tokenizes while it waits for workers, which are helper processes (``taut.io.worker_process``): each is sent
the job once, and then blocks, of which at most DEPTH are on their way. A worker renders chat templates itself, under
the limits of ``taut.io.limited_call``: if a limit ends it, this process tokenizes its blocks, whose templates run in a
process of their own, and so finds the row and its error.

Workers are not used for a model that takes images, whose store belongs to one process, or with a tokenizer whose code
comes with the model. ``attempt_rows`` continues after rows with errors, to count them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from taut.data.read.sources import OpenSource, full_place, place_of
from taut.data.render.images import BATCH_ROWS, in_batches
from taut.data.render.render import Incident, Limits, Renderer, answers_of, fit_any, render_each
from taut.data.rows.messages import FORM_OF, Conversation, images_of
from taut.data.rows.schema import AnyRow, Columns, best_row, read_any
from taut.data.store.shards import Shard, ShardBuilder, in_shards
from taut.errors import DataError, EmptyError, PictureError, TautError
from taut.io import limited_call, progress
from taut.io.console import counted
from taut.io.threads import usable
from taut.io.worker_process import Helper, begin, how_it_ended
from taut.types import Sample

if TYPE_CHECKING:
    from taut.vision.content import ImageRef

Records: TypeAlias = Iterable[tuple[int, Any]]
"""Records, or the errors of those that cannot be read, with their numbers."""
LARGE = 2**24
"""Minimum size in bytes of a source that is tokenized by several processes by default."""
MAX_WORKERS = 16
"""Maximum number of processes by default: each takes 100 MiB or more."""
DEPTH = 3
"""Blocks that a worker has been sent and not answered, so that it works while shards are written."""
COMMAND = "from taut.data.tokenize import serve; serve({}, {})"
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false"}
"""Added to the environment of workers, which leave no cores for threads."""


class WorkerDied(TautError):
    """A process that tokenizes ended too early, or could not be started."""


# -- rows


class Attempt(NamedTuple):
    """The result of reading one record: its samples, or its error."""

    number: int
    """The line or record in the source."""
    place: str
    row: AnyRow | None
    samples: list[Sample]
    """Rendered, and fitted to length."""
    incidents: list[Incident]
    error: DataError | None


def attempt_rows(
    opened: OpenSource,
    columns: Columns,
    renderer: Renderer,
    limits: Limits,
    tolerated: tuple[type[DataError], ...] = (DataError,),
) -> Iterator[Attempt]:
    """Read, render and fit every record of a source, several at a time. Errors of the tolerated types are returned in
    place of the row; any other is raised.
    """
    job = TokenizeJob(opened.path, opened.names, columns, limits, renderer)
    records = opened.read_records(strict=DataError not in tolerated)
    for attempts in _attempt_blocks(job, records, tolerated):
        yield from attempts


def _attempt_blocks(
    job: TokenizeJob, records: Records, tolerated: tuple[type[DataError], ...]
) -> Iterator[list[Attempt]]:
    """The attempts of each block of records."""
    _, names, columns, limits, renderer = job
    renderer.template.require_variables(columns.template_variables, place_of(names, 1))

    def read(number: int, record: object) -> AnyRow | DataError:
        if isinstance(record, DataError):
            if isinstance(record, tolerated):
                return record
            raise record
        try:
            return read_any(record, place_of(names, number), columns)
        except tolerated as error:
            return error

    read_records = ((number, read(number, record)) for number, record in records)
    for batch in in_batches(read_records, lambda pair: _images_of(pair[1])):
        # Render the rows of a block at once, then fit each to the length.
        rows = [row for _, row in batch if not isinstance(row, DataError)]
        rendered = iter(render_each(rows, renderer, tolerated))
        attempts = []
        for number, row in batch:
            place = place_of(names, number)
            if isinstance(row, DataError):
                attempts.append(Attempt(number, place, None, [], [], row))
                continue
            samples = next(rendered)
            if isinstance(samples, DataError):
                attempts.append(Attempt(number, place, row, [], [], samples))
                continue
            try:
                attempts.append(Attempt(number, place, row, *fit_any(row, samples, limits), None))
            except tolerated as error:
                attempts.append(Attempt(number, place, row, [], [], error))
        yield attempts


def _images_of(row: AnyRow | DataError | None) -> list[ImageRef]:
    """The images of all answers of a row."""
    if row is None or isinstance(row, DataError):
        return []
    chats = (answer for answer in answers_of(row) if isinstance(answer, Conversation))
    return [image for chat in chats for image in images_of(chat.messages)]


# -- blocks and shards


def tokenize_source(
    job: TokenizeJob, opened: OpenSource, num_workers: int = 1, start: int = 0
) -> Iterator[Shard]:
    """The shards of a source's rows after the first ``start``, which are in finished shards."""
    if num_workers > 1:
        blocks = _by_workers(job, _records_in_blocks(opened, start), num_workers)
    else:
        blocks = _blocks(job, islice(opened.read_records(), start, None))
    samples = blocks if start else _require_samples(blocks, job)
    return in_shards(_shown(samples, opened, start), sorted(job.renderer.stop_set))


def _shown(
    blocks: Iterable[ShardBuilder], opened: OpenSource, num_rows: int
) -> Iterator[ShardBuilder]:
    """Pass the blocks on, and show how far the source is."""
    total = opened.num_lines
    for block in blocks:
        num_rows += block.num_rows
        progress.count(num_rows, total, "rows")
        yield block


def tokenize_records(job: TokenizeJob, records: Records) -> Shard:
    """One shard of all these records, by this process."""
    builder = ShardBuilder()
    for block in _require_samples(_blocks(job, records), job):
        builder.extend(block)
    return builder.build(sorted(job.renderer.stop_set))


def _require_samples(blocks: Iterable[ShardBuilder], job: TokenizeJob) -> Iterator[ShardBuilder]:
    """Pass the blocks on. Raises DataError after the last if they have no samples."""
    num_rows, num_samples, depends_on_files = 0, 0, False
    first: Incident | None = None
    for block in blocks:
        num_rows += block.num_rows
        num_samples += block.num_samples
        depends_on_files |= block.depends_on_files
        first = first or next(iter(block.incidents), None)
        yield block
    if not num_rows:
        raise DataError(f"{job.path}: the file has no rows; expected at least one; check the path")
    if not num_samples:
        assert first is not None, "a row without samples is an incident"
        place = full_place(job.names, first.place)
        setting = ", or data.images.folder" if depends_on_files else ""
        raise DataError(
            f"{job.path}: none of its {counted(num_rows, 'rows')} is left ({place}: {first.reason}); expected "
            f"some; change data.max_length, data.min_length, data.too_long or data.empty{setting}"
        )


class TokenizeJob(NamedTuple):
    """All that is needed to tokenize the records of a source."""

    path: str
    """Name of the source in errors."""
    names: tuple[str, ...]
    """Names of its files."""
    columns: Columns
    limits: Limits
    renderer: Renderer


def _blocks(job: TokenizeJob, records: Records) -> Iterator[ShardBuilder]:
    image_store = job.renderer.image_store
    drops_images = image_store is not None and image_store.images.bad == "drop"
    tolerated: tuple[type[DataError], ...] = (PictureError,) if drops_images else ()
    tolerated += (EmptyError,) if job.columns.empty == "drop" else ()
    is_frozen = gc.get_freeze_count() > 0
    if not is_frozen:  # each full collection would look at all objects of the libraries again
        gc.freeze()
    try:
        for attempts in _attempt_blocks(job, records, tolerated):
            yield _block(attempts)
    except PictureError as error:
        raise PictureError(f"{error}; or leave such rows out with data.images.bad=drop") from None
    finally:
        if not is_frozen:
            gc.unfreeze()


def _block(attempts: Sequence[Attempt]) -> ShardBuilder:
    builder, rows = ShardBuilder(), []
    for number, place, row, samples, incidents, error in attempts:
        builder.num_rows += 1
        # A row that is left out is listed with its reason.
        builder.films |= {image.film: None for image in _images_of(row) if image.film}
        if error is not None:
            reason = str(error).removeprefix(f"{place}: ")
            if isinstance(error, EmptyError):
                reason = reason.partition(";")[0]
            else:
                builder.depends_on_files = True
            builder.incidents.append(Incident(str(number), "dropped", reason))
            continue
        assert row is not None, "a row without an error was read"
        best = best_row(row)
        builder.forms[FORM_OF[type(best)]] += 1
        builder.forms.update(best.notes if isinstance(best, Conversation) else ())
        rows.append((number, place, samples))
        builder.incidents += [
            replace(incident, place=f"{number}{incident.place[len(place) :]}")
            for incident in incidents
        ]
    builder.add(rows)
    return builder


# -- processes


def choose_workers(
    opened: OpenSource, renderer: Renderer, configured: int | None
) -> tuple[int, str]:
    """Choose the number of processes that tokenize a source. The second value is the reason, empty if one process is
    the default.
    """
    size = 0 if opened.is_first_look else opened.num_bytes
    cores = usable()
    num_cores = int(min(cores.num_cores, cores.quota or cores.num_cores, MAX_WORKERS))
    num_workers = configured or (max(1, num_cores) if size >= LARGE else 1)
    if num_workers == 1:
        return 1, ""
    if renderer.image_store is not None:
        return 1, "; by one process: the model takes pictures"
    if not type(renderer.tokenizer).__module__.startswith("transformers."):
        return 1, "; by one process: the tokenizer's code comes with the model"
    return num_workers, f"; by {num_workers} processes"


def _records_in_blocks(opened: OpenSource, start: int) -> Iterator[list[tuple[int, Any]]]:
    """BATCH_ROWS records at a time. The error that ends the reading is the last record."""
    block: list[tuple[int, Any]] = []
    try:
        for numbered in islice(opened.read_records(), start, None):
            block.append(numbered)
            if len(block) == BATCH_ROWS:
                yield block
                block = []
    except DataError as error:
        block.append((0, error))
    if block:
        yield block


def _by_workers(
    job: TokenizeJob, blocks: Iterator[list[tuple[int, Any]]], num_workers: int
) -> Iterator[ShardBuilder]:
    """Tokenize the blocks of a source's records in several processes. Results come in the order of the rows."""
    sent: dict[Helper, dict[int, list[tuple[int, Any]]]]
    sent = {Helper(): {} for _ in range(num_workers - 1)}
    done: dict[int, ShardBuilder | TautError] = {}
    numbered = enumerate(blocks)
    num_yielded = 0
    try:
        setup = pickle.dumps(job)
        for helper in sent:
            _start(helper, setup, job.path, num_workers)
        while True:
            # Yield what is done, in order.
            while num_yielded in done:
                block = done.pop(num_yielded)
                if isinstance(block, TautError):
                    raise block
                num_yielded += 1
                yield block
            # Keep every worker busy, as long as not too many results wait.
            has_room = len(done) < DEPTH * num_workers
            for helper, waiting in sent.items():
                for item in islice(numbered, DEPTH - len(waiting) if has_room else 0):
                    waiting.update([item])
                    _send(helper, pickle.dumps(item))
            at_work = {helper.pipe: helper for helper, waiting in sent.items() if waiting}
            readable = wait(list(at_work), 0)
            # Tokenize a block here while no worker has answered.
            if not readable and (own := next(numbered, None) if has_room else None):
                done[own[0]] = _answer(job, own[1])
                continue
            if not at_work:
                assert not done, "every block before the last answered one has been answered"
                return
            # Take answers. Blocks of a worker that a limit has ended are tokenized here.
            for pipe in readable or wait(list(at_work)):
                helper = at_work[pipe]  # type: ignore[index]
                try:
                    number, answer = helper.pipe.recv()
                except (EOFError, OSError):
                    if not limited_call.is_limit(status := helper.reap()):
                        raise WorkerDied(
                            f"{job.path}: a process that tokenized it {how_it_ended(status)}; expected it to run until "
                            "the end; free memory, or set data.workers=1, and run again: what is finished is kept"
                        ) from None
                    done |= {number: _answer(job, sent[helper][number]) for number in sent[helper]}
                    sent[helper].clear()
                    _start(helper, setup, job.path, num_workers)
                    continue
                del sent[helper][number]
                done[number] = answer
    finally:
        for helper in sent:
            helper.end()


def _answer(job: TokenizeJob, records: list[tuple[int, Any]]) -> ShardBuilder | TautError:
    """Tokenize a block, or return its error."""
    try:
        (block,) = _blocks(job, records)
    except TautError as error:
        return error
    return block


def _start(helper: Helper, setup: bytes, path: str, num_workers: int) -> None:
    try:
        helper.start(COMMAND, {**limited_call.environment(), **ENVIRONMENT})
    except OSError as error:
        raise WorkerDied(
            f"{path}: the system starts no process to tokenize it: {error.strerror or error}; expected "
            f"{num_workers}; set data.workers=1"
        ) from None
    _send(helper, setup)


def _send(helper: Helper, message: bytes) -> None:
    with contextlib.suppress(OSError):  # it ended: seen when its answer is read
        helper.pipe.send_bytes(message)


def serve(descriptor: int, leash: int) -> None:
    """In a worker: answer blocks of records until the other end of the pipe is closed.

    A thread reads them, so that the other side never waits to send while this one does.
    """
    pipe = begin(descriptor, leash)
    limited_call.run_here()
    job: TokenizeJob = pickle.loads(pipe.recv_bytes())
    arrived: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def receive() -> None:
        try:
            while True:
                arrived.put(pipe.recv_bytes())
        except (EOFError, OSError):
            arrived.put(None)
        except MemoryError:  # a template took it
            os._exit(limited_call.OUT_OF_MEMORY)

    threading.Thread(target=receive, daemon=True).start()
    while (message := arrived.get()) is not None:
        number, records = pickle.loads(message)
        pipe.send((number, _answer(job, records)))
