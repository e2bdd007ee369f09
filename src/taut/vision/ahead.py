"""Threads for what may be done ahead of time. What they have not begun when the process ends is left undone, so that an
error is not told only after a queue of pictures. Imports nothing of ours. Imported by album.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TypeAlias

LONGEST = 10.0
"""Seconds that the end waits for what is under way."""

_Jobs: TypeAlias = "SimpleQueue[Callable[[], None] | None]"


class Ahead:
    """So many threads, and a queue before them."""

    def __init__(self, num_threads: int) -> None:
        self._jobs: _Jobs = SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._jobs,), name="pictures", daemon=True)
            for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()
        self._end = weakref.finalize(self, _end, self._jobs, self._threads)

    def add(self, job: Callable[[], None]) -> None:
        """Do it some time. What it raises is for the console: whoever asks for its result will be told."""
        self._jobs.put(job)

    def close(self) -> None:
        """Finish what is under way, and leave the rest."""
        self._end()

    def abandon(self) -> None:
        """In a process that was forked: its threads are not here."""
        self._end.detach()


def _work(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # or a waiting thread would keep what it needed


def _end(jobs: _Jobs, threads: Sequence[threading.Thread]) -> None:
    try:
        while True:
            jobs.get_nowait()
    except Empty:
        pass
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(LONGEST)
