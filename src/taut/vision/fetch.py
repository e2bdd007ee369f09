"""A picture at an address, fetched: http and https alone, redirects included, within limits of bytes and time.

A request that failed in transit or met a server that is busy or broken is sent again, a few times; one deadline holds
for all attempts together. What is fetched is kept by the caller (``album.py``). May import web and errors. Imported by
``picture.py``.
"""

from __future__ import annotations

import math
from functools import partial
from http import HTTPStatus

import anyio
import httpx2

from taut import web
from taut.errors import PictureError

SECONDS = 60.0
"""For one picture, all attempts and redirects together, however slowly it comes."""
QUIET = 15.0
"""Seconds in which nothing comes; then another attempt is made."""
ATTEMPTS, PAUSE = 3, 0.5
"""And the seconds before the second; they double."""
REDIRECTS = 5
BUSY = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses that another attempt may change."""


def fetch(url: str, name: str, most: int) -> bytes:
    """The bytes at ``url``, at most so many. ``name``: of the picture, for messages."""
    try:
        return web.wait_for(SECONDS, partial(_attempts, url, name, most))
    except TimeoutError:
        raise _refused(name, f"not whole after {SECONDS:g} s") from None
    except web.TooLarge:
        raise PictureError(
            f"the picture {name} has more than {most:,} bytes; expected at most so many; make it smaller or raise "
            "data.images.max_bytes"
        ) from None
    except web.Refused as error:
        raise _refused(name, str(error)) from None


async def _attempts(url: str, name: str, most: int) -> bytes:
    limits = web.Limits(
        seconds=math.inf, max_bytes=most, redirects=REDIRECTS
    )  # fetch has a deadline
    async with web.open_client(QUIET) as client:
        for attempt in range(ATTEMPTS):
            if attempt:
                await anyio.sleep(PAUSE * 2 ** (attempt - 1))
            try:
                answer = await web.ask(client, "GET", url, limits)
            except httpx2.RequestError as error:
                found = " ".join(f"{type(error).__name__} {error}".split())
                continue
            if answer.status == HTTPStatus.OK:
                return answer.content
            found = f"HTTP {answer.status}"
            if answer.status not in BUSY:
                raise _refused(name, found)
    raise _refused(name, f"{found} ({ATTEMPTS} attempts)")


def _refused(name: str, found: str) -> PictureError:
    return PictureError(
        f"the picture {name} cannot be fetched: {found}; expected a picture over http or https; correct the address, "
        "or download it"
    )
