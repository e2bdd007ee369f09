"""An HTTP/1.1 server with limits: on requests, before any work is done, and on connections, in time and number.

    serve(Guard(app, limits, host, key), limits, listener)          app: any ASGI application
    stop = serve_aside(Guard(...), limits, listener)                the same in a thread, until stop()

``Guard`` checks for each request, in this order: the request target, the headers' size, room for it (at
``max_connections`` requests only ``GET /health``), Host, Origin, the key, the announced size of the body. Only then is
the body read, within ``body_seconds`` and ``max_bytes_in_flight``. A request whose client disconnects is cancelled.

Host and Origin keep web pages out: a page may send requests to a loopback server, but the browser names the page's
origin in them; and a page whose host name was made to point at this machine (DNS rebinding) sends that name as Host.

A refusal is ``{"error": {"message", "field"}}`` with the status of its kind.

Connections use uvicorn's h11 protocol. Uvicorn limits neither the time in which a client sends its headers, nor that in
which it reads an answer, and refuses every connection above its limit. Here a connection has one deadline while it has
no request (from its start or its last answer to the end of the next request's headers), and another while an answer
cannot be sent. A request beyond ``max_connections`` is marked ``BUSY`` and served only if it is ``GET /health``;
``NUM_SPARE`` further connections may be open for it, and a new connection closes the one that has waited longest
without a request that is served. So one can always be closed, and ``/health`` is always reachable. Chunked bodies are
refused before they are parsed: chunks of one byte cost the event loop more than their senders.

Fewer connections than that are open where the limit of open files (``ulimit -n``) leaves less room. What fails in the
server is one line on stderr, at most one a minute, and it serves on.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from types import FrameType
from typing import Any, TypeAlias, cast
from urllib.parse import urlsplit

import h11
import uvicorn
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from taut.errors import ConfigError
from taut.inference.settings import HOST_NAME, HttpLimits
from taut.io.console import Printer
from taut.train.signals import SIGNALS

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

HEALTH = "/health"
"""Answered even at ``max_connections`` requests."""
BUSY = "taut.busy"
"""Key of the ASGI scope's ``state``: the server is at ``max_connections`` requests."""
LINGER = 1.0
"""Seconds for which the rest of a refused request is read and dropped. Closing a connection with unread data resets it,
and the client might not see the answer."""
RETRY = {503: "1"}
"""Seconds after which a client may try again, by status."""


