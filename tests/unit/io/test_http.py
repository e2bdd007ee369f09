"""Servers that drip, lie, redirect and inflate: a request ends in time and within its bytes; fine answers stay."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import ssl
import threading
import time
import tracemalloc
import zlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import anyio
import httpx2
import pytest
from tests.helpers.broken_servers import (
    OK,
    Server,
    Talk,
    answers,
    redirects,
    repeats,
    sends,
    serving,
)

from taut.io import http
from taut.io.http import Answer, Limits, Refused, TooLarge, open_client, request

T = TypeVar("T")

LIMITS = Limits(seconds=10, max_bytes=100_000)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(http, "trusted", lambda: False)  # read once a process, in half a second
    with serving() as made:
        yield made


def got(url: str, limits: Limits = LIMITS, **options: Any) -> Answer:
    async def attempt() -> Answer:
        async with open_client() as client:
            return await request(client, "GET", url, limits, **options)

    return anyio.run(attempt)


def peak(run: Callable[[], T]) -> tuple[T | Exception, int]:
    """What came of it, and the bytes of memory it took at most."""
    tracemalloc.start()
    try:
        result: T | Exception = run()
    except Exception as error:  # noqa: BLE001 (the test looks at it)
        result = error
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return result, most


def silence(connection: socket.socket) -> None:
    """Until the client has gone."""
    while connection.recv(4096):
        pass


SOON = 20.0
"""Seconds, on a busy machine, of what would take a minute or have no end without a deadline."""
DRIPS = {
    "nothing": silence,
    "status line": repeats(b"HTTP/1.1 200 ", b"O", 0.02),
    "header": repeats(OK + b"X: ", b"y", 0.02),
    "headers": repeats(OK, b"X: y\r\n", 0.02),
    "informational answers": repeats(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n", 0.02),
    "informational answers at full speed": repeats(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 999),
    "body": repeats(OK + b"Content-Length: 99999\r\n\r\n", b"x", 0.02),
    "chunks": repeats(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n", 0.02),
    "chunk extensions": repeats(OK + b"Transfer-Encoding: chunked\r\n\r\n1;", b"x", 0.02),
    "trailers": repeats(OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: y\r\n", 0.02),
    "body until the end": repeats(OK + b"\r\n", b"x", 0.02),
    "compressed nothing": repeats(
        OK + b"Content-Encoding: deflate\r\n\r\n\x78\x9c", b"\0\0\0\xff\xff", 0.02
    ),
    "redirect": repeats(b"HTTP/1.1 302 Found\r\nLocation: /", b"x", 0.02),
    "error": repeats(b"HTTP/1.1 503 Busy\r\nContent-Length: 9999\r\n\r\n", b"x", 0.02),
}


@pytest.mark.parametrize("talk", DRIPS.values(), ids=DRIPS)
def test_the_deadline_ends_what_drips(server: Server, talk: Talk) -> None:
    server.paths["/"] = talk
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        got(f"{server.url}/", Limits(seconds=0.4, max_bytes=100_000, redirects=5))
    assert time.monotonic() - began < SOON


@pytest.mark.parametrize("talk", [DRIPS["nothing"], repeats(b"\x16\x03\x03\x40\x00", b"\0", 0.02)])
def test_the_deadline_ends_a_handshake(talk: Talk) -> None:
    """TLS that never gets anywhere."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError), listening.accept()[0] as connection:
                talk(connection)

        threading.Thread(target=serve, daemon=True).start()
        began = time.monotonic()
        with pytest.raises((httpx2.ConnectTimeout, TimeoutError)):  # whichever limit is seen first
            got(f"https://127.0.0.1:{listening.getsockname()[1]}/", Limits(0.4, 100))
        assert time.monotonic() - began < SOON


def test_one_deadline_for_all_redirects(server: Server) -> None:
    """Each comes in time."""
    for number in range(9):

        def talk(connection: socket.socket, number: int = number) -> None:
            time.sleep(0.3)
            redirects(f"/{number + 1}")(connection)

        server.paths[f"/{number}"] = talk
    with pytest.raises(TimeoutError):
        got(f"{server.url}/0", Limits(seconds=1, max_bytes=100, redirects=9))
    assert len(server.requests) <= 4


