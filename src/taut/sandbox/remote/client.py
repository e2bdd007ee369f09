"""HTTP requests to a service that runs programs: one deadline for each, bounded answers, no redirects.

A failure that another attempt may change is a ``Passing``; any other is a SandboxError. The key is in no message.

Imports errors. The services import it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import anyio
import httpx2

from taut.errors import SandboxError

BUDGET = 6
"""What attempts may cost together before a request is given up."""
BUSY, UNREACHED, BROKEN, LATE = 0, 1, 2, 3
"""The cost of a failure. Busy servers (429) are asked until the deadline, unreachable ones six times, broken ones three
times, silent ones twice."""
_SHOWN = 200
"""Characters of a server's own message that are repeated."""


class Passing(Exception):
    """A failed attempt. ``was_sent``: the service had the request, so the program in it may be the cause."""

    def __init__(self, found: str, cost: int, was_sent: bool = True) -> None:
        super().__init__(found)
        self.cost, self.was_sent = cost, was_sent

    @property
    def is_late(self) -> bool:
        return self.cost == LATE

    def unsent(self) -> Passing:
        """The same of a request that ran no program."""
        return Passing(str(self), self.cost, was_sent=False)


class Client:
    """Requests with a key."""

    def __init__(self, http: httpx2.AsyncClient, key_name: str | None, secret: str | None) -> None:
        self._http, self._key_name, self._secret = http, key_name, secret

    async def ask(
        self,
        method: str,
        url: str,
        *,
        seconds: float,
        most: int,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        may_be_gone: Collection[int] = (),
    ) -> bytes:
        """The body of the answer, of at most ``most`` bytes.

        ``may_be_gone``: statuses that mean that the machine has ended, which its program may have brought about.
        """
        try:
            with anyio.fail_after(seconds):
                async with self._http.stream(
                    method,
                    url,
                    json=body,
                    headers={"Accept-Encoding": "identity", **(headers or {})},
                    follow_redirects=False,
                ) as answer:
                    found = await _read(answer, url, most)
                    status = answer.status_code
        except TimeoutError:
            raise Passing(f"{url} gave no answer within {seconds:.0f} s", LATE) from None
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as error:
            found_error = f"{url} cannot be reached ({_brief(str(error)) or type(error).__name__})"
            raise Passing(found_error, UNREACHED, was_sent=False) from None
        except httpx2.RequestError as error:
            raise Passing(f"{url} broke off ({type(error).__name__})", BROKEN) from None
        if 200 <= status < 300:
            return found
        said = found.decode(errors="replace")
        said = said.replace(self._secret, "***") if self._secret else said
        message = f"{url} answered HTTP {status}: {_brief(said)}"
        if status == 429:
            raise Passing(message, BUSY, was_sent=False)
        if status >= 500 or status == 408 or status in may_be_gone:
            raise Passing(message, BROKEN)
        if status in (401, 403):
            remedy = (
                f"expected the key in {self._key_name} to be accepted; correct it"
                if self._key_name
                else "expected a service that needs no key; set remote.key"
            )
            raise SandboxError(f"{message}; {remedy}")
        if status == 413:
            raise SandboxError(
                f"{message}; expected a program with its test to be accepted; raise the service's limit for requests"
            )
        raise SandboxError(f"{message}; expected the request to be accepted; see docs/sandbox.md")


def parsed(body: bytes, url: str) -> Any:
    """JSON from a service."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise Passing(
            f"{url} answered {_brief(body[:_SHOWN].decode(errors='replace'))!r}, which is no JSON",
            BROKEN,
        ) from None


def field(value: Any, name: str, kind: type[Any], url: str) -> Any:
    """A field of an answer, of the type it must have."""
    found = value.get(name) if isinstance(value, dict) else None
    if not isinstance(found, kind):
        raise Passing(f"{url} answered without {name!r}", BROKEN)
    return found


async def _read(answer: httpx2.Response, url: str, most: int) -> bytes:
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise Passing(f"{url} answered compressed, which was not asked for", BROKEN)
    chunks, size = [], 0
    async for chunk in answer.aiter_raw():
        size += len(chunk)
        if size > most:
            raise Passing(f"{url} answered with more than {most} bytes", BROKEN)
        chunks.append(chunk)
    return b"".join(chunks)


def _brief(text: str) -> str:
    """One line without control characters."""
    line = " ".join(text.split())[:_SHOWN]
    return "".join(character if character.isprintable() else "?" for character in line)