class Refused(Exception):
    """An answer with a status that is not 200."""

    def __init__(self, status: int, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.field = status, message, field

    @property
    def body(self) -> bytes:
        error = {"message": " ".join(self.message.split()), "field": self.field}
        return json.dumps({"error": error}).encode()

    @property
    def headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json", "content-length": str(len(self.body))}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status in RETRY:
            headers["retry-after"] = RETRY[self.status]
        return headers

    @property
    def closing(self) -> list[tuple[bytes, bytes]]:
        """The headers of an answer after which the connection is closed."""
        headers = {**self.headers, "connection": "close"}
        return [(name.encode(), value.encode()) for name, value in headers.items()]


class Guard:
    """An ASGI application that passes on requests within the limits, with their bodies read."""

    def __init__(self, app: App, limits: HttpLimits, host: str, key: bytes | None = None) -> None:
        """``host``: the name that the server listens on. ``key``: the token that every request but GET must have."""
        self._app, self._limits, self._key = app, limits, key
        self._names = {_host_name(name) for name in (host, *limits.hosts)}
        self._num_bytes_held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "served without lifespan and websockets"
        body = bytearray()
        try:
            try:
                if (refusal := self._refusal(scope)) is not None:
                    raise refusal
                is_whole = await self._read(body, receive)
            except Refused as refused:
                await _refuse(refused, receive, send)
                return
            if is_whole:
                await self._serve(scope, bytes(body), receive, send)
        finally:
            self._num_bytes_held -= len(body)

    def _refusal(self, scope: Scope) -> Refused | None:
        """Why a request is refused by its request line and headers; None where it is not."""
        # Sizes of request line and headers, and the number of requests.
        limits = self._limits
        target = scope["raw_path"]
        num_bytes = len(target) + len(scope["query_string"])
        if num_bytes > limits.max_url_bytes:
            return Refused(
                414,
                f"the request target has {num_bytes:,} bytes; expected at most {limits.max_url_bytes:,}; shorten it",
            )
        if not target.startswith(b"/"):
            return Refused(
                400, f"found the request target {target[:60]!r}; expected a path, such as {HEALTH}"
            )
        num_bytes = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if num_bytes > limits.max_header_bytes:
            return Refused(
                431,
                f"the headers have {num_bytes:,} bytes; expected at most {limits.max_header_bytes:,}; send fewer",
            )
        if _is_beyond(scope):
            return Refused(
                503,
                f"{limits.max_connections} requests are being served; expected fewer; try again later",
            )
        # Who asks: a page of another site, a client without the token.
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if (refused := self._refusal_of_site(headers, scope)) is not None:
            return refused
        if scope["method"] not in ("GET", "HEAD") and self._key is not None:
            scheme, _, token = headers.get(b"authorization", "").partition(" ")
            is_same = hmac.compare_digest(token.strip().encode(), self._key)
            if scheme.lower() != "bearer" or not is_same:
                problem = "a token that is not the server's" if token else "no token"
                return Refused(
                    401,
                    f"Authorization: found {problem}; expected Bearer and the server's token; send it",
                    "Authorization",
                )
        size = int(headers.get(b"content-length", "0"))
        max_bytes = limits.max_request_bytes if scope["method"] == "POST" else 0
        if size > max_bytes:
            return Refused(
                413,
                f"the request's body has {size:,} bytes; expected at most {max_bytes:,}; send less at a time",
            )
        return None

    def _refusal_of_site(self, headers: dict[bytes, str], scope: Scope) -> Refused | None:
        """Why a request is refused whose Host does not name this server, or whose Origin is another site's page."""
        host = headers.get(b"host", "")
        arrived_at = (scope.get("server") or ("",))[0]
        name = _host_name(host) if HOST_NAME.fullmatch(host) else ""
        if not name or not (
            is_loopback(name) or name in self._names or name == _host_name(arrived_at)
        ):
            return Refused(
                403,
                f"Host: found {host[:80]!r}; expected a name of the loopback or one that the server was given; use "
                "its address, or start the server with hosts=[NAME]",
                "Host",
            )
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site", "none")
        try:
            is_own = origin is None or urlsplit(origin).netloc.lower() == host.lower()
        except ValueError:
            is_own = False
        if not is_own or site not in ("none", "same-origin"):
            return Refused(
                403,
                f"Origin: found {(origin or site)[:80]!r}, a request that another site's page makes; expected none, or "
                "this server's own; ask from a program, or open a page of this server at its address",
                "Origin",
            )
        return None

    async def _read(self, body: bytearray, receive: Receive) -> bool:
        """Read the whole request into ``body``; False: the client disconnected."""
        limits = self._limits
        try:
            async with asyncio.timeout(limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    part = message.get("body", b"")
                    if self._num_bytes_held + len(part) > limits.max_bytes_in_flight:
                        raise Refused(
                            503,
                            f"the requests being served hold {self._num_bytes_held:,} bytes; expected at most "
                            f"{limits.max_bytes_in_flight:,} with this one; try again later",
                        )
                    body += part
                    self._num_bytes_held += len(part)
                    if len(body) > limits.max_request_bytes:
                        raise Refused(
                            413,
                            f"the request's body is larger than {limits.max_request_bytes:,} bytes; expected less; "
                            "send less at a time",
                        )
                    if not message.get("more_body", False):
                        return True
        except TimeoutError:
            raise Refused(
                408,
                f"found {len(body):,} bytes of the request's body after {limits.body_seconds:g} s; expected all of it; "
                "send it faster, or less at a time",
            ) from None

    async def _serve(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Let the application answer, unless the client disconnects first."""
        is_passed_on = False

        async def whole() -> Message:
            nonlocal is_passed_on
            if is_passed_on:
                return await receive()
            is_passed_on = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def until_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        serving = asyncio.ensure_future(self._app(scope, whole, send))
        gone = asyncio.ensure_future(until_gone())
        try:
            await asyncio.wait({serving, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not serving.done():
                serving.cancel()
            gone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


async def _refuse(refused: Refused, receive: Receive, send: Send) -> None:
    """Answer a refused request, read the rest of it for a moment, and close the connection."""
    await send(
        {"type": "http.response.start", "status": refused.status, "headers": refused.closing}
    )
    await send({"type": "http.response.body", "body": refused.body, "more_body": True})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER):
            while (await receive()).get("more_body", False):
                pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def is_loopback(host: str) -> bool:
    """Whether a name or address is the loopback's."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_name(host: str) -> str:
    """The host without port, brackets and trailing dot, in lower case."""
    if host.count(":") > 1 and not host.startswith("["):
        return host.lower()  # an IPv6 address alone
    match = HOST_NAME.match(host)
    return match[1].strip("[]").lower().rstrip(".") if match else ""


def _is_beyond(scope: Scope) -> bool:
    """A request beyond ``max_connections``, which is refused."""
    return bool(scope.get("state", {}).get(BUSY)) and scope["path"] != HEALTH


NUM_SPARE = 32
"""Open connections beyond ``max_connections``."""
BACKLOG = 2048
"""Connections that may wait to be accepted."""
NUM_FILES = 16
"""Descriptors that are left to the application."""
SHUTDOWN_SECONDS = 30
"""Seconds in which current requests may finish when the server ends."""


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """Bind an address; port 0 is any free one. ``backlog``: connections that may wait. Raises ConfigError."""
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=backlog)
    except OSError as error:
        raise ConfigError(
            f"host={host} port={port} cannot be listened on: {error.strerror or error}; expected a free port of this "
            "machine; set port=0 for any"
        ) from error


def serve(
    app: App, limits: HttpLimits, listener: socket.socket, ending: threading.Event | None = None
) -> None:
    """Serve until a signal; current requests are answered. A second signal ends it immediately. ``ending`` is set at
    the first, for answers that would go on for ever.

    Uvicorn handles SIGTERM and SIGINT. Other signals must not raise an exception here: inside a request it would end
    the request only, and the server would continue.
    """
    server = _server(app, limits)
    server.ending = ending
    others = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, server.handle_exit) for number in others if is_main}
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def serve_aside(app: App, limits: HttpLimits, listener: socket.socket) -> Callable[[], None]:
    """Serve in a thread. The function that is returned ends it, and the requests that are being answered."""
    server = _server(app, limits)
    run = partial(server.run, sockets=[listener])
    thread = threading.Thread(target=run, name="http server", daemon=True)
    thread.start()

    def stop() -> None:
        server.force_exit = server.should_exit = True
        thread.join(SHUTDOWN_SECONDS)
        listener.close()

    return stop