def test_a_look_up_that_takes_for_ever_is_not_waited_for(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: never.wait(60) and [])

    async def attempt() -> Answer:
        async with open_client() as client:
            return await request(client, "GET", "http://some.invalid/", LIMITS)

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        http.wait_for(0.3, attempt)
    assert time.monotonic() - began < SOON
    never.set()


ZEROS = bytes(20_000_000)  # twice the memory allowed below
GZIP = gzip.compress(ZEROS)
BOMBS: dict[str, tuple[bytes, bytes]] = {
    "gzip": (b"gzip", GZIP),
    "x-gzip": (b"x-gzip", GZIP),
    "deflate": (b"deflate", zlib.compress(ZEROS)),
    "twice": (b"gzip, gzip", gzip.compress(GZIP)),
    "br": (b"br", b"\xcf\xff\xff\x7f\xf8\x27\x00\xe2\xb1\x40\x72"),
    "zstd": (b"zstd", b"\x28\xb5\x2f\xfd\xa4\x00\x00\x00\x10"),
    "two headers": (b"gzip\r\nContent-Encoding: gzip", gzip.compress(GZIP)),
    "unknown": (b"zlib_codec", b"x"),
}
del ZEROS


@pytest.mark.parametrize(("encoding", "body"), BOMBS.values(), ids=BOMBS)
def test_what_inflates_is_refused(server: Server, encoding: bytes, body: bytes) -> None:
    server.paths["/"] = answers(body, b"Content-Encoding: " + encoding)
    error, memory = peak(lambda: got(f"{server.url}/"))
    assert isinstance(error, Refused) and memory < 10_000_000
    if len(body) > 100:
        assert isinstance(error, TooLarge) or "content encoding 'gzip, gzip'" in str(error)


@pytest.mark.parametrize(
    "talk",
    [
        repeats(OK + b"\r\n", b"x" * 9999),
        repeats(OK + b"Content-Length: 99999999999\r\n\r\n", b"x" * 9999),
        repeats(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"40\r\n" + b"x" * 64 + b"\r\n"),
        repeats(OK + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(b"fine"), b"x" * 9999),
        repeats(OK + b"Content-Encoding: deflate\r\n\r\n\x78\x9c", b"\0\0\0\xff\xff" * 999),
    ],
)
def test_a_body_without_end_is_refused(server: Server, talk: Talk) -> None:
    server.paths["/"] = talk
    error, memory = peak(lambda: got(f"{server.url}/"))
    assert isinstance(error, TooLarge) and "100,000 bytes" in str(error) and memory < 10_000_000


def test_of_an_error_the_beginning_is_read(server: Server) -> None:
    server.paths["/"] = repeats(b"HTTP/1.1 500 No\r\n\r\n", b"error " * 99)
    answer, memory = peak(lambda: got(f"{server.url}/"))
    assert isinstance(answer, Answer) and answer.status == 500 and memory < 10_000_000
    assert len(answer.content) == http.ERROR_BYTES and answer.text.startswith("error error")


