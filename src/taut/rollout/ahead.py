"""The next phase's roll-out, made in a thread while this one is trained on: at most one phase ahead.

    ahead.start(4, lambda: roll(4))        returns at once
    ...                                    phase 3 is trained on
    ahead.take(4)                          waits; what the call raised is raised here

The call runs in one thread beside the one that trains: it asks a server and judges answers, makes its collective calls
in a process group of its own (``Ranks.apart``) and leaves torch's global state alone (gradient mode is the thread's
own; seeds and thread counts are everybody's).

``close`` waits for nothing. The thread is a daemon, so neither an error nor an interrupt has to wait for answers still
under way: closing the engine, which comes next, cancels those, and the thread ends with them.

Imports nothing of ours. Methods import it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """One call under way, or done and not yet taken."""

    def __init__(self) -> None:
        self._phase: int | None = None
        self._future: Future[T] | None = None

    @property
    def started(self) -> int | None:
        """The phase that is under way or done; None where there is none."""
        return self._phase

    def start(self, phase: int, call: Callable[[], T]) -> None:
        """Begin a phase, once the one before is taken."""
        assert self._phase is None, f"phase {self._phase} is not taken yet"
        future: Future[T] = Future()
        self._phase, self._future = phase, future
        threading.Thread(
            target=_run, args=(call, future), name=f"phase {phase}", daemon=True
        ).start()

    def take(self, phase: int) -> T:
        """The result of a phase that was started, when it is there. Raises what the call raised."""
        assert self._future is not None and self._phase == phase, f"phase {phase} is not under way"
        try:
            return self._future.result()
        finally:
            self.close()

    def close(self) -> None:
        """Forget what is under way."""
        self._phase, self._future = None, None


def _run(call: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 (raised again by take)
        future.set_exception(error)