class Sparing(logging.Handler):
    """Prints a record in one line, at most one a minute."""

    def __init__(self) -> None:
        super().__init__()
        self._silent_until, self._num_unsaid = 0.0, 0

    def emit(self, record: logging.LogRecord) -> None:
        self.say(record.getMessage(), record.exc_info[1] if record.exc_info else None)

    def say(self, message: str, error: BaseException | None) -> None:
        if time.monotonic() < self._silent_until:
            self._num_unsaid += 1
            return
        reason = "" if error is None else f": {type(error).__name__}: {error}"
        more = f" ({self._num_unsaid:,} more since the last line)" if self._num_unsaid else ""
        line = " ".join(f"{message}{reason}"[:500].split()) + more
        Printer.on(sys.stderr).write(f"{line}\n")
        self._silent_until, self._num_unsaid = time.monotonic() + 60, 0


def _room(limits: HttpLimits) -> tuple[int, int]:
    """Requests that are served at a time, and connections, for which there are descriptors."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return limits.max_connections, limits.max_connections + NUM_SPARE
    left = max(most - len(os.listdir("/dev/fd")) - NUM_FILES, 2)  # noqa: PTH208 (numbers)
    spare = min(NUM_SPARE, left // 2)
    num_served = min(limits.max_connections, left - spare)
    return num_served, num_served + spare


def _server(app: App, limits: HttpLimits) -> _Server:
    num_served, num_open = _room(limits)
    attributes = {"limits": limits, "num_served": num_served, "num_open": num_open}
    logger = logging.getLogger("uvicorn.error")
    logger.handlers, logger.propagate = [Sparing()], False
    config = Config(
        app,
        http=type("Protocol", (_LimitedProtocol,), attributes),
        log_config=None,
        backlog=NUM_FILES // 2,  # accepted at a time: then others can be closed for them
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=limits.idle_seconds,  # type: ignore[arg-type]  # handed to call_later
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        h11_max_incomplete_event_size=limits.max_header_bytes,
    )
    return _Server(config)


class _Server(uvicorn.Server):
    ending: threading.Event | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        sparing = Sparing()
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: sparing.say(context["message"], context.get("exception"))
        )
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # more wait than are accepted at a time

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.ending is not None:
            self.ending.set()
        self.force_exit = self.should_exit  # the second signal
        self.should_exit = True


class _Connection(h11.Connection):
    """Refuses chunked bodies at their headers."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request) and any(
            name == b"transfer-encoding" for name, _ in event.headers
        ):
            raise h11.RemoteProtocolError(
                "found Transfer-Encoding; expected Content-Length; send the body's size",
                error_status_hint=411,
            )
        return event


