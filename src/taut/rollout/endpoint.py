"""HTTP to an OpenAI-compatible endpoint: questions in, JSON out, as many at a time as the caller starts.

A request that failed in transit, timed out, or met a server that is busy or broken (408, 429, 5xx) is sent again after
a pause that doubles each time, with jitter, and is never shorter than the server's Retry-After. Then, and for whatever
sending again cannot mend, EngineError says what was found; RequestRefused where only this request is at fault.

Requests run in an event loop on a thread of their own, so the caller may have one too; cancelling a future closes its
connection, and the server stops working on it. The API key comes from the environment variable named by the caller
and appears in no message. What an answer may take is limited by ``taut.web``.

May import web and errors. ``server.py`` imports it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import anyio
import httpx2
from anyio.from_thread import start_blocking_portal

from taut import web
from taut.errors import ConfigError, EngineError, RequestRefused

LONGEST_WAIT = 60.0
"""Seconds between two attempts, at most; a server that asks for longer is given up."""
BUSY = frozenset({408, 429, 500, 502, 503, 504, 529})
"""Statuses that another attempt may change."""
MAX_BYTES = 2**27
"""Bytes an answer may have, decompressed: a token with its log-prob takes about a hundred."""
SHOWN = 300
"""Characters of a server's own message that are repeated."""

Read: TypeAlias = Callable[[str, web.Answer], Any]
"""What is made of a place's answer."""


