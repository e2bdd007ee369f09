"""HTTP requests to a service that runs programs, by ``taut.io.http``: what their failures mean.

A failure that another attempt may change is a ``Passing``; any other is a SandboxError. The key is in no message.

Imports errors and web. The services import it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import httpx2

from taut.errors import SandboxError
from taut.io import http as web

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
        limits = web.Limits(seconds=seconds, max_bytes=most)
        try:
            answer = await web.ask(self._http, method, url, limits, headers=headers, json=body)
        except TimeoutError:
            raise Passing(f"{url} gave no answer within {seconds:.1f} s", LATE) from None
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            found = _brief(str(error)) or type(error).__name__
            raise Passing(f"{url} cannot be reached ({found})", UNREACHED, was_sent=False) from None
        except httpx2.RequestError as error:
            raise Passing(f"{url} broke off ({type(error).__name__})", BROKEN) from None
        except web.Refused as error:
            raise Passing(f"{url} answered with {_brief(str(error))}", BROKEN) from None
        if answer.is_success:
            return answer.content
        said = answer.text.replace(self._secret, "***") if self._secret else answer.text
        message = f"{url} answered HTTP {answer.status}: {_brief(said)}"
        if answer.status == 429:
            raise Passing(message, BUSY, was_sent=False)
        if answer.status >= 500 or answer.status == 408 or answer.status in may_be_gone:
            raise Passing(message, BROKEN)
        if answer.status in (401, 403):
            remedy = (
                f"expected the key in {self._key_name} to be accepted; correct it"
                if self._key_name
                else "expected a service that needs no key; set remote.key"
            )
            raise SandboxError(f"{message}; {remedy}")
        if answer.status == 413:
            raise SandboxError(
                f"{message}; expected a program with its test to be accepted; raise the service's limit for requests"
            )
        raise SandboxError(f"{message}; expected the request to be accepted; see docs/sandbox.md")


def parsed(body: bytes, url: str) -> Any:
    """JSON from a service."""
    try:
        return web.parse_json(body.decode("utf-8", "replace"))
    except ValueError:
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


def _brief(text: str) -> str:
    """One line without control characters."""
    line = " ".join(text.split())[:_SHOWN]
    return "".join(character if character.isprintable() else "?" for character in line)
