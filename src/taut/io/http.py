"""HTTP requests within limits: the one place where taut reads what a server answers.

    answer = await ask(client, "POST", url, Limits(seconds=60, max_bytes=2**24), json=body)

- One deadline for everything: the look-up of the name, connection, TLS, request, informational answers (1xx), headers,
  redirects and body. It ends the request although every single read makes progress.
- Bytes are counted as they arrive and as they are decompressed; reading stops at ``max_bytes``. Uncompressed answers
  are asked for; gzip and deflate are accepted, alone. Of an error's body only the first ``ERROR_BYTES`` are read.
- Redirects are followed only where the caller allows some, by GET, to http or https, never from https to http. The
  body of a redirect is not read. Another origin gets no headers of the caller and no password.
- Cookies are neither kept nor sent.
- Bodies are UTF-8, whatever a server declares: some of Python's codecs decompress, others take quadratic time.

Does not retry and does not know what an answer means: the callers do. Imports nothing of taut. Imported by hub, vision,
rollout and rewards.
"""

from __future__ import annotations

import json
import ssl
import zlib
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from threading import Thread
from typing import Any, TypeVar

import anyio
import httpx2

CONNECT = 10.0
"""Seconds that a connection, or its TLS handshake, may take."""
REDIRECTS = frozenset({301, 302, 303, 307, 308})
ERROR_BYTES = 2**16
"""Bytes that are read of the body of an answer that is no success: it is for a message."""
COMPRESSED = frozenset({"gzip", "x-gzip", "deflate"})
PLAIN = frozenset({"", "identity"})

T = TypeVar("T")


class Refused(Exception):
    """The answer breaks a limit or a rule; asking again would not help."""


class TooLarge(Refused):
    """The body has more bytes than allowed."""


@dataclass(frozen=True)
class Limits:
    """What a request may take."""

    seconds: float
    """From the look-up of the name to the last byte, redirects included."""
    max_bytes: int
    """Bytes of the body, compressed and decompressed."""
    redirects: int = 0
    """Redirects that are followed. With 0 a redirect is an answer like any other."""


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    """Names in any case."""
    content: bytes
    """The body, decompressed; the beginning of it where ``is_success`` is false."""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")

    def json(self) -> Any:
        """The body as JSON. Raises ValueError."""
        return parse_json(self.text)


def open_client(quiet: float | None = None) -> httpx2.AsyncClient:
    """A client for ``ask``: any number of connections, kept alive.

    ``quiet``: seconds in which nothing comes; then the request fails. None: the deadline alone ends it.
    """
    return httpx2.AsyncClient(
        verify=trusted(),
        timeout=quiet,
        limits=httpx2.Limits(max_connections=None),
        cookies=CookieJar(DefaultCookiePolicy(netscape=False, rfc2965=False)),
    )


@cache
def trusted() -> ssl.SSLContext:
    """The certificate authorities trusted for https; reading them takes longer than a request."""
    return httpx2.create_ssl_context()


async def ask(
    client: httpx2.AsyncClient,
    method: str,
    url: str,
    limits: Limits,
    *,
    headers: Mapping[str, str] | None = None,
    json: Any = None,
) -> Answer:
    """The answer to one request. Raises TimeoutError, httpx2.RequestError where the connection fails, and Refused."""
    assert limits.redirects == 0 or (method == "GET" and json is None), "only a GET is redirected"
    try:
        with anyio.fail_after(limits.seconds):
            target, sent = _checked(httpx2.URL(url)), dict(headers or {})
            for _ in range(limits.redirects + 1):
                request = client.build_request(
                    method,
                    target,
                    headers={"Accept-Encoding": "identity", **sent},
                    json=json,
                    timeout=_timeout(client.timeout),
                )
                response = await client.send(request, stream=True, follow_redirects=False)
                try:
                    is_redirect = response.status_code in REDIRECTS
                    if limits.redirects == 0 or not is_redirect:
                        content = await _body(response, limits.max_bytes)
                        return Answer(response.status_code, response.headers, content)
                    following = _redirected(target, response.headers.get("location"))
                finally:
                    await response.aclose()
                if _origin(following) != _origin(target):
                    sent = {}
                target = following
    except (
        ssl.SSLError
    ) as error:  # of a record that was changed on the way: httpx2 leaves it as it is
        raise httpx2.ReadError(_line(error)) from None
    except (httpx2.InvalidURL, UnicodeError) as error:  # UnicodeError: a name that no host can have
        raise Refused(f"an invalid address ({_line(error)})") from None
    raise Refused(f"more than {limits.redirects} redirects")


def wait_for(seconds: float, request: Callable[[], Awaitable[T]]) -> T:
    """The result of a coroutine function, which runs in an event loop and a thread of its own.

    Raises TimeoutError after ``seconds``. The thread is what makes that true: the system's look-up of a name cannot be
    cancelled, and an event loop waits for it when it ends.
    """
    result: Future[T] = Future()

    async def run() -> None:
        with anyio.fail_after(seconds):
            result.set_result(await request())

    def work() -> None:
        try:
            anyio.run(run)
        except BaseException as error:  # noqa: BLE001 (raised again where it is waited for)
            if not result.done():
                result.set_exception(error)

    Thread(target=work, name="taut-http", daemon=True).start()
    return result.result(seconds)


def parse_json(text: str) -> Any:
    """JSON that a server wrote. Raises ValueError, also for what is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _timeout(timeout: httpx2.Timeout) -> httpx2.Timeout:
    """A connection fails before the deadline: a TLS handshake that is cancelled would not close its socket."""
    left = anyio.current_effective_deadline() - anyio.current_time()
    connect = min(CONNECT, max(0.9 * left, 0.0))
    return httpx2.Timeout(timeout.read, connect=connect)


async def _body(response: httpx2.Response, max_bytes: int) -> bytes:
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding not in PLAIN | COMPRESSED:
        raise Refused(f"a body in the content encoding {encoding[:40]!r}")
    inflater = zlib.decompressobj(wbits=32 + zlib.MAX_WBITS) if encoding in COMPRESSED else None
    most = max_bytes if response.is_success else min(max_bytes, ERROR_BYTES)
    content, num_received = bytearray(), 0
    async for piece in response.aiter_raw():
        num_received += len(piece)
        if inflater is None:
            content += piece
        elif not inflater.eof:  # what follows the end is counted and left
            try:
                content += inflater.decompress(piece, most + 1 - len(content))
            except zlib.error as error:
                raise Refused(f"a body that cannot be decompressed ({error})") from None
        if max(num_received, len(content)) > most:
            if response.is_success:
                raise TooLarge(f"more than {most:,} bytes")
            break
    return bytes(content[:most])


def _redirected(url: httpx2.URL, location: str | None) -> httpx2.URL:
    """Where a redirect leads that is followed."""
    if location is None:
        raise Refused("a redirect that says not where")
    following = _checked(url.join(location))
    if url.scheme == "https" and following.scheme == "http":
        raise Refused("a redirect from https to http")
    if _origin(following) == _origin(url) and not following.userinfo:
        return following.copy_with(userinfo=url.userinfo)
    return following


def _checked(url: httpx2.URL) -> httpx2.URL:
    if url.scheme not in ("http", "https") or not url.host or (url.port or 0) > 65535:
        port = "" if url.port is None else f":{url.port}"
        raise Refused(f"{url.scheme}://{url.host}{port} is no address of http or https")
    return url


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _line(text: object) -> str:
    return " ".join(str(text).split())[:160]
