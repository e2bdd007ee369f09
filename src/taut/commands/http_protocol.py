"""HTTP/1.1 connections of our servers: uvicorn's h11 protocol with limits on time and number.

uvicorn limits neither the time in which a client sends its headers, nor that in which it reads an answer, and refuses
every connection above its limit alike. Here a connection has one deadline while no request is being served, from its
start or its last answer to the end of the next request's headers; and another while an answer cannot be sent. Beyond
``max_connections`` requests in work, a further one is marked (``http_guard.BUSY``) and served only if it is
``GET /health``; ``NUM_SPARE`` connections more may be open for it, and a new connection closes the one that has waited
longest without a request. So there is always one that can be closed, and ``/health`` is always reached.

Chunked bodies are refused before they are parsed: chunks of one byte each cost the event loop more than their senders.
Imports uvicorn and h11. Commands that serve import it, when they run.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import threading
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from taut.commands.http_guard import BUSY, LINGER, App, HttpLimits, Refused
from taut.interrupts import SIGNALS

NUM_SPARE = 32
"""Open connections beyond ``max_connections``."""
SHUTDOWN_SECONDS = 30
"""How long requests may take that are being served when the server is told to end."""


def serve(app: App, limits: HttpLimits, listener: socket.socket) -> None:
    """Serve until a signal asks for the end; what is being served then is answered. A second signal ends it at once.

    Uvicorn takes SIGTERM and SIGINT. Another signal must not raise an exception here: where it came inside a request,
    the request would end and the server would go on.
    """
    config = Config(
        app,
        http=protocol_of(limits),
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
    server = _Server(config)
    others = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, server.handle_exit) for number in others if is_main}
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit  # told twice
        self.should_exit = True


def protocol_of(limits: HttpLimits) -> type[H11Protocol]:
    """The protocol class that keeps to these limits."""

    return type("Protocol", (_LimitedProtocol,), {"limits": limits})


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
        """The headers of its next request are still to come."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _is_in_work(self) -> bool:
        """A request is being read or answered; closing the connection would lose it."""
        return self.cycle is not None and not self.cycle.response_started

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the base class
        super().connection_made(transport)
        self._await_request()
        others = self._others()
        if len(others) < self.limits.max_connections + NUM_SPARE:
            return
        idle = [it for it in others if not it._is_in_work]
        oldest = min(idle or [self], key=lambda it: it._waits_since)
        if oldest._is_waiting and not oldest._is_refused:
            oldest._give_up("other clients need the connection")
        oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._has_received = True
        if self._is_waiting:
            num_in_work = sum(it._is_in_work for it in self._others())
            self.app_state = {**self.app_state, BUSY: num_in_work >= self.limits.max_connections}
        super().data_received(data)
        if not self._is_waiting and self._request_deadline is not None:
            self._request_deadline.cancel()

    def shutdown(self) -> None:
        if not self._is_refused:
            super().shutdown()

    def _others(self) -> list[_LimitedProtocol]:
        return [
            it for it in self.connections if isinstance(it, _LimitedProtocol) and it is not self
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
        """Answer what is no request, from the handler of h11's error."""
        error = sys.exception()
        assert isinstance(error, h11.RemoteProtocolError)
        status = error.error_status_hint
        found = "the headers are too large" if status == 431 else str(error)
        self._refuse(Refused(status, f"{found}; expected a request of HTTP/1.1"))

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
        """Close a connection that has sent no whole request."""
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
        """Answer, drop what the client still sends for a moment, and close."""
        if self._is_refused:
            return
        self._is_refused = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            headers = {
                **refused.headers,
                "content-length": str(len(refused.body)),
                "connection": "close",
            }
            start = h11.Response(
                status_code=refused.status,
                headers=[(name.encode(), value.encode()) for name, value in headers.items()],
                reason=STATUS_PHRASES[refused.status],
            )
            for event in (start, h11.Data(data=refused.body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
            self.transport.write_eof()
        else:
            self.transport.close()
        self._abort_soon()

    def _abort_soon(self) -> None:
        """Also where the client reads nothing."""
        self.loop.call_later(LINGER, self.transport.abort)
