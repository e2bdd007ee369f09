"""Attacks on the HTTP server of ``taut serve-reward``, and what must happen.

``REQUESTS``: bytes that one client sends, and the status of the answer. ``FLOODS``: what many clients do for a while,
or one that is slow. During each attack, and after it, ``GET /health`` is answered within a second.
"""

from __future__ import annotations

import base64
import json
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from io import BytesIO
from typing import Any, NamedTuple

from PIL import Image

KEY = "open sesame"
LIMITS: dict[str, Any] = {
    "max_connections": 48,
    "max_request_bytes": 2**21,
    "max_bytes_in_flight": 2**24,
    "header_seconds": 1.5,
    "body_seconds": 1.5,
    "send_seconds": 1.5,
    "idle_seconds": 1.5,
    "max_characters": 200_000,
    "max_request_pixels": 2**20,
    "max_waiting": 64,
}
"""Of the server that is attacked, so that an attack that has to wait for a limit takes two seconds."""


def sent(
    method: str = "POST",
    target: str = "/get_reward",
    body: bytes = b"",
    *lines: str,
    version: str = "HTTP/1.1",
    host: str | None = "127.0.0.1",
    key: str | None = KEY,
    length: object = None,
) -> bytes:
    """A request. ``length``: what Content-Length says; by default the body's."""
    headers = [f"{method} {target} {version}"]
    headers += [] if host is None else [f"Host: {host}"]
    headers += [] if key is None else [f"Authorization: Bearer {key}"]
    size = (len(body) or None) if length is None else length
    headers += [] if size is None else [f"Content-Length: {size}"]
    return "\r\n".join([*headers, *lines, "", ""]).encode("latin-1") + body


def asked(value: Any, target: str = "/get_reward") -> bytes:
    """A request with a JSON body."""
    return sent("POST", target, json.dumps(value).encode())


def pictured(*pictures: bytes) -> bytes:
    """A request for the score of an answer about these pictures."""
    urls = [f"data:image/png;base64,{base64.b64encode(it).decode()}" for it in pictures]
    parts: list[dict[str, Any]] = [{"type": "image", "image": url} for url in urls]
    parts.append({"type": "text", "text": "what?"})
    prompt = [{"role": "user", "content": parts}]
    return asked({"prompts": [prompt], "completions": ["red"]}, "/score")


def png(width: int, height: int) -> bytes:
    """A grey picture."""
    file = BytesIO()
    Image.new("L", (width, height)).save(file, "PNG")
    return file.getvalue()


def claiming(width: int, height: int) -> bytes:
    """A PNG whose header claims another size than its pixels have."""
    honest = png(8, 8)
    header = b"IHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + honest[24:29]
    return honest[:12] + header + zlib.crc32(header).to_bytes(4, "big") + honest[33:]


def message(content: Any) -> bytes:
    """A request whose prompt is one user message."""
    prompt = [{"role": "user", "content": content}]
    return asked({"prompts": [prompt], "completions": ["red"]}, "/score")


class Request(NamedTuple):
    """One request, and the answer it must get."""

    name: str
    sends: bytes
    status: int
    says: str = ""
    """Part of the error's message."""


FINE = asked({"query": ["the cat"]})
"""A request that is no attack."""
CHUNKED = "Transfer-Encoding: chunked"

