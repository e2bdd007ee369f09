"""HTTP requests within limits, the only place where taut reads what a server answers; and the one policy of retries.

    answer = await request(client, "POST", url, Limits(seconds=60, max_bytes=2**24), json=body)
    answer = await request_again(client, "POST", url, limits, Retries(attempts=5), json=body)
    download(url, file, quiet=20)                       # a file of any size; goes on where an earlier attempt broke off

- One deadline for everything: name look-up, connection, TLS, request, informational answers (1xx), headers, redirects
  and body. It ends the request even if every single read makes progress.
- Bytes are counted as they arrive and as they are decompressed; reading stops at ``max_bytes``. Uncompressed answers
  are asked for; gzip and deflate are accepted, alone. Of an error's body only the first ``ERROR_BYTES`` are read.
- Redirects are followed only where the caller allows some, by GET, to http or https, never from https to http. The
  body of a redirect is not read. Another origin gets no headers of the caller and no password.
- Cookies are neither kept nor sent.
- Bodies are UTF-8, whatever a server declares: some of Python's codecs decompress, others take quadratic time.
- A request is sent again (by tenacity) after a failure in transit, a timeout or a status of ``BUSY``. The pause doubles
  each time, has jitter, and is never shorter than the server's Retry-After. It is given up when the attempts are used
  up, when the pause would end after the caller's deadline, or when the server asks for more than ``LONGEST_WAIT``.

It does not know what an answer means: the callers do.
"""

from __future__ import annotations

import json
import math
import random
import ssl
import weakref
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from threading import Lock, Thread
from typing import IO, Any, Concatenate, ParamSpec, TypeVar

import anyio
import httpx2
import tenacity
from anyio.from_thread import BlockingPortal, start_blocking_portal

CONNECT = 10.0
"""Seconds that a connection, or its TLS handshake, may take."""
REDIRECTS = frozenset({301, 302, 303, 307, 308})
BUSY = frozenset({408, 429, 500, 502, 503, 504, 529})
"""Statuses that another attempt may change."""
PARTIAL = 206
FILE_REDIRECTS = 5
"""Redirects that are followed to a file."""
LONGEST_WAIT = 60.0
"""The longest Retry-After, in seconds, that is obeyed."""
ERROR_BYTES = 2**16
"""Bytes that are read of the body of an answer that is no success: it is for a message."""
COMPRESSED = frozenset({"gzip", "x-gzip", "deflate"})
PLAIN = frozenset({"", "identity"})

P = ParamSpec("P")
T = TypeVar("T")


class Refused(Exception):
    """The answer breaks a limit or a rule; another attempt would not help."""


class TooLarge(Refused):
    """The body has more bytes than allowed."""


@dataclass(frozen=True)
class Limits:
    """The limits of one attempt."""

    seconds: float
    """Time from the name look-up to the last byte, redirects included."""
    max_bytes: int
    """Bytes of the body, compressed and decompressed."""
    redirects: int = 0
    """Redirects that are followed. With 0 a redirect is an answer like any other."""


@dataclass(frozen=True)
class Retries:
    """How often a request is sent, and the pauses in between."""

    attempts: int | None = None
    """Maximum attempts; without a number, the caller's deadline ends them."""
    first_pause: float = 0.5
    """Seconds before the second attempt; each pause is twice the one before, times a random factor from 0.5 to 1."""
    longest_pause: float = 30.0


@dataclass(frozen=True)
class Answer:
    """A complete answer."""

    status: int
    headers: Mapping[str, str]
    """Names in any case."""
    content: bytes
    """The body, decompressed; only its beginning if ``is_success`` is false."""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")

    def json(self) -> Any:
        """The body as JSON. Raises ValueError."""
        return parse_json(self.text)


class Unanswered(Exception):
    """A request failed in transit, timed out or met a busy server. ``str`` is what happened in the last attempt."""

    def __init__(self, message: str, answer: Answer | None = None) -> None:
        super().__init__(message)
        self.answer = answer
        """The busy server's answer, if it gave one."""
        self.num_attempts = 1

    @property
    def retry_after(self) -> float:
        """Seconds to wait by the Retry-After header, a number or a date; 0 without one."""
        value = None if self.answer is None else self.answer.headers.get("retry-after")
        if value is None:
            return 0.0
        if value.strip().isdecimal():
            return float(value)
        try:
            until = parsedate_to_datetime(value)
        except (ValueError, OverflowError):
            return 0.0
        if until.tzinfo is None:
            until = until.replace(tzinfo=UTC)
        return max(0.0, (until - datetime.now(UTC)).total_seconds())


