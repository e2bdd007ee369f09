"""Rows of a source to cache entries: read, render, fit to length; in this process, or in several.

    cache.save(directory, key, partial(entries, opened, columns, limits, renderer, num_workers))

A block is BATCH_ROWS rows that follow each other, fewer if they hold many images. Blocks are tokenised apart and joined
in their order, so entries are the same bytes whatever ``num_workers``, and the error that is raised is the same. This
process reads the records, writes the shards, and tokenises where it would wait; each other worker is a helper process
(``taut.io.helper``) that is sent the renderer once, and then blocks. At most DEPTH blocks of a worker are on their way
at a time. A worker renders chat templates itself, under the limits of ``taut.io.processes``: if one ends it, this
process tokenises its blocks, whose templates run in their own process, and so finds the row and its error.

Workers are not used for rows of a model that takes images, whose store is one process's, or with a tokenizer whose code
comes with the model. ``attempt_rows`` goes on past rows with errors, to count them.
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

from taut.data.blocks import Block, BlockBuilder, in_shards, joined
from taut.data.entries import Entry
from taut.data.images import BATCH_ROWS, in_batches
from taut.data.messages import FORM_OF, Conversation, images_of
from taut.data.render import Incident, Limits, Renderer, answers_of, fit_any, render_each
from taut.data.schema import AnyRow, Columns, best_row, read_any
from taut.data.sources import Opened, full_place, place_of
from taut.errors import DataError, PictureError, TautError
from taut.io import processes
from taut.io.console import counted
from taut.io.helper import Helper, begin, how_it_ended
from taut.io.threads import usable
from taut.types import Sample

if TYPE_CHECKING:
    from taut.vision.content import ImageRef

Records: TypeAlias = Iterable[tuple[int, Any]]
"""Records with their numbers; the error of one that cannot be read in its place."""
LARGE = 2**24
"""Bytes of a source for which starting processes pays."""
MOST = 16
"""Processes, unless more are asked for: each takes 100 MiB or more."""
DEPTH = 3
"""Blocks that a worker has been sent and not answered: while shards are written, it goes on."""
COMMAND = "from taut.data.tokenise import serve; serve({}, {})"
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false"}
"""Added to a worker's environment: as many workers as cores leave none for threads."""


class WorkerDied(TautError):
    """A process that tokenises ended before its work, or could not be started."""


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
    opened: Opened,
    columns: Columns,
    renderer: Renderer,
    limits: Limits,
    tolerated: tuple[type[DataError], ...] = (DataError,),
) -> Iterator[Attempt]:
    """Read, render and fit every record of a source, several at a time. Errors of the tolerated types are returned in
    place of the row; any other is raised.
    """
    records = opened.attempts() if DataError in tolerated else opened.records()
    for attempts in _attempt_blocks(records, opened.names, columns, renderer, limits, tolerated):
        yield from attempts


def _attempt_blocks(
    records: Records,
    names: Sequence[str],
    columns: Columns,
    renderer: Renderer,
    limits: Limits,
    tolerated: tuple[type[DataError], ...],
) -> Iterator[list[Attempt]]:
    """The attempts of each block of records."""

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


# -- blocks and entries


def entries(
    opened: Opened,
    columns: Columns,
    limits: Limits,
    renderer: Renderer,
    num_workers: int = 1,
    start: int = 0,
) -> Iterator[Entry]:
    """The entries of a source's rows after the first ``start``, which end where an entry does."""
    how = _How(opened.path, opened.names, columns, limits, renderer)
    if num_workers > 1:
        blocks = _by_workers(how, _records_in_blocks(opened, start), num_workers)
    else:
        blocks = _blocks(how, islice(opened.records(), start, None))
    samples = blocks if start else _require_samples(blocks, how)
    return in_shards(samples, sorted(renderer.stop_set))


