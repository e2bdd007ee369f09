"""inference/http_server.py: which connection is closed for a new one."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.server import ServerState

from taut.inference.http_server import NUM_SPARE, Guard, Receive, Scope, Send, _server
from taut.inference.settings import HttpLimits

HEAD = b"POST /score HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


class Transport(asyncio.Transport):
    """Keeps what is written to it until it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.is_closed:
            self.written += bytes(data)

    def abort(self) -> None:
        self.is_closed = True

    close = abort

    def is_closing(self) -> bool:
        return self.is_closed

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def test_health_is_answered_while_a_burst_has_not_been_refused_yet() -> None:
    """The burst arrives at once: none of it has an answer when the connection for /health is made."""
    limits = HttpLimits(max_connections=4)

    async def run() -> tuple[list[bytes], bytes]:
        config = _server(Guard(_app, limits, "127.0.0.1", None), limits).config
        config.load()
        state = ServerState()

        def connection() -> tuple[Any, Transport]:
            protocol, transport = config.http_protocol_class(config, state, {}), Transport()
            protocol.connection_made(transport)
            return protocol, transport

        burst = [connection() for _ in range(4 + NUM_SPARE)]
        for protocol, _ in burst:
            protocol.data_received(HEAD)
        last, health = connection()
        last.data_received(HEALTH)
        await asyncio.sleep(0.1)
        written = [transport.written[:12] for _, transport in burst]
        for protocol, _ in [*burst, (last, health)]:
            protocol.connection_lost(None)
        await asyncio.gather(*state.tasks)
        return written, health.written

    written, answer = asyncio.run(run())
    assert answer.startswith(b"HTTP/1.1 200")
    # four are read, one was closed for /health, the others are refused
    assert written == [b""] * 4 + [b""] + [b"HTTP/1.1 503"] * (NUM_SPARE - 1)