class TestRedirects:
    LIMITS = Limits(seconds=10, max_bytes=100_000, redirects=5)

    def test_they_are_followed_and_their_bodies_are_not_read(self, server: Server) -> None:
        server.paths["/bomb"] = redirects("/endless", b"Content-Encoding: gzip", body=GZIP)
        server.paths["/endless"] = repeats(
            b"HTTP/1.1 307 Go\r\nLocation: there\r\n\r\n", b"x" * 9999
        )
        server.paths["/there"] = answers(b"picture")
        answer, memory = peak(lambda: got(f"{server.url}/bomb", self.LIMITS))
        assert isinstance(answer, Answer) and answer.content == b"picture"
        assert memory < 10_000_000

    def test_not_for_ever(self, server: Server) -> None:
        server.paths["/"] = redirects("/")
        with pytest.raises(Refused, match="more than 5 redirects"):
            got(f"{server.url}/", self.LIMITS)
        assert len(server.requests) == 6

    def test_not_unless_asked_for(self, server: Server) -> None:
        server.paths["/"] = redirects("/x", body=b"over there")
        answer = got(f"{server.url}/")
        assert (answer.status, answer.content) == (302, b"over there")

    @pytest.mark.parametrize(
        "location",
        [
            "file:///etc/passwd",
            "ftp://127.0.0.1/x",
            "gopher://127.0.0.1:70/x",
            "data:image/png;base64,AAAA",
            "javascript:1",
            "http://127.0.0.1:99999/",
            "http://[",
            "http://a\x01b/",
        ],
    )
    def test_not_to_what_is_no_address(self, server: Server, location: str) -> None:
        server.paths["/"] = redirects(location)
        with pytest.raises((Refused, httpx2.RequestError)):
            got(f"{server.url}/", self.LIMITS)

    def test_not_from_https_to_http(self) -> None:
        here = httpx2.URL("https://here.org/a")
        with pytest.raises(Refused, match="from https to http"):
            http._redirected(here, "http://here.org/a")
        assert str(http._redirected(here, "//there.org/b")) == "https://there.org/b"

    def test_one_that_says_not_where(self, server: Server) -> None:
        server.paths["/"] = answers(b"", status=b"302 Found")
        with pytest.raises(Refused, match="without a location"):
            got(f"{server.url}/", self.LIMITS)

    def test_secrets_stay_with_the_origin(self, server: Server) -> None:
        """Another port is another origin."""
        with socket.create_server(("127.0.0.1", 0)) as listening:
            other = Server(f"http://127.0.0.1:{listening.getsockname()[1]}")
            other.paths["/c"] = answers(b"c")
            threading.Thread(target=lambda: other.talk(listening.accept()[0]), daemon=True).start()
            server.paths["/a"] = redirects(f"{server.url}/b")
            server.paths["/b"] = redirects(f"{other.url}/c")
            url = server.url.replace("//", "//me:password@")
            headers = {"Authorization": "Bearer sesame"}
            assert got(f"{url}/a", self.LIMITS, headers=headers).content == b"c"
            assert got(f"{server.url}/a", Limits(9, 99), headers=headers).status == 302
        assert all(b"authorization: bearer sesame" in it.lower() for it in server.requests[2:])
        assert all(b"\r\nAuthorization: " in it for it in server.requests)
        assert len(other.requests) == 1
        assert b"authorization" not in other.requests[0].lower()

    def test_a_password_in_the_address_stays_with_the_origin(self) -> None:
        here = httpx2.URL("http://me:password@here.org/a")
        assert http._redirected(here, "http://here.org/b").userinfo == b"me:password"
        assert http._redirected(here, "b").userinfo == b"me:password"
        for there in ("http://there.org/b", "http://here.org:81/b", "https://here.org/b"):
            assert http._redirected(here, there).userinfo == b""


