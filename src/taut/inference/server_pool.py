"""Several servers of one model: which of them gets a request, and what becomes of it when a server fails.

    affinity      requests with the same one (the prompts of a group, the turns of a path) go to the server that got the
                  first of them, whose prefix cache has their beginning
    a first one   to the server with the fewest requests under way, so a slow one gets fewer
    a failure     the server is left out, and what it was asked is asked of another with the same seed
    back again    a server that is left out is tried again every few seconds: ``revive`` gives it the last weights and
                  proves them before it gets requests

Where weights follow a training, an answer counts once the server has said, after the answer, that it is still the
process, with the weights, that was proven: a server that was started again answers from other weights. One question is
asked for all answers that came before it.

All state changes on the thread of the connections, and nowhere else, but for ``Server.serving``, which is replaced as a
whole. No server left: an EngineError with the last failure.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import anyio
import httpx2

from taut.errors import EngineError, RequestRefused
from taut.inference.vllm_client import PUSHED, NoAnswer, VllmServer, WorkerState
from taut.io import http

TRIED_AGAIN = 5.0
"""Seconds between two attempts to use a server that was left out."""
EMPTY = 0.01
"""Seconds between two looks at whether a server has requests under way."""
MOST_HOMES = 4096
"""Affinities whose server is remembered."""

T = TypeVar("T")
Homes = OrderedDict[str, "Server"]
"""The server of each affinity, the last used at the end."""


class Restarted(EngineError):
    """A server that was started again since its weights were proven."""


@dataclass(frozen=True)
class Serving:
    """Model and version that requests to a server name, and that must still hold after an answer for it to count."""

    model: str
    """The model's name in requests."""
    version: int = 0
    workers: tuple[list[WorkerState], ...] = ()
    """The states that its workers may be in: while weights are loaded two. Empty: it is not asked."""


@dataclass(eq=False)
class Server:
    """One of the servers, and how it is doing."""

    vllm: VllmServer
    serving: Serving
    failure: EngineError | None = None
    """Error that leaves the server out; None while it is in use."""
    is_returning: bool = False
    """Whether it answers and is about to get its weights: requests wait for it."""
    is_held: bool = False
    """Whether it gets no new requests for a moment."""
    num_under_way: int = 0
    models: Counter[str] = field(default_factory=Counter)
    """The requests under way, by the model they name."""
    scopes: set[anyio.CancelScope] = field(default_factory=set)
    """Scopes of the requests under way, which end when the server is left out."""
    asking: anyio.Lock | None = None
    question: _Question | None = None
    """The next question of what it holds."""

    @property
    def url(self) -> str:
        return self.vllm.openai.url


@dataclass(eq=False)
class _Question:
    """Question for the weights of a server, on behalf of all answers that came before."""

    outcome: list[WorkerState] | EngineError | None = None


@dataclass(eq=False)
class _Waiter:
    """A request that waits for a server."""

    affinity: str
    homes: Homes
    priority: int
    event: anyio.Event
    server: Server | None = None
    failure: EngineError | None = None
    """Why the request gets no server."""