def open_client(quiet: float | None = None) -> httpx2.AsyncClient:
    """A client for ``request``: any number of connections, kept alive.

    ``quiet``: seconds without a byte after which a request fails; without it, only the deadline ends one.
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


async def request(
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
    with _explained():
        with anyio.fail_after(limits.seconds):
            sent = _sent(client, method, url, limits.redirects, headers=headers, json=json)
            async with sent as response:
                content = await _body(response, limits.max_bytes)
                return Answer(response.status_code, response.headers, content)


@contextmanager
def _explained() -> Iterator[None]:
    """Raise httpx2.ReadError and Refused for errors that httpx2 lets through."""
    try:
        yield
    except ssl.SSLError as error:  # a record changed on the way; httpx2 does not wrap it
        raise httpx2.ReadError(_line(error)) from None
    except (httpx2.InvalidURL, UnicodeError) as error:  # UnicodeError: a name that no host can have
        raise Refused(f"an invalid address ({_line(error)})") from None


@asynccontextmanager
async def _sent(
    client: httpx2.AsyncClient,
    method: str,
    url: str,
    redirects: int,
    *,
    headers: Mapping[str, str] | None = None,
    json: Any = None,
) -> AsyncIterator[httpx2.Response]:
    """The response to a request after its redirects, its body unread."""
    # one hop after the other
    target, own_headers = _checked(httpx2.URL(url)), dict(headers or {})
    for _ in range(redirects + 1):
        # a connection fails before the deadline: a TLS handshake that is cancelled would not close its socket
        left = anyio.current_effective_deadline() - anyio.current_time()
        connect = min(CONNECT, max(0.9 * left, 0.0))
        sent_request = client.build_request(
            method,
            target,
            headers={"Accept-Encoding": "identity", **own_headers},
            json=json,
            timeout=httpx2.Timeout(client.timeout.read, connect=connect),
        )
        response = await client.send(sent_request, stream=True, follow_redirects=False)
        try:
            if redirects == 0 or response.status_code not in REDIRECTS:
                yield response
                return
            following = _redirected(target, response.headers.get("location"))
        finally:
            await response.aclose()
        # another origin gets no headers of the caller
        if _origin(following) != _origin(target):
            own_headers = {}
        target = following
    raise Refused(f"more than {redirects} redirects")


# -- files


def head(url: str, quiet: float) -> Mapping[str, str]:
    """The headers of what a GET of a file would return. Raises FileNotFoundError, Refused, and Unanswered after several
    attempts, Unreachable at once. ``quiet``: seconds that the server may take.
    """

    async def ask() -> Mapping[str, str]:
        async with open_client(quiet) as client:

            async def attempt() -> Mapping[str, str]:
                with _unanswered():
                    async with _sent(client, "GET", url, FILE_REDIRECTS) as response:
                        _require_file(response)
                        return dict(response.headers)

            retries = Retries(attempts=3)

            def is_over(state: tenacity.RetryCallState) -> bool:
                error = None if state.outcome is None else state.outcome.exception()
                return state.attempt_number == 3 or isinstance(error, Unreachable)

            return await retry_loop(Unanswered, retries, is_over)(attempt)

    return wait_for(4 * quiet, ask)


def download(url: str, file: IO[bytes], quiet: float) -> None:
    """Append to ``file`` what follows the bytes that it has; from a server that cannot begin there, all of it again.

    Raises Unanswered where the connection breaks; ``file`` has what has arrived by then. ``quiet``: seconds without a
    byte after which it has broken. There is no deadline: a file may be large.
    """
    # go on where an earlier attempt broke off
    headers = {"Range": f"bytes={file.tell()}-"} if file.tell() else {}
    begins = f"bytes {file.tell()}-"

    async def get() -> None:
        async with open_client(quiet) as client:
            with _unanswered():
                sent = _sent(client, "GET", url, FILE_REDIRECTS, headers=headers)
                async with sent as response:
                    _require_file(response)
                    if response.status_code != PARTIAL:
                        file.seek(0)
                        file.truncate()
                    elif not response.headers.get("content-range", "").startswith(begins):
                        raise Refused("another part of the file than was asked for")
                    async for piece in response.aiter_raw():
                        file.write(piece)

    wait_for(math.inf, get)


class Unreachable(Unanswered):
    """No connection could be made: the name is not known, no route leads there, or nothing listens."""


@contextmanager
def _unanswered() -> Iterator[None]:
    """Raise Unreachable and Unanswered for httpx2's errors of a connection."""
    try:
        with _explained():
            yield
    except httpx2.ConnectError as error:
        raise Unreachable(_line(f"{type(error).__name__}: {error}")) from None
    except httpx2.RequestError as error:
        raise Unanswered(_line(f"{type(error).__name__}: {error}")) from None


def _require_file(response: httpx2.Response) -> None:
    """Raise what an answer without a file means."""
    status = response.status_code
    if status in BUSY:
        raise Unanswered(f"HTTP {status}", Answer(status, response.headers, b""))
    if status in (404, 410):
        raise FileNotFoundError(f"HTTP {status}")
    if not response.is_success:
        raise Refused(f"HTTP {status}")
    if (encoding := response.headers.get("content-encoding", "").strip().lower()) not in PLAIN:
        raise Refused(f"a body in the content encoding {encoding[:40]!r}")