class _LimitedProtocol(H11Protocol):
    limits: HttpLimits
    num_served: int
    num_open: int

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        assert config.h11_max_incomplete_event_size is not None
        self.conn = _Connection(h11.SERVER, config.h11_max_incomplete_event_size)
        self._waits_since = self.loop.time()
        self._has_received = False
        self._is_refused = False
        self._request_deadline: asyncio.TimerHandle | None = None
        self._send_deadline: asyncio.TimerHandle | None = None

    @property
    def _is_waiting(self) -> bool:
        """The headers of its next request have not arrived."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _is_in_work(self) -> bool:
        """A request is being read or answered; closing the connection would lose it. Of a request that is refused
        only the refusal would be lost."""
        cycle = self.cycle
        return (
            cycle is not None
            and not cycle.response_started
            and not _is_beyond(cast(Scope, cycle.scope))
        )

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the base class
        super().connection_made(transport)
        self._await_request()
        others = self._others()
        if len(others) < self.num_open:
            return
        idle = [other for other in others if not other._is_in_work]
        oldest = min(idle or [self], key=lambda connection: connection._waits_since)
        if oldest._is_waiting and not oldest._is_refused:
            oldest._give_up("other clients need the connection")
        oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._has_received = True
        if self._is_waiting:
            num_in_work = sum(other._is_in_work for other in self._others())
            self.app_state = {**self.app_state, BUSY: num_in_work >= self.num_served}
        super().data_received(data)
        if not self._is_waiting and self._request_deadline is not None:
            self._request_deadline.cancel()

    def shutdown(self) -> None:
        if not self._is_refused:
            super().shutdown()

    def _others(self) -> list[_LimitedProtocol]:
        return [
            connection
            for connection in self.connections
            if isinstance(connection, _LimitedProtocol) and connection is not self
        ]

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_waiting:
            self._has_received = False
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for deadline in (self._request_deadline, self._send_deadline):
            if deadline is not None:
                deadline.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_deadline = self.loop.call_later(self.limits.send_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_deadline is not None:
            self._send_deadline.cancel()

    def send_400_response(self, msg: str) -> None:
        """Answer an invalid request, inside the handler of h11's error."""
        error = sys.exception()
        assert isinstance(error, h11.RemoteProtocolError)
        status = error.error_status_hint
        fault = "the headers are too large" if status == 431 else str(error)
        self._refuse(Refused(status, f"{fault}; expected a request of HTTP/1.1"))

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_soon()

    def _await_request(self) -> None:
        if self._request_deadline is not None:
            self._request_deadline.cancel()
        self._waits_since = self.loop.time()
        seconds = self.limits.header_seconds
        self._request_deadline = self.loop.call_later(
            seconds, self._give_up, f"no request came within {seconds:g} s"
        )

    def _give_up(self, reason: str) -> None:
        """Close a connection without a complete request."""
        if self._has_received:
            self._refuse(
                Refused(
                    408, f"{reason}; expected all headers; send them at once, on a new connection"
                )
            )
        else:
            self.transport.close()
            self._abort_soon()

    def _refuse(self, refused: Refused) -> None:
        """Answer, drop further data for a moment, and close."""
        if self._is_refused:
            return
        self._is_refused = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            start = h11.Response(
                status_code=refused.status,
                headers=refused.closing,
                reason=STATUS_PHRASES[refused.status],
            )
            for event in (start, h11.Data(data=refused.body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
            self.transport.write_eof()
        else:
            self.transport.close()
        self._abort_soon()

    def _abort_soon(self) -> None:
        """Abort even if the client reads nothing."""
        self.loop.call_later(LINGER, self.transport.abort)
