"""The Hugging Face hub: whether it can be reached, and what its errors mean.

    hub.settle()                          before a library loads a name: if the hub cannot be reached, only the cache
    hub.explain("org/name", error)        the hub's error for that name in one line; None: no error of the hub's
    hub.is_pointer(path)                  whether a file is git-lfs's placeholder instead of the file itself

Left to itself the library asks six times for each file, half a minute in all, before it looks into its cache.
The library is imported inside functions.
"""

from __future__ import annotations

import os
import ssl
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.request import getproxies

PATIENCE = 5.0
"""Seconds that the hub may take to answer."""
STANDS = 60.0
"""Seconds for which the result of a request is reused."""
POINTER = b"version https://git-lfs.github.com/spec/"

_asked: tuple[float, str | None] | None = None
"""Time of the last request to the hub, and why it could not be reached."""


def settle() -> str | None:
    """Why the hub cannot be reached, with the libraries set to use only their cache; None if it can.

    If HF_HUB_OFFLINE is set, or there is a proxy, no request is sent and all is left to the libraries.
    """
    global _asked
    from huggingface_hub import constants

    if {"http", "https", "all"} & getproxies().keys() or is_offline():
        return None
    if _asked is None or time.monotonic() - _asked[0] > STANDS:
        _asked = time.monotonic(), _failure(constants.ENDPOINT)
        is_away = _asked[1] is not None
        constants.HF_HUB_OFFLINE = is_away
        if "datasets" in sys.modules:
            sys.modules["datasets"].config.HF_HUB_OFFLINE = is_away
        if is_away:
            os.environ["HF_HUB_OFFLINE"] = "1"  # for what reads it later, and for other processes
        else:
            os.environ.pop("HF_HUB_OFFLINE", None)
    return _asked[1]


def is_offline() -> bool:
    """Whether the user has set HF_HUB_OFFLINE: then nothing is asked of any server."""
    from huggingface_hub import constants

    is_ours = _asked is not None and _asked[1] is not None
    return constants.HF_HUB_OFFLINE and not is_ours


def settled() -> str | None:
    """Why the hub could not be reached at the last request; None: it could, or there was none."""
    return None if _asked is None else _asked[1]


def explain(name: str, error: BaseException, kind: str = "model") -> str | None:
    """What the hub's error behind ``error`` means for the repository ``name`` of a ``kind`` (model, dataset)."""
    from huggingface_hub import constants, errors

    place = constants.ENDPOINT
    for cause in _causes(error):
        if isinstance(cause, errors.GatedRepoError):
            return f"{name} at {place} is gated; ask for access on its page, then log in (hf auth login)"
        if isinstance(cause, errors.RepositoryNotFoundError):
            return (
                f"there is no {name} at {place}, or it is private; expected a directory or org/name; correct it, or "
                "log in (hf auth login)"
            )
        if isinstance(cause, errors.RevisionNotFoundError):
            return f"{name} at {place} has no such revision; correct it"
        if isinstance(cause, errors.RemoteEntryNotFoundError):
            return f"{name} at {place} lacks a file that is needed: {' '.join(str(cause).split())[:200]}"
        if isinstance(cause, errors.LocalEntryNotFoundError | ConnectionError):
            reason = settle() or ("HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else None)
            options = "" if kind == "model" else f"--repo-type {kind} "
            why = f"{place} cannot be reached ({reason})" if reason else f"{place} did not answer"
            return (
                f"{name} is no directory here and not in the hub's cache, and {why}; expected one of them; correct the "
                f"path, or run where there is a network: hf download {options}{name}"
            )
    return None


def is_pointer(path: Path) -> bool:
    """Whether a file is what ``git clone`` leaves of a large file without git-lfs."""
    with path.open("rb") as file:
        return file.read(len(POINTER)) == POINTER


def _failure(endpoint: str) -> str | None:
    """Why the hub cannot be reached. Any answer means that it can, a redirect or an error included."""
    import httpx2

    from taut.io import http

    try:
        http.wait_for(PATIENCE, partial(_ask, endpoint))
    except TimeoutError:
        return f"no answer within {PATIENCE:g} s"
    except httpx2.RequestError as error:
        causes = list(_causes(error))
        if any(isinstance(cause, ssl.SSLError) for cause in causes):
            return None  # it is there; the library may have other certificates
        for cause in reversed(causes):
            if isinstance(cause, OSError) and cause.errno is not None:
                return os.strerror(cause.errno) if cause.errno > 0 else str(cause.strerror)
    except http.Refused:
        pass
    return None  # the library will say what it makes of it


async def _ask(endpoint: str) -> None:
    from taut.io import http

    async with http.open_client(PATIENCE) as client:
        await http.request(client, "HEAD", endpoint, http.Limits(PATIENCE, max_bytes=0))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