class Endpoint:
    """An endpoint at ``url``. ``close`` ends its thread and connections."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None,
        timeout: float,
        retries: int,
        backoff: float,
        section: str,
        patience: Sequence[str] = ("server.timeout", "server.retries"),
    ) -> None:
        """``section``: of the configuration, as in ``rollout.``; ``patience``: the keys in it of how long is waited."""
        self.section = section
        self._patience = " or ".join(f"{section}{key}" for key in patience)
        self.url = _checked(url, section)
        self.timeout, self.retries, self.backoff = timeout, retries, backoff
        self._under_way: set[anyio.CancelScope] = set()
        self._secret = _secret(key, section)
        self._headers = {"Authorization": f"Bearer {self._secret}"} if self._secret else {}
        self._limits = web.Limits(timeout, MAX_BYTES)
        client = web.open_client()
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal())
            self._client = stack.enter_context(self._portal.wrap_async_context_manager(client))
            stack.callback(self._portal.call, self._cancel)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """End it, and whatever is still under way."""
        self._stack.close()

    def start(self, path: str, body: dict[str, Any] | None = None) -> Future[Any]:
        """The answer to a POST of ``body``, or to a GET without one, to be."""
        return self._portal.start_task_soon(self._ask, path, body, self._json)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The same, waited for."""
        return _awaited(self.start(path, body))

    def tell(self, path: str, body: dict[str, Any], within: float | None = None) -> None:
        """POST what needs no answer but that it was done. Raises TimeoutError after ``within`` seconds."""
        _awaited(self._portal.start_task_soon(self._ask, path, body, self._nothing), within)

    def _cancel(self) -> None:
        for scope in self._under_way:
            scope.cancel()

    async def _ask(self, path: str, body: dict[str, Any] | None, read: Read) -> Any:
        with anyio.CancelScope() as scope:
            self._under_way.add(scope)
            try:
                place = f"{self.url}/{path}"
                return read(place, await self._persist(place, body))
            finally:
                self._under_way.discard(scope)

    async def _persist(self, place: str, body: dict[str, Any] | None) -> web.Answer:
        """The answer, once there is one that another attempt would not change."""
        for attempt in range(self.retries + 1):
            answer = await self._send(place, body)
            if isinstance(answer, web.Answer) and answer.status not in BUSY:
                return answer
            found, asked = self._trouble(answer)
            pause = max(asked, self.backoff * 2**attempt * random.uniform(0.5, 1.0))
            if asked > LONGEST_WAIT or attempt == self.retries:
                break
            await anyio.sleep(min(pause, LONGEST_WAIT))
        raise EngineError(
            f"server: {found} from {place} ({attempt + 1} attempts); expected an answer; start the server or wait "
            f"for it, set {self._patience}, then run the same command again"
        )

    async def _send(self, place: str, body: dict[str, Any] | None) -> web.Answer | str:
        """The answer, or what came between."""
        method = "GET" if body is None else "POST"
        try:
            return await web.ask(
                self._client, method, place, self._limits, headers=self._headers, json=body
            )
        except TimeoutError:
            return f"no answer within {self.timeout:g} s"
        except httpx2.RequestError as error:
            return f"no answer ({type(error).__name__}: {error})"
        except web.Refused as error:
            raise EngineError(
                f"server: {place} answered {self._safe(str(error))}; expected an uncompressed answer of at most "
                f"{MAX_BYTES:,} bytes; set {self.section}url to an OpenAI-compatible endpoint, as in "
                "http://127.0.0.1:8000/v1"
            ) from None

    def _trouble(self, answer: web.Answer | str) -> tuple[str, float]:
        """What was found in the way, and the seconds the server asks us to wait."""
        if isinstance(answer, str):
            return self._safe(answer), 0.0
        found = f"HTTP {answer.status} ({self._message(answer)})"
        return found, _retry_after(answer.headers.get("retry-after"))

    def _json(self, place: str, answer: web.Answer) -> Any:
        self._nothing(place, answer)
        try:
            return answer.json()
        except ValueError:
            raise EngineError(
                f"server: {place} answered {self._shown(answer.text)!r}; expected JSON; set {self.section}url to "
                "an OpenAI-compatible endpoint, as in http://127.0.0.1:8000/v1"
            ) from None

    def _nothing(self, place: str, answer: web.Answer) -> None:
        """Raise for an answer that is a refusal."""
        status = answer.status
        if answer.is_success:
            return
        found = f"server: HTTP {status} from {place}: {self._message(answer)}"
        if status in (401, 403):
            raise EngineError(
                f"{found}; expected to be let in; set {self.section}server.key to the name of the environment variable "
                "with the key"
            )
        if 400 <= status < 500 and status not in (404, 405):
            raise RequestRefused(found)
        raise EngineError(
            f"{found}; expected an OpenAI-compatible endpoint; set {self.section}url as in http://127.0.0.1:8000/v1"
        )

    def _message(self, answer: web.Answer) -> str:
        """What the server says of its refusal."""
        try:
            said = answer.json()
        except ValueError:
            said = answer.text
        for name in ("error", "message", "detail"):
            if isinstance(said, dict) and said.get(name):
                said = said[name]
        return self._shown(str(said))

    def _shown(self, text: str) -> str:
        line = " ".join(self._safe(text).split())
        return line if len(line) <= SHOWN else line[:SHOWN] + "..."

    def _safe(self, text: str) -> str:
        return text.replace(self._secret, "***") if self._secret else text


def _awaited(future: Future[Any], within: float | None = None) -> Any:
    try:
        return future.result(within)
    finally:
        future.cancel()


def _checked(url: str, section: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"{section}url={url}: expected a URL as in http://127.0.0.1:8000/v1; correct it"
        )
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(
            f"{section}url for {parts.hostname} has more than host and path; expected one as in "
            f"http://127.0.0.1:8000/v1; set {section}server.key to the name of an environment variable that holds the "
            "key"
        )
    return url.rstrip("/")


def _secret(key: str | None, section: str) -> str | None:
    if key is None:
        return None
    value = os.environ.get(key)
    if not value:
        raise ConfigError(
            f"{section}server.key={key}: no environment variable of this name is set; expected it to hold the API key; "
            f"export it, or remove {section}server.key"
        )
    return value


def _retry_after(value: str | None) -> float:
    """Seconds to wait by a Retry-After header: a number of seconds or a date; 0 where there is neither."""
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
