"""A limit on the time of a block of a test: a read that waits for a FIFO would wait for ever."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """TimeoutError where the block takes longer. In the main thread only."""

    def stop(*_: object) -> NoReturn:
        raise TimeoutError(f"no end in {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
