"""JSON requests to servers that judge answers.

A request is repeated by the policy of ``taut.io.http`` for as long as its caller waits. No message contains the key.
"""

from __future__ import annotations

import json
import math
from typing import Any

import httpx2

from taut.config import read_secret
from taut.errors import EngineError
from taut.io import http

LIMITS = http.Limits(seconds=math.inf, max_bytes=2**24)
"""Of one attempt; the caller has a deadline for all of them (``panel.py``)."""
RETRIES = http.Retries()
SHOWN = 200
"""Characters of a server's own message that are repeated."""


class Client:
    """Sends JSON and reads JSON."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client

    async def post(self, url: str, body: dict[str, Any], key: str | None) -> Any:
        """The answer to a POST. Raises EngineError for an answer that cannot be used, and TimeoutError, with the last
        failure, where there is none in time. ``key``: the environment variable that holds the token.
        """
        # Half a surrogate pair, which an answer may contain, is no UTF-8; servers are sent a question mark.
        body = json.loads(json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"))
        secret = read_secret(key, "key")
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        try:
            answer = await http.request_again(
                self._client, "POST", url, LIMITS, RETRIES, json=body, headers=headers
            )
        except http.Unanswered as failure:
            raise TimeoutError(str(failure)) from None
        except http.Refused as error:
            raise EngineError(
                f"{url} answered {error}; expected uncompressed JSON of at most "
                f"{LIMITS.max_bytes:,} bytes; correct the server"
            ) from None
        text = answer.text.replace(secret, "***") if secret else answer.text
        beginning = " ".join(text.split())[:SHOWN]
        if not answer.is_success:
            raise EngineError(f"HTTP {answer.status} from {url}: {beginning}")
        try:
            return http.parse_json(text)  # with the key masked: errors quote what is made of it
        except ValueError:
            raise EngineError(f"{url} answered {beginning!r}; expected JSON") from None