def entry_of(
    records: Records,
    path: str,
    names: tuple[str, ...],
    columns: Columns,
    limits: Limits,
    renderer: Renderer,
) -> Entry:
    """One entry of all these records, by this process. ``path`` is what errors call the source, ``names`` its files."""
    how = _How(path, names, columns, limits, renderer)
    blocks = list(_require_samples(_blocks(how, records), how))
    return joined(blocks, sorted(renderer.stop_set))


def _require_samples(blocks: Iterable[Block], of: _How) -> Iterator[Block]:
    """The blocks. Raises DataError after the last if there are no samples in them."""
    num_rows, num_samples, is_fleeting = 0, 0, False
    first: Incident | None = None
    for block in blocks:
        num_rows += block.num_rows
        num_samples += len(block.media)
        is_fleeting |= block.is_fleeting
        first = first or next(iter(block.incidents), None)
        yield block
    if not num_rows:
        raise DataError(f"{of.path}: the file has no rows; expected at least one; check the path")
    if not num_samples:
        assert first is not None, "a row without samples is an incident"
        place = full_place(of.names, first.place)
        setting = ", or data.images.folder" if is_fleeting else ""
        raise DataError(
            f"{of.path}: none of its {counted(num_rows, 'rows')} is left ({place}: {first.reason}); expected "
            f"some; change data.max_length, data.min_length or data.too_long{setting}"
        )


class _How(NamedTuple):
    """What makes a block of records."""

    path: str
    names: tuple[str, ...]
    columns: Columns
    limits: Limits
    renderer: Renderer


def _blocks(how: _How, records: Records) -> Iterator[Block]:
    _, names, columns, limits, renderer = how
    drops_images = renderer.image_store is not None and renderer.image_store.images.bad == "drop"
    tolerated = (PictureError,) if drops_images else ()
    is_frozen = gc.get_freeze_count() > 0
    if not is_frozen:  # each full collection would look at all objects of the libraries again
        gc.freeze()
    try:
        for attempts in _attempt_blocks(records, names, columns, renderer, limits, tolerated):
            yield _block(attempts)
    except PictureError as error:
        raise PictureError(f"{error}; or leave such rows out with data.images.bad=drop") from None
    finally:
        if not is_frozen:
            gc.unfreeze()


def _block(attempts: Sequence[Attempt]) -> Block:
    builder = BlockBuilder()
    for number, place, row, samples, incidents, error in attempts:
        builder.num_rows += 1
        builder.films |= {image.film: None for image in _images_of(row) if image.film}
        if error is not None:
            reason = str(error).removeprefix(f"{place}: ")
            builder.incidents.append(Incident(str(number), "dropped", reason))
            builder.is_fleeting = True
            continue
        assert row is not None, "a row without an error was read"
        builder.forms[FORM_OF[type(best_row(row))]] += 1
        builder.add(number, place, samples)
        builder.incidents += [
            replace(incident, place=f"{number}{incident.place[len(place) :]}")
            for incident in incidents
        ]
    return builder.build()


# -- processes


def workers_for(opened: Opened, renderer: Renderer, configured: int | None) -> tuple[int, str]:
    """How many processes tokenise a source, and words that say so; none if it is this one, as expected."""
    size = sum(stamp.size for stamp in opened.stamps)
    cores = usable()
    num_cores = int(min(cores.num_cores, cores.quota or cores.num_cores, MOST))
    num_workers = configured or (max(1, num_cores) if size >= LARGE else 1)
    if num_workers == 1:
        return 1, ""
    if renderer.image_store is not None:
        return 1, "; by one process: the model takes pictures"
    if not type(renderer.tokenizer).__module__.startswith("transformers."):
        return 1, "; by one process: the tokenizer's code comes with the model"
    return num_workers, f"; by {num_workers} processes"


def _records_in_blocks(opened: Opened, start: int) -> Iterator[list[tuple[int, Any]]]:
    """BATCH_ROWS records at a time; the last one may be an error, with which they end."""
    block: list[tuple[int, Any]] = []
    try:
        for numbered in islice(opened.records(), start, None):
            block.append(numbered)
            if len(block) == BATCH_ROWS:
                yield block
                block = []
    except DataError as error:
        block.append((0, error))
    if block:
        yield block


