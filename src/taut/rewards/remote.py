"""Verifiers that ask a server: many requests at a time on one thread of their own, each answer within its time.

A request that failed in transit or met a server that is busy or broken (408, 429, 5xx) is sent again after a pause that
doubles, for as long as the answer's time lasts. The limit covers all attempts and holds in any thread; who is cancelled
closes his connection. A key comes from the environment variable that the verifier names and is in no message.

Imports errors and the verifiers' base. The panel and the verifiers that run remotely import it.
"""

from __future__ import annotations

import os
import random
import ssl
from concurrent.futures import Future
from contextlib import ExitStack
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx2
from anyio.from_thread import BlockingPortal, start_blocking_portal

from taut.errors import ConfigError, EngineError
from taut.rewards.answered import Answered
from taut.rewards.registry import Part
from taut.rewards.verifier import Score, reason, scored

BUSY = frozenset({408, 429, 500, 502, 503, 504, 529})
"""Statuses that another attempt may change."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds between attempts."""
SHOWN = 200
"""Characters of a server's own message that are repeated."""


class Client:
    """Requests for JSON."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self._http = http

    async def post(self, url: str, body: dict[str, Any], key: str | None) -> Any:
        """The answer to a POST, as often as it takes. ``key``: the environment variable that holds the token."""
        secret = secret_of(key)
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        pause = FIRST_PAUSE
        while True:
            try:
                answer = await self._http.post(url, json=body, headers=headers)
            except httpx2.RequestError:
                answer = None
            if answer is not None and answer.status_code not in BUSY:
                return _read(url, answer, secret)
            await anyio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE)


class Remotes:
    """The thread, opened with the first answer. ``concurrency``: answers that are asked about at a time."""

    def __init__(self, concurrency: int) -> None:
        self._limit = anyio.Semaphore(concurrency)
        self._stack = ExitStack()
        self._portal: BlockingPortal | None = None

    def start(self, part: Part, answered: Answered) -> Future[Score]:
        """The word of a verifier on an answer, to be."""
        if self._portal is None:
            self._portal = self._stack.enter_context(start_blocking_portal())
            http = httpx2.AsyncClient(
                verify=_trusted(), timeout=None, limits=httpx2.Limits(max_connections=None)
            )
            manager = self._portal.wrap_async_context_manager(http)
            self._client = Client(self._stack.enter_context(manager))
        return self._portal.start_task_soon(self._ask, part, answered)

    def close(self) -> None:
        """End the thread and its connections."""
        self._portal = None
        self._stack.close()

    async def _ask(self, part: Part, answered: Answered) -> Score:
        async with self._limit:
            try:
                with anyio.fail_after(part.timeout):
                    return scored(part.label, await part.verifier.ask(self._client, answered))
            except TimeoutError:
                return Score(error=f"{part.label} had no answer within {part.timeout:g} s")
            except Exception as error:  # noqa: BLE001 (what a server's answer leads to is counted and shown)
                return Score(error=reason(error))


def require_url(url: str, label: str) -> str:
    """A URL of host and path, without a slash at its end."""
    parts = urlsplit(url)
    is_plain = parts.username is None and not parts.query and not parts.fragment
    if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain:
        raise ConfigError(
            f"{label}: found a url for {parts.hostname or url!r}; expected one as in http://127.0.0.1:8000/v1, without "
            "a key in it; correct it"
        )
    return url.rstrip("/")


def secret_of(key: str | None) -> str | None:
    """What the environment variable holds. ConfigError where it is not set."""
    value = os.environ.get(key) if key else None
    if key and not value:
        raise ConfigError(
            f"key={key}: no environment variable of this name is set; expected it to hold the server's key; export it"
        )
    return value


def _read(url: str, answer: httpx2.Response, secret: str | None) -> Any:
    said = answer.text.replace(secret, "***") if secret else answer.text
    said = " ".join(said.split())[:SHOWN]
    if not answer.is_success:
        raise EngineError(f"HTTP {answer.status_code} from {url}: {said}")
    try:
        return answer.json()
    except ValueError:
        raise EngineError(f"{url} answered {said!r}; expected JSON") from None


@cache
def _trusted() -> ssl.SSLContext:
    """The authorities trusted for https; reading them takes longer than a request."""
    return httpx2.create_ssl_context()
