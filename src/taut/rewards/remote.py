"""Verifiers that ask a server: many answers at a time on one thread of their own, each within its time.

The limit covers all attempts and holds in any thread; what is cancelled closes its connection.

Imports web, ``http.py`` and the verifiers' base. The panel imports it.
"""

from __future__ import annotations

import weakref
from concurrent.futures import Future
from contextlib import ExitStack

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from taut import web
from taut.rewards.answered import Answered
from taut.rewards.http import Client
from taut.rewards.registry import Part
from taut.rewards.verifier import Score, reason, scored


class Remotes:
    """The thread, opened with the first answer. ``concurrency``: answers that are asked about at a time."""

    def __init__(self, concurrency: int) -> None:
        self._limit = anyio.Semaphore(concurrency)
        self._stack = ExitStack()
        self._portal: BlockingPortal | None = None
        self._close = weakref.finalize(self, self._stack.close)
        """Also at the end of the process, which would wait for the thread."""

    def start(self, part: Part, answered: Answered) -> Future[Score]:
        """The word of a verifier on an answer, to be."""
        if not self._close.alive:
            raise RuntimeError("the rewards are closed")
        if self._portal is None:
            self._portal = self._stack.enter_context(start_blocking_portal())
            manager = self._portal.wrap_async_context_manager(web.open_client())
            self._client = Client(self._stack.enter_context(manager))
        return self._portal.start_task_soon(self._ask, part, answered)

    def close(self) -> None:
        """End the thread and its connections."""
        self._close()

    async def _ask(self, part: Part, answered: Answered) -> Score:
        async with self._limit:
            try:
                with anyio.fail_after(part.timeout):
                    return scored(part.label, await part.verifier.ask(self._client, answered))
            except TimeoutError as error:
                last = f"; the last: {error}" if str(error) else ""
                return Score(error=f"{part.label} had no answer within {part.timeout:g} s{last}")
            except Exception as error:  # noqa: BLE001 (what a server's answer leads to is counted and shown)
                return Score(error=reason(error))
