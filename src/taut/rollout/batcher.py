"""One thread that owns a reward model, and any number of others that ask it.

What waits is rendered and scored together, as much as the token budget takes, so that many small requests cost what
one large one does. A request that cannot be scored fails alone. Where the thread itself ends by a mistake, whoever
waits and whoever asks afterwards is told why: nothing waits for ever.

May import rollout/judge and what it may. Commands import it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from taut.data.formats import Conversation
from taut.data.media import images_of, text_of
from taut.data.preferences import AnyRow
from taut.errors import EngineError, TautError
from taut.rollout.judge import Judge, Rendered
from taut.types import Sample

PICTURE = 256
"""About how many tokens one has."""


class Busy(EngineError):
    """More waits than is let in."""


@dataclass(frozen=True, eq=False, slots=True)
class _Job:
    rows: tuple[AnyRow | Rendered, ...]
    future: Future[list[float]] = field(default_factory=Future)


class Batcher:
    """Scores rows for many askers. ``close`` ends it, once what waits is scored."""

    def __init__(
        self,
        judge: Judge,
        most_waiting: int = 256,
        afterwards: Callable[[], None] | None = None,
    ) -> None:
        """``afterwards``: called after all that was scored together."""
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
        """Why nothing is scored any more; None while it is."""
        return self._reason

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, rows: Sequence[AnyRow | Rendered]) -> Future[list[float]]:
        """A number for each row, in their order, when it is its turn. The future fails with a TautError.

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
        """Score what waits, and end."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._executor.shutdown()

    def _run(self) -> None:
        while self._take():
            self._score(self._current)
            if self.afterwards is not None:
                self.afterwards()

    def _take(self) -> bool:
        """Wait for work, and take as many requests as are there, the budget allowing; False: it is closed."""
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

    def _score(self, jobs: Sequence[_Job]) -> None:
        rendered = [(job, samples) for job in jobs if (samples := self._samples(job)) is not None]
        try:
            found = iter(self.judge.scores([s for _, samples in rendered for s in samples]))
        except TautError:
            for job, samples in rendered:
                self._score_alone(job, samples)
            return
        for job, samples in rendered:
            job.future.set_result([float(next(found)[-1]) for _ in samples])

    def _score_alone(self, job: _Job, samples: Sequence[Sample]) -> None:
        try:
            found = self.judge.scores(samples)
        except TautError as error:
            job.future.set_exception(error)
        else:
            job.future.set_result([float(score_R[-1]) for score_R in found])

    def _samples(self, job: _Job) -> list[Sample] | None:
        try:
            return [sample for (sample,) in self.judge.render(job.rows)]
        except TautError as error:
            job.future.set_exception(error)
            return None

    def _end(self, ended: Future[None]) -> None:
        """Whoever still waits is told that the thread has ended, and why."""
        error = ended.exception()
        why = "was closed" if error is None else f"ended by {type(error).__name__}: {_line(error)}"
        with self._changed:
            self._reason = f"the thread that owns the reward model {why}; start the server again"
            left = [*self._current, *self._waiting]
            self._waiting.clear()
        for job in left:
            if not job.future.done():
                job.future.set_exception(EngineError(self._reason))


def _guess(row: AnyRow | Rendered) -> int:
    """About how many tokens a row has, before it is tokenised: a third of its characters, and what pictures have."""
    if isinstance(row, Conversation):
        size = sum(len(text_of(message["content"])) for message in row.messages)
        return size // 3 + PICTURE * len(images_of(row.messages))
    return len(row.text if isinstance(row, Rendered) else repr(row)) // 3


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