@pytest.mark.parametrize(
    "talk",
    [
        sends(OK, b"Content-Length: 99\r\n\r\nshort", closes=True),
        sends(OK, b"Content-Length: -1\r\n\r\n"),
        sends(OK, b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxx"),
        sends(OK, b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"),
        sends(OK, b"X: ", b"y" * 200_000, b"\r\n\r\n"),
        repeats(OK, b"X: y\r\n" * 999),
        repeats(OK + b"X: ", b"y" * 9999),
        sends(b"SSH-2.0-OpenSSH\r\n", b"x" * 200_000),
        sends(b"", closes=True),
        lambda connection: connection.close(),
    ],
)
def test_what_is_no_http_is_an_error_of_the_connection(server: Server, talk: Talk) -> None:
    server.paths["/"] = talk
    error, memory = peak(lambda: got(f"{server.url}/"))
    assert isinstance(error, httpx2.RequestError) and memory < 10_000_000


def test_a_connection_that_is_reset(server: Server) -> None:
    def talk(connection: socket.socket) -> None:
        connection.sendall(OK + b"Content-Length: 9\r\n\r\nx")
        linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        connection.close()

    server.paths["/"] = talk
    with pytest.raises(httpx2.RequestError):
        got(f"{server.url}/")


def test_a_record_that_was_changed_on_the_way() -> None:
    """TLS notices it, and httpx2 does not call it an error of a request."""

    def fails(_: httpx2.Request) -> httpx2.Response:
        raise ssl.SSLError(1, "bad record mac")

    async def attempt() -> None:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(fails)) as client:
            with pytest.raises(httpx2.ReadError, match="bad record mac"):
                await request(client, "GET", "https://here.org/", LIMITS)

    anyio.run(attempt)


def test_answers_that_are_fine(server: Server) -> None:
    body = json.dumps({"text": "é" * 9000}).encode()
    server.paths = {
        "/plain": answers(body),
        "/chunked": sends(
            OK, b"Transfer-Encoding: chunked\r\n\r\n", b"%x\r\n" % len(body), body, b"\r\n0\r\n\r\n"
        ),
        "/hints": sends(
            b"HTTP/1.1 103 Early Hints\r\n\r\n" * 3, OK, b"Content-Length: 2\r\n\r\n{}"
        ),
        "/gzip": answers(gzip.compress(body), b"Content-Encoding: gzip"),
        "/GZip": answers(gzip.compress(body), b"Content-Encoding: GZip"),
        "/deflate": answers(zlib.compress(body), b"Content-Encoding: deflate"),
        "/identity": answers(body, b"Content-Encoding: identity"),
        "/charset": answers(body, b"Content-Type: application/json; charset=zlib_codec"),
        "/empty": answers(b"", b"Content-Encoding: gzip", status=b"204 None"),
        "/full": answers(bytes(LIMITS.max_bytes)),
    }

    async def requests() -> dict[str, Answer]:
        async with open_client() as client:
            return {
                path: await request(client, "GET", server.url + path, LIMITS)
                for path in server.paths
            }

    found = anyio.run(requests)
    assert server.num_connections == 1, "the connection is kept"
    assert all(b"accept-encoding: identity" in head.lower() for head in server.requests)
    for path in ("/plain", "/chunked", "/gzip", "/GZip", "/deflate", "/identity", "/charset"):
        assert found[path].content == body and found[path].json() == {"text": "é" * 9000}
    assert (found["/hints"].content, found["/empty"].content) == (b"{}", b"")
    assert len(found["/full"].content) == LIMITS.max_bytes


def test_cookies_are_not_kept(server: Server) -> None:
    """Nor read: one with a date that is none has Python's reader print a traceback."""
    cookies = [b"Set-Cookie: a=b", b"Set-Cookie: c=d; Expires=Wed, 21 Nct 2099 07:28:00 GMT"]
    server.paths["/"] = answers(b"", *cookies)

    async def requests() -> None:
        async with open_client() as client:
            for _ in range(2):
                await request(client, "GET", f"{server.url}/", LIMITS)
            assert not client.cookies

    anyio.run(requests)
    assert len(server.requests) == 2 and b"cookie" not in server.requests[1].lower()


def test_what_is_no_json(server: Server) -> None:
    for body in (b"[" * 99_999, b"\xff", b"1" * 5000, b""):
        server.paths["/"] = answers(body)
        with pytest.raises(ValueError):
            got(f"{server.url}/").json()


def test_a_request_that_is_cancelled_leaves_the_client_usable(server: Server) -> None:
    server.paths = {"/slow": DRIPS["body"], "/fine": answers(b"x")}

    async def requests() -> list[bytes]:
        found = []
        async with open_client() as client:
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await request(client, "GET", f"{server.url}/slow", Limits(0.1, 10**6))
                found.append((await request(client, "GET", f"{server.url}/fine", LIMITS)).content)
        return found

    assert anyio.run(requests) == [b"x"] * 3


def test_what_a_request_raises_reaches_who_waits() -> None:
    async def fails() -> None:
        raise KeyError("here")

    async def works() -> int:
        return 3

    with pytest.raises(KeyError, match="here"):
        http.wait_for(5, fails)
    typed: Callable[[], Awaitable[int]] = works
    assert http.wait_for(5, typed) == 3
