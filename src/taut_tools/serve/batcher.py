"""A reward model that scores for several callers.

One thread owns the model, so that several callers can share it: waiting requests are rendered and scored together, up
to the token budget. A request that cannot be scored fails alone. If the thread itself fails, all waiting and later
requests fail with its error: no request waits for ever.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from taut.data.rows.messages import Conversation, images_of, text_of
from taut.data.rows.schema import AnyRow, Stepwise
from taut.errors import EngineError, TautError
from taut.inference.reward_model import Judge, Rendered
from taut.types import FloatArray, Sample

PICTURE = 256
"""Estimated tokens of a picture."""


class Busy(EngineError):
    """Too many requests wait."""


@dataclass(frozen=True, eq=False, slots=True)
class _Job:
    rows: tuple[AnyRow | Rendered, ...]
    future: Future[list[FloatArray]] = field(default_factory=Future)


class Batcher:
    """Scores rows for many callers. ``close`` ends it after the waiting requests are scored."""

    def __init__(
        self,
        judge: Judge,
        most_waiting: int = 256,
        afterwards: Callable[[], None] | None = None,
    ) -> None:
        """``afterwards``: called after each batch."""
        self.judge, self.most_waiting, self.afterwards = judge, most_waiting, afterwards
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._current: list[_Job] = []
        self._is_closing = False
        self._reason: str | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="reward-model")
        self._executor.submit(self._run).add_done_callback(self._end)

    @property
    def failure(self) -> str | None:
        """Why requests are no longer scored; None while they are."""
        return self._reason

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, rows: Sequence[AnyRow | Rendered]) -> Future[list[FloatArray]]:
        """The future scores of the rows, in their order, at each read of a row. The future fails with a TautError.

        Raises Busy, or EngineError where the thread has ended.
        """
        job = _Job(tuple(rows))
        with self._changed:
            if self._reason is not None:
                raise EngineError(self._reason)
            if len(self._waiting) >= self.most_waiting:
                raise Busy(
                    f"{len(self._waiting)} requests wait already; expected fewer; try again later"
                )
            self._waiting.append(job)
            self._changed.notify()
        return job.future

    def close(self) -> None:
        """Score the waiting requests, and end."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._executor.shutdown()

    def _run(self) -> None:
        while self._take():
            pairs = []
            for job in self._current:
                try:
                    samples = [sample for (sample,) in self.judge.render(job.rows)]
                except TautError as error:
                    job.future.set_exception(error)
                else:
                    pairs.append((job, samples))
            self._score(pairs)
            if self.afterwards is not None:
                self.afterwards()

    def _take(self) -> bool:
        """Wait for requests, and take waiting ones up to the token budget; False after ``close``."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            self._current = []
            size = 0
            while self._waiting and (not self._current or size < self.judge.tokens_per_batch):
                job = self._waiting.popleft()
                if job.future.set_running_or_notify_cancel():
                    self._current.append(job)
                    size += sum(_guess(row) for row in job.rows)
            return bool(self._current or self._waiting or not self._is_closing)

    def _score(self, pairs: Sequence[tuple[_Job, Sequence[Sample]]]) -> None:
        """Score jobs together; if that fails, each alone."""
        try:
            scores = iter(self.judge.scores([s for _, samples in pairs for s in samples]))
        except TautError as error:
            if len(pairs) == 1:
                pairs[0][0].future.set_exception(error)
                return
            for pair in pairs:
                self._score([pair])
            return
        for job, samples in pairs:
            job.future.set_result([next(scores) for _ in samples])

    def _end(self, ended: Future[None]) -> None:
        """Fail the waiting requests with the reason why the thread ended."""
        error = ended.exception()
        why = "was closed"
        if error is not None:
            why = f"ended by {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        with self._changed:
            self._reason = f"the thread that owns the reward model {why}; start the server again"
            left = [*self._current, *self._waiting]
            self._waiting.clear()
        for job in left:
            if not job.future.done():
                job.future.set_exception(EngineError(self._reason))


def _guess(row: AnyRow | Rendered) -> int:
    """A row's estimated number of tokens: a third of its characters, and ``PICTURE`` for each picture."""
    if isinstance(row, Stepwise):
        return _guess(row.answer)
    if isinstance(row, Conversation):
        size = sum(len(text_of(message["content"])) for message in row.messages)
        return size // 3 + PICTURE * len(images_of(row.messages))
    return len(row.text if isinstance(row, Rendered) else repr(row)) // 3