class Pool:
    """The servers. ``close`` ends the connections and what is under way."""

    def __init__(self, servers: Sequence[Server], concurrency: int, thread: http.ClientThread):
        """``concurrency``: requests under way at a time, for each server."""
        self.servers, self._concurrency, self._thread = servers, concurrency, thread
        self.revive: Callable[[Server], None] = lambda server: None
        """Makes a server that was left out ready for requests. Raises EngineError where it cannot be used yet."""
        self.revives = True
        """Whether servers that were left out are tried again by themselves."""
        self.changing = threading.RLock()
        """Held while a server comes back, and while all of them are given weights: one at a time."""
        self._waiting: dict[int, dict[_Waiter, None]] = {}
        """Requests that wait, by priority, in the order in which they came."""
        self._left_out: list[str] = []
        self._wake, self._is_closed = threading.Event(), False
        self._reviver: threading.Thread | None = None

    def close(self) -> None:
        self._is_closed = True
        self._wake.set()
        self._thread.close()

    @property
    def in_use(self) -> list[Server]:
        return [server for server in self.servers if server.failure is None]

    @property
    def failure(self) -> EngineError:
        """Error to raise where no server is left."""
        failures = [server.failure for server in self.servers if server.failure is not None]
        if len(self.servers) == 1:
            return failures[-1]
        return EngineError(f"none of the {len(self.servers)} servers can be used; {failures[-1]}")

    def named(self, server: Server, failure: EngineError) -> EngineError:
        """A failure with the server's URL, where there are several."""
        if len(self.servers) == 1 or server.vllm.control.url in str(failure):
            return failure
        return type(failure)(str(failure).replace("server:", f"server: {server.url}:", 1))

    def take_left_out(self) -> list[str]:
        """Why servers were left out since the last call."""
        taken, self._left_out = self._left_out, []
        return taken

    def start(
        self,
        affinity: str,
        homes: Homes,
        priority: int,
        body: dict[str, Any],
        read: Callable[[Any], T],
    ) -> Future[tuple[T, int]]:
        """The future answer to a completion request, read by ``read``, and the version of the weights when it began.
        ``body`` is sent with the model's name; the lowest ``priority`` comes first.
        """
        return self._thread.start(self._complete, affinity, homes, priority, body, read)

    async def _complete(
        self,
        client: httpx2.AsyncClient,
        affinity: str,
        homes: Homes,
        priority: int,
        body: dict[str, Any],
        read: Callable[[Any], T],
    ) -> tuple[T, int]:
        num_failures = 0
        while True:
            server = await self._enter(_Waiter(affinity, homes, priority, anyio.Event()))
            serving, scope = server.serving, anyio.CancelScope()
            server.models[serving.model] += 1
            server.scopes.add(scope)
            # The answer counts if the server still holds the weights that it began with.
            try:
                with scope:
                    asked = {**body, "model": serving.model}
                    answer = read(await server.vllm.openai.send(client, "completions", asked))
                    await self._require_kept(client, server, serving)
                    return answer, serving.version
            except RequestRefused:
                raise
            except EngineError as failure:
                # Leave the server out, and ask another one.
                num_failures += 1
                if PUSHED in serving.model and not isinstance(failure, NoAnswer):
                    failure = Restarted(f"{failure}")  # it may have lost the adapter
                failure = self.named(server, failure)
                self._leave_out(server, failure)
                if num_failures > len(self.servers):
                    raise failure from None
            finally:
                server.scopes.discard(scope)
                server.models[serving.model] -= 1
                self._give_back(server)

    async def _enter(self, waiter: _Waiter) -> Server:
        """Wait for a server that takes another request."""
        self._waiting.setdefault(waiter.priority, {})[waiter] = None
        self._deal()
        try:
            await waiter.event.wait()
        except BaseException:  # cancelled
            self._waiting[waiter.priority].pop(waiter, None)
            if waiter.server is not None:
                self._give_back(waiter.server)
            raise
        if waiter.failure is not None:
            raise waiter.failure
        assert waiter.server is not None, "it was dealt one"
        return waiter.server

    def _give_back(self, server: Server) -> None:
        server.num_under_way -= 1
        self._deal()

    def _deal(self) -> None:
        """Give waiting requests to servers that take some."""
        in_use, dealt = self.in_use, []
        is_over = not in_use and not any(server.is_returning for server in self.servers)
        for waiter in chain(*(self._waiting[priority] for priority in sorted(self._waiting))):
            free = [
                server
                for server in in_use
                if not server.is_held and server.num_under_way < self._concurrency
            ]
            if not free and not is_over:
                break
            if is_over:
                waiter.failure = self.failure
            else:
                waiter.server = _chosen(waiter, free)
                if waiter.server is None:
                    continue
                waiter.server.num_under_way += 1
            dealt.append(waiter)
        for waiter in dealt:
            del self._waiting[waiter.priority][waiter]
            waiter.event.set()

    async def _require_kept(
        self, client: httpx2.AsyncClient, server: Server, serving: Serving
    ) -> None:
        """Raise EngineError unless the server has the weights that it had when a request began, or later ones of this
        run, in the same process.
        """
        if not serving.workers:
            return
        server.asking = server.asking or anyio.Lock()
        question = server.question = server.question or _Question()
        async with server.asking:
            if question.outcome is None:
                server.question = None  # answers that come from now on need another one
                try:
                    question.outcome = await server.vllm.held(client)
                except EngineError as error:
                    question.outcome = error
        if isinstance(question.outcome, EngineError):
            raise question.outcome
        require_held(question.outcome, serving, server.serving)

    # -- servers that are left out, held, and used again; for callers on other threads

    def leave_out(self, server: Server, failure: EngineError) -> None:
        """Use a server no more, until it is ``admit``-ted."""
        self._thread.start(_run, self._leave_out, server, failure).result()

    def admit(self, server: Server) -> None:
        """Use a server again."""
        self._thread.start(_run, self._set_failure, server, None).result()

    @contextmanager
    def held(self, *, until_empty: bool) -> Iterator[None]:
        """Inside, no server gets new requests. ``until_empty``: those under way are waited for first."""

        async def empty(_: httpx2.AsyncClient) -> None:
            while any(server.num_under_way for server in self.servers):
                await anyio.sleep(EMPTY)

        self._thread.start(_run, self._hold, True).result()
        try:
            if until_empty:
                self._thread.start(empty).result()
            yield
        finally:
            self._thread.start(_run, self._hold, False).result()

    def _hold(self, is_held: bool) -> None:
        for server in self.servers:
            server.is_held = is_held
        self._deal()

    def _leave_out(self, server: Server, failure: EngineError) -> None:
        if server.failure is None:
            server.failure = failure
            self._left_out.append(str(failure))
            server.is_returning = self.revives and isinstance(failure, Restarted)
            for scope in server.scopes:
                scope.cancel()
            if self.revives and self._reviver is None:
                self._reviver = threading.Thread(target=self._revive, name="servers", daemon=True)
                self._reviver.start()
            self._wake.set()
        self._deal()

    def _revive(self) -> None:
        """Try servers that were left out again, until the pool is closed."""
        with suppress(http.Closed):
            while not self._is_closed:
                self._wake.wait(TRIED_AGAIN if self._to_revive() else None)
                self._wake.clear()
                for server in self.servers:
                    with self.changing:
                        if server in self._to_revive():
                            try:
                                self.revive(server)
                                self.admit(server)
                            except EngineError as failure:
                                self._thread.start(
                                    _run, self._set_failure, server, failure
                                ).result()

    def _to_revive(self) -> list[Server]:
        """The servers that may come back by themselves."""
        return [
            server
            for server in self.servers
            if isinstance(server.failure, NoAnswer | Restarted) and not self._is_closed
        ]

    def _set_failure(self, server: Server, failure: EngineError | None) -> None:
        """Use a server again, or not: then ``failure`` is what is wrong with it."""
        server.failure, server.is_returning = failure, False
        self._deal()


