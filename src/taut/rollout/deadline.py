"""Calls of a user's code, side by side in threads, each with a time limit of its own.

A thread cannot be ended from outside: one that does not return is abandoned, and ends with the process. What it does
later is not seen. Time is counted from when a call begins, in any thread and without signals.

Imports nothing of ours. Rollout imports it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple


class Outcome(NamedTuple):
    """What a call returned, or why it did not."""

    value: Any = None
    error: str | None = None


def each(
    jobs: Sequence[Callable[[], Any]],
    timeout: float,
    workers: int,
    on_late: Callable[[threading.Thread], None] = lambda thread: None,
) -> list[Outcome]:
    """The outcome of each call, in their order; ``workers`` at a time, ``timeout`` seconds each.

    ``on_late`` is told of each thread that is abandoned, at once: what it raises ends the calling.
    """
    found: dict[int, Outcome] = {}
    done: SimpleQueue[tuple[int, Outcome]] = SimpleQueue()
    deadlines: dict[int, float] = {}
    threads: dict[int, threading.Thread] = {}
    waiting = list(reversed(range(len(jobs))))
    while len(found) < len(jobs):
        while waiting and len(deadlines) < workers:
            number = waiting.pop()
            deadlines[number] = time.monotonic() + timeout
            job = (number, jobs[number], done)
            threads[number] = threading.Thread(target=_run, args=job, daemon=True)
            threads[number].start()
        try:
            left = min(deadlines.values()) - time.monotonic()
            number, outcome = done.get(timeout=max(left, 0.0))
        except Empty:
            number = min(deadlines, key=deadlines.__getitem__)
            outcome = Outcome(None, f"did not return within {timeout:g} s")
            on_late(threads[number])
        if deadlines.pop(number, None) is not None:  # else it is one given up before
            found[number] = outcome
    return [found[number] for number in range(len(jobs))]


def _run(number: int, job: Callable[[], Any], done: SimpleQueue[tuple[int, Outcome]]) -> None:
    try:
        outcome = Outcome(job())
    except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's code may raise anything; it is shown)
        reason = " ".join(f"raised {type(error).__name__}: {error}".split())
        outcome = Outcome(error=reason[:300])
    done.put((number, outcome))