def _by_workers(
    how: _How, blocks: Iterator[list[tuple[int, Any]]], num_workers: int
) -> Iterator[Block]:
    """The blocks of a source's records, in their order."""
    sent: dict[Helper, dict[int, list[tuple[int, Any]]]]
    sent = {Helper(): {} for _ in range(num_workers - 1)}
    done: dict[int, Block | TautError] = {}
    numbered = enumerate(blocks)
    num_yielded = 0
    try:
        setup = pickle.dumps(how)
        for helper in sent:
            _start(helper, setup, how.path, num_workers)
        while True:
            while num_yielded in done:
                block = done.pop(num_yielded)
                if isinstance(block, TautError):
                    raise block
                num_yielded += 1
                yield block
            has_room = len(done) < DEPTH * num_workers
            for helper, waiting in sent.items():
                for item in islice(numbered, DEPTH - len(waiting) if has_room else 0):
                    waiting.update([item])
                    _send(helper, pickle.dumps(item))
            at_work = {helper.pipe: helper for helper, waiting in sent.items() if waiting}
            answered = wait(list(at_work), 0)
            if not answered and (own := next(numbered, None) if has_room else None):
                done[own[0]] = _answer(how, own[1])
                continue
            if not at_work:
                assert not done, "every block before the last answered one has been answered"
                return
            for pipe in answered or wait(list(at_work)):
                helper = at_work[pipe]  # type: ignore[index]
                try:
                    number, answer = helper.pipe.recv()
                except (EOFError, OSError):
                    if not processes.is_limit(status := helper.reap()):
                        raise _death(how.path, status) from None
                    done |= {number: _answer(how, sent[helper][number]) for number in sent[helper]}
                    sent[helper].clear()
                    _start(helper, setup, how.path, num_workers)
                    continue
                del sent[helper][number]
                done[number] = answer
    finally:
        for helper in sent:
            helper.end()


def _answer(how: _How, records: list[tuple[int, Any]]) -> Block | TautError:
    """The block of these records, or its error."""
    try:
        (block,) = _blocks(how, records)
    except TautError as error:
        return error
    return block


def _start(helper: Helper, setup: bytes, path: str, num_workers: int) -> None:
    try:
        helper.start(COMMAND, {**processes.environment(), **ENVIRONMENT})
    except OSError as error:
        raise WorkerDied(
            f"{path}: the system starts no process to tokenise it: {error.strerror or error}; expected "
            f"{num_workers}; set data.workers=1"
        ) from None
    _send(helper, setup)


def _send(helper: Helper, message: bytes) -> None:
    with contextlib.suppress(OSError):  # it ended: seen when its answer is read
        helper.pipe.send_bytes(message)


def _death(path: str, status: int | None) -> WorkerDied:
    return WorkerDied(
        f"{path}: a process that tokenised it {how_it_ended(status)}; expected it to run until the end; free "
        "memory, or set data.workers=1, and run again: what is finished is kept"
    )


def serve(descriptor: int, leash: int) -> None:
    """In a worker: answer blocks of records until the other end of the pipe is closed.

    A thread reads them, so that the other side never waits to send while this one does.
    """
    pipe = begin(descriptor, leash)
    processes.run_here()
    how: _How = pickle.loads(pipe.recv_bytes())
    arrived: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def receive() -> None:
        try:
            while True:
                arrived.put(pipe.recv_bytes())
        except (EOFError, OSError):
            arrived.put(None)
        except MemoryError:  # a template took it
            os._exit(processes.OUT_OF_MEMORY)

    threading.Thread(target=receive, daemon=True).start()
    while (message := arrived.get()) is not None:
        number, records = pickle.loads(message)
        pipe.send((number, _answer(how, records)))