async def _run(_: httpx2.AsyncClient, act: Callable[..., None], *args: Any) -> None:
    act(*args)


def _chosen(waiter: _Waiter, free: Sequence[Server]) -> Server | None:
    """The server of a request's affinity, if it takes a request now; for a new one the least busy."""
    homes = waiter.homes
    home = homes.get(waiter.affinity)
    if home is None or home.failure is not None:
        home = homes[waiter.affinity] = min(free, key=lambda server: server.num_under_way)
    homes.move_to_end(waiter.affinity)
    if len(homes) > MOST_HOMES:
        homes.popitem(last=False)
    return home if home in free else None


def require_held(found: Sequence[WorkerState], began: Serving, now: Serving) -> None:
    """Raise EngineError unless workers in the state ``found`` are those that a request ``began`` with, and have weights
    that they may have ``now``.
    """
    starts = [worker.start for worker in began.workers[-1]]
    if [worker.start for worker in found] != starts:
        raise Restarted(
            "server: it was started again while it answered, and lost its weights; expected one process; its answers "
            "are not used; run the same command again with resume=true"
        )
    if not now.workers or [*found] in now.workers:
        return
    wrong, expected = next(
        (worker, expected)
        for worker, expected in zip(found, now.workers[-1], strict=True)
        if worker != expected
    )
    raise EngineError(
        f"server: it holds weights {wrong.origin}; expected those {expected.origin}, which it had at this run's last "
        "push; let no other client push to it"
    )
