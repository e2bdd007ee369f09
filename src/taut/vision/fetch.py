"""A picture at an address, fetched: http and https alone, redirects included, within limits of bytes and time.

A request that failed in transit or met a server that is busy or broken is sent again, a few times. What is fetched is
kept by the caller (``album.py``). May import errors. Imported by ``picture.py``.
"""

from __future__ import annotations

import ssl
import time
from functools import cache
from http import HTTPStatus
from urllib.parse import urlsplit

import httpx2

from taut.errors import PictureError

SECONDS = 60.0
"""For one picture, however slowly it comes."""
QUIET = 15.0
"""Seconds in which nothing comes."""
ATTEMPTS, PAUSE = 3, 0.5
"""And the seconds before the second; they double."""
REDIRECTS = 5
BUSY = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses that another attempt may change."""


class _Again(Exception):
    """What another attempt may change."""


def fetch(url: str, name: str, most: int) -> bytes:
    """The bytes at ``url``, at most so many. ``name``: of the picture, for messages."""
    if not _is_address(url):
        raise _refused(name, "not an address")
    end = time.monotonic() + SECONDS
    for attempt in range(ATTEMPTS):
        try:
            return _once(url, name, most, end)
        except _Again as error:
            found = str(error)
        if attempt + 1 < ATTEMPTS:
            time.sleep(PAUSE * 2**attempt)
    raise _refused(name, f"{found} ({ATTEMPTS} attempts)")


def _once(url: str, name: str, most: int, end: float) -> bytes:
    headers = {"Accept-Encoding": "identity"}  # what is compressed might grow
    try:
        with (
            httpx2.Client(
                verify=_trusted(), timeout=QUIET, follow_redirects=True, max_redirects=REDIRECTS
            ) as client,
            client.stream("GET", url, headers=headers) as answer,
        ):
            if answer.status_code in BUSY:
                raise _Again(f"HTTP {answer.status_code}")
            if answer.status_code != HTTPStatus.OK:
                raise _refused(name, f"HTTP {answer.status_code}")
            return _body(answer, name, most, end)
    except (httpx2.UnsupportedProtocol, httpx2.TooManyRedirects, httpx2.InvalidURL) as error:
        raise _refused(name, " ".join(str(error).split())) from None
    except httpx2.HTTPError as error:
        raise _Again(" ".join(f"{type(error).__name__} {error}".split())) from None


def _body(answer: httpx2.Response, name: str, most: int, end: float) -> bytes:
    content = bytearray()
    for piece in answer.iter_raw():
        content += piece
        if len(content) > most:
            raise PictureError(
                f"the picture {name} has more than {most:,} bytes; expected at most so many; make it smaller or raise "
                "data.images.max_bytes"
            )
        if time.monotonic() > end:
            raise _refused(name, f"not whole after {SECONDS:g} s")
    return bytes(content)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _refused(name: str, found: str) -> PictureError:
    return PictureError(
        f"the picture {name} cannot be fetched: {found}; expected a picture over http or https; correct the address, "
        "or download it"
    )


@cache
def _trusted() -> ssl.SSLContext:
    """The authorities trusted for https; reading them takes longer than a request."""
    return httpx2.create_ssl_context()
