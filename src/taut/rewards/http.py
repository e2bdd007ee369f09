"""Requests for JSON to servers that say what an answer is worth.

A request that failed in transit or met a server that is busy or broken (408, 429, 5xx) is sent again after a pause that
doubles, for as long as its caller waits. A key comes from the environment variable that its name is given of, and is in
no message. What an answer may take is limited by ``taut.io.http``.

Imports web and errors. The verifiers that run remotely import it, and the lane they run in (``remote.py``).
"""

from __future__ import annotations

import json
import math
import os
import random
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx2

from taut.errors import ConfigError, EngineError
from taut.io import http as web

BUSY = frozenset({408, 429, 500, 502, 503, 504, 529})
"""Statuses that another attempt may change."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds between attempts."""
LIMITS = web.Limits(seconds=math.inf, max_bytes=2**24)
"""Of one attempt; its caller has a deadline for all of them (``remote.py``)."""
SHOWN = 200
"""Characters of a server's own message that are repeated."""


class Client:
    """Requests for JSON."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self._http = http

    async def post(self, url: str, body: dict[str, Any], key: str | None) -> Any:
        """The answer to a POST, as often as it takes; TimeoutError, with what was found last, where that is too often.

        ``key``: the environment variable that holds the token.
        """
        # Half a surrogate pair, as an answer may have it, is no UTF-8; servers are sent a question mark.
        body = json.loads(json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"))
        secret = secret_of(key)
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        pause = FIRST_PAUSE
        while True:
            try:
                answer = await web.ask(self._http, "POST", url, LIMITS, json=body, headers=headers)
                found = f"HTTP {answer.status}"
            except httpx2.RequestError as error:
                answer, found = None, f"{type(error).__name__}: {error}"
            except web.Refused as error:
                raise EngineError(
                    f"{url} answered {error}; expected uncompressed JSON of at most "
                    f"{LIMITS.max_bytes:,} bytes; correct the server"
                ) from None
            if answer is not None and answer.status not in BUSY:
                return _read(url, answer, secret)
            seconds = pause * random.uniform(0.5, 1.0)
            if anyio.current_time() + seconds > anyio.current_effective_deadline():
                raise TimeoutError(found)
            await anyio.sleep(seconds)
            pause = min(2 * pause, LONGEST_PAUSE)


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


def _read(url: str, answer: web.Answer, secret: str | None) -> Any:
    text = answer.text.replace(secret, "***") if secret else answer.text
    said = " ".join(text.split())[:SHOWN]
    if not answer.is_success:
        raise EngineError(f"HTTP {answer.status} from {url}: {said}")
    try:
        return web.parse_json(text)  # not the answer's own: what is made of it may be told, too
    except ValueError:
        raise EngineError(f"{url} answered {said!r}; expected JSON") from None