REQUESTS = (
    # -- from a web page
    Request("a host name that points here", sent(host="evil.example"), 403, "hosts=[NAME]"),
    Request("a name that begins as ours", sent(host="127.0.0.1.evil.example"), 403, "Host"),
    Request("a name with a user", sent(host="127.0.0.1@evil.example"), 403, "Host"),
    Request("an empty Host", sent(host=""), 403, "Host"),
    Request(
        "health asked by another name", sent("GET", "/health", host="evil.example"), 403, "Host"
    ),
    Request("a page's script", sent("POST", "/score", b"{}", "Origin: http://evil.example"), 403),
    Request("a page in a sandbox", sent("POST", "/score", b"{}", "Origin: null"), 403, "Origin"),
    Request(
        "a page of this machine",
        sent("POST", "/score", b"{}", "Origin: http://127.0.0.1:8888"),
        403,
        "Origin",
    ),
    Request("a page's form", sent("POST", "/score", b"{}", "Sec-Fetch-Site: cross-site"), 403),
    Request(
        "a page that asks first",
        sent("OPTIONS", "/score", b"", "Origin: http://evil.example", key=None),
        403,
        "Origin",
    ),
    # -- without the key
    Request("no key", sent(body=b'{"query": ["a"]}', key=None), 401, "no token"),
    Request("another key", sent(body=b'{"query": ["a"]}', key="open"), 401, "not the server's"),
    Request("a key of other letters", sent(body=b"{}", key="\xe4\xf6"), 401, "not the server's"),
    Request("no key and a large body", sent(key=None, length=2**30, body=b"a" * 2**20), 401),
    Request("no key and no such path", sent("PUT", "/files", key=None), 401),
    # -- sizes
    Request("a large body", sent(length=2**30), 413, "1,073,741,824 bytes"),
    Request("a large body that is sent", sent(body=b"[" * (2**21 + 1)), 413, "at most 2,097,152"),
    Request("a body where none belongs", sent("GET", "/health", length=2**20), 413, "at most 0"),
    Request("a body of unknown size", sent("POST", "/score", b"", CHUNKED), 411, "Content-Length"),
    Request("two ways of framing", sent("POST", "/score", b"{}", CHUNKED), 411, "Content-Length"),
    Request("a negative size", sent(length=-1), 400),
    Request("a size of many digits", sent(length="9" * 30), 400),
    Request("two sizes", sent("POST", "/score", b"{}", "Content-Length: 3"), 400),
    Request("a long path", sent("GET", f"/{'a' * 5000}"), 414, "at most 2,048"),
    Request("a long query", sent("GET", f"/health?{'a' * 5000}"), 414, "at most 2,048"),
    Request("a long header", sent("GET", "/health", b"", f"A: {'a' * 20_000}"), 431, "16,384"),
    Request("many headers", sent("GET", "/health", b"", *["A: b"] * 5000), 431, "headers"),
    Request("headers without end", b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 50_000, 431),
    Request("a line without end", b"G" * 300_000, 431),
    # -- forms of HTTP
    Request("an address as target", sent("GET", "http://evil.example/health"), 400, "target"),
    Request("a proxy's method", sent("CONNECT", "evil.example:443"), 400, "target"),
    Request("no Host", sent("GET", "/health", host=None), 400),
    Request("no Host, in the old way", sent("GET", "/health", host=None, version="HTTP/1.0"), 403),
    Request("two Hosts", sent("GET", "/health", b"", "Host: evil.example"), 400),
    Request("a folded header", sent("GET", "/health", b"", "A: b\r\n c"), 200),
    Request("a header with a NUL", sent("GET", "/health", b"", "A: \0"), 400),
    Request("the old version", sent("GET", "/health", version="HTTP/1.0"), 200),
    Request("a version to come", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    Request("TLS", bytes.fromhex("16030100050100000100") + b"\r\n\r\n", 400),
    Request(
        "a web socket",
        sent("GET", "/health", b"", "Connection: Upgrade", "Upgrade: websocket"),
        200,
    ),
    Request("a path upwards", sent("GET", "/../../etc/passwd"), 404, "expected POST /score"),
    Request("another method", sent("DELETE", "/score"), 405, "expected POST /score"),
    # -- JSON
    Request("nested JSON", sent(body=b'{"query":' + b"[" * 10_000), 400, "recursion limit"),
    Request("a million values", sent(body=b'{"query":[' + b"0," * 10**6 + b"0]}"), 413, "values"),
    Request(
        "many wrong values", sent(body=b'{"query":[' + b"0," * 40_000 + b"0]}"), 400, "query[0]"
    ),
    Request("many empty lists", sent(body=b'{"query":[' + b"[]," * 500_000 + b"[]]}"), 413),
    Request(
        "many keys",
        sent("POST", "/score", json.dumps({f"k{i}": 0 for i in range(40_000)}).encode()),
        400,
    ),
    Request("a number of many digits", sent(body=b'{"query":[' + b"7" * 10**6 + b"]}"), 400),
    Request("half a pair of characters", sent(body=b'{"query":["\\ud800"]}'), 400, "JSON"),
    Request("what is no UTF-8", sent(body=b'{"query":["\xff\xfe"]}'), 400, "JSON"),
    Request("an open text", sent(body=b'{"query":["' + b'\\"' * 500_000), 400, "JSON"),
    Request("nothing", sent("POST", "/score"), 400, "JSON"),
    # -- texts and pictures
    Request("a long text", asked({"query": ["a" * 300_000]}), 413, "300,000 characters"),
    Request("a long text in parts", message([{"type": "text", "text": "a" * 900}] * 300), 413),
    Request("many answers", asked({"query": ["a"] * 2000}), 413, "2,000 answers"),
    Request("an answer longer than the model", asked({"query": [" cat" * 5000]}), 400, "at most"),
    Request(
        "a file", message([{"type": "image", "image": "/etc/passwd"}]), 400, "not in the request"
    ),
    Request("an address", message([{"type": "image", "url": "http://127.0.0.1/"}]), 400, "request"),
    Request(
        "a video's file", message([{"type": "video", "video": "/etc/passwd"}]), 400, "data URLs"
    ),
    Request("many pictures", pictured(*[png(1, 1)] * 65), 413, "65 pictures"),
    Request("eight large pictures", pictured(*[png(2000, 2000)] * 8), 413, "32,000,000 pixels"),
    Request("a picture that claims more", pictured(claiming(50_000, 50_000)), 400, "claims"),
    Request("a picture that is none", pictured(b"GIF89a"), 400, "picture"),
)


def connect(port: int) -> socket.socket:
    """A connection to the server that is attacked."""
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of what a connection is answered; status 0: it was closed."""
    file = connection.makefile("rb")
    try:
        line = file.readline()
        if not line:
            return 0, {}, b""
        headers: dict[str, str] = {}
        while (header := file.readline().strip()) != b"":
            name, _, value = header.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        return int(line.split()[1]), headers, file.read(int(headers.get("content-length", "0")))
    except ConnectionResetError:
        return 0, {}, b""


class Flood(NamedTuple):
    """What many clients do: ``run`` does the next of it whenever it is asked."""

    name: str
    run: Callable[[int, ExitStack], Iterator[None]]
    seconds: float = 2.0
    """How long it goes on."""


def _opened(port: int, count: int, held: ExitStack, sends: bytes = b"") -> list[socket.socket]:
    made = []
    for _ in range(count):
        made.append(held.enter_context(connect(port)))
        if sends:
            with suppress(OSError):
                made[-1].sendall(sends)
    return made


def _each(connections: list[socket.socket], part: bytes) -> None:
    for connection in connections:
        with suppress(OSError):
            connection.sendall(part)


def idle(port: int, held: ExitStack) -> Iterator[None]:
    """500 connections that say nothing."""
    _opened(port, 500, held)
    while True:
        yield


def slow_headers(port: int, held: ExitStack) -> Iterator[None]:
    """500 connections that send their headers letter by letter."""
    opened = _opened(port, 500, held, b"GET /health HTTP/1.1\r\nA: ")
    while True:
        _each(opened, b"a")
        yield


def slow_bodies(port: int, held: ExitStack) -> Iterator[None]:
    """100 connections that send a large body letter by letter."""
    opened = _opened(port, 100, held, sent(length=2**20))
    while True:
        _each(opened, b"[")
        yield


def unfinished_bodies(port: int, held: ExitStack) -> Iterator[None]:
    """100 bodies of 2 MB without their last letter."""
    for _ in range(100):
        (connection,) = _opened(port, 1, held, sent(length=2**21))
        with suppress(OSError):
            connection.sendall(b"[" * (2**21 - 1))
        yield
    while True:
        yield


def without_key(port: int, held: ExitStack) -> Iterator[None]:
    """Large bodies, on and on, from clients that have no key."""
    while True:
        (connection,) = _opened(port, 1, held, sent(length=2**21, key=None))
        with suppress(OSError):
            connection.sendall(b"[" * 2**20)
        yield


def endless_chunks(port: int, held: ExitStack) -> Iterator[None]:
    """Chunks of one letter, without end."""
    opened = _opened(port, 8, held, sent("POST", "/score", b"", CHUNKED))
    while True:
        _each(opened, b"1\r\n[\r\n" * 10_000)
        yield


def endless_after_answer(port: int, held: ExitStack) -> Iterator[None]:
    """A body that goes on after the request was answered."""
    opened = _opened(port, 8, held, sent("GET", "/health", length=2**40))
    while True:
        _each(opened, b"a" * 50_000)
        yield


def pipelined(port: int, held: ExitStack) -> Iterator[None]:
    """Requests in a row, whose answers are not read."""
    opened = _opened(port, 8, held)
    for connection in opened:
        connection.settimeout(0.01)
    while True:
        _each(opened, sent("GET", "/schema") * 50)
        yield


def resets(port: int, held: ExitStack) -> Iterator[None]:
    """Connections that are opened and reset."""
    while True:
        for _ in range(20):
            with connect(port) as connection, suppress(OSError):
                now = b"\1\0\0\0\0\0\0\0"
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
                connection.sendall(FINE)
        yield


def long_texts(port: int, held: ExitStack) -> Iterator[None]:
    """Texts as long as they may be, from 40 clients at a time."""
    while True:
        _opened(port, 40, held, asked({"query": ["the cat sat on the mat " * 8000]}))
        time.sleep(1)
        yield


def abandoned(port: int, held: ExitStack) -> Iterator[None]:
    """Costly requests whose clients go at once."""
    costly = asked({"query": ["the cat sat on the mat " * 8000]})
    while True:
        for _ in range(10):
            with connect(port) as connection, suppress(OSError):
                connection.sendall(costly)
        yield


FLOODS = tuple(
    Flood(run.__name__, run)
    for run in (
        idle,
        slow_headers,
        slow_bodies,
        unfinished_bodies,
        without_key,
        endless_chunks,
        endless_after_answer,
        pipelined,
        resets,
        long_texts,
        abandoned,
    )
)