async def request_again(
    client: httpx2.AsyncClient,
    method: str,
    url: str,
    limits: Limits,
    retries: Retries,
    *,
    headers: Mapping[str, str] | None = None,
    json: Any = None,
) -> Answer:
    """``request``, sent again where that may help. Raises Unanswered in the end, and Refused at once."""

    async def attempt() -> Answer:
        try:
            answer = await request(client, method, url, limits, headers=headers, json=json)
        except TimeoutError:
            raise Unanswered(f"no answer within {limits.seconds:g} s") from None
        except httpx2.RequestError as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise Unanswered(f"no answer ({reason})") from None
        if answer.status in BUSY:
            raise Unanswered(f"HTTP {answer.status}", answer)
        return answer

    def is_over(state: tenacity.RetryCallState) -> bool:
        is_used_up = state.attempt_number == retries.attempts
        is_too_long = state.upcoming_sleep > LONGEST_WAIT
        end = anyio.current_time() + state.upcoming_sleep
        return is_used_up or is_too_long or end > anyio.current_effective_deadline()

    # it is over with the attempts, with the deadline, or where the server asks for a long pause
    retrying = retry_loop(Unanswered, retries, is_over)
    try:
        return await retrying(attempt)
    except Unanswered as failure:
        failure.num_attempts = retrying.statistics["attempt_number"]
        raise


def retry_loop(
    failure: type[Exception],
    retries: Retries,
    is_over: Callable[[tenacity.RetryCallState], bool],
) -> tenacity.AsyncRetrying:
    """Return the loop that calls a coroutine function until it raises no ``failure``, or ``is_over``; it raises the
    last one.
    """

    def pause(state: tenacity.RetryCallState) -> float:
        doubled = retries.first_pause * 2.0 ** (state.attempt_number - 1)
        doubled = min(doubled, retries.longest_pause)
        error = None if state.outcome is None else state.outcome.exception()
        requested = error.retry_after if isinstance(error, Unanswered) else 0.0
        return max(requested, doubled * random.uniform(0.5, 1.0))

    return tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(failure),
        wait=pause,
        stop=is_over,
        sleep=anyio.sleep,
        reraise=True,
    )


class Closed(Exception):
    """The ClientThread was closed while the coroutine ran, or before."""


class ClientThread:
    """A client with an event loop on a thread of its own, both started with the first call.

    Callers of any thread start coroutines there and may wait for them, whatever loop they have themselves. Cancelling a
    future ends its request and closes the connection. ``close`` cancels what runs and waits until it has cleaned up; it
    is called at the end of the process too, which would wait for the thread.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._stack = ExitStack()
        self._portal: BlockingPortal | None = None
        self._client: httpx2.AsyncClient | None = None
        self._scopes: set[anyio.CancelScope] = set()
        self.close = weakref.finalize(self, self._stack.close)

    def start(
        self,
        work: Callable[Concatenate[httpx2.AsyncClient, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Future[T]:
        """The future of ``work(client, ...)``. Raises Closed, and so does the future."""
        with self._lock:
            if not self.close.alive:
                raise Closed
            if self._portal is None:
                portal = self._stack.enter_context(start_blocking_portal())
                manager = portal.wrap_async_context_manager(open_client())
                self._client = self._stack.enter_context(manager)
                self._stack.callback(portal.call, _cancel_all, self._scopes)
                self._portal = portal
            client, scopes = self._client, self._scopes
            assert client is not None, "it is opened with the portal"

            async def tracked() -> T:
                with anyio.CancelScope() as scope:
                    scopes.add(scope)
                    try:
                        return await work(client, *args, **kwargs)
                    finally:
                        scopes.discard(scope)
                raise Closed

            return self._portal.start_task_soon(tracked)


async def _cancel_all(scopes: set[anyio.CancelScope]) -> None:
    for scope in scopes:
        scope.cancel()
    while scopes:
        await anyio.sleep(0.01)


def wait_for(seconds: float, work: Callable[[], Awaitable[T]]) -> T:
    """The result of a coroutine function, run in an event loop on a thread of its own.

    Raises TimeoutError after ``seconds``. Only the thread makes that hold: the system's name look-up cannot be
    cancelled, and an event loop waits for it when it ends.
    """
    result: Future[T] = Future()

    async def run() -> None:
        with anyio.fail_after(seconds):
            result.set_result(await work())

    def serve() -> None:
        try:
            anyio.run(run)
        except BaseException as error:  # noqa: BLE001 (raised again in the caller's thread)
            if not result.done():
                result.set_exception(error)

    Thread(target=serve, name="taut-http", daemon=True).start()
    return result.result(None if math.isinf(seconds) else seconds)


def parse_json(text: str) -> Any:
    """JSON from a server. Raises ValueError, also where it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


async def _body(response: httpx2.Response, max_bytes: int) -> bytes:
    """The body, decompressed. Raises Refused for another encoding, TooLarge for a success with more bytes."""
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding not in PLAIN | COMPRESSED:
        raise Refused(f"a body in the content encoding {encoding[:40]!r}")
    inflater = zlib.decompressobj(wbits=32 + zlib.MAX_WBITS) if encoding in COMPRESSED else None
    # bytes count as they arrive and as they are decompressed
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
        raise Refused("a redirect without a location")
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
