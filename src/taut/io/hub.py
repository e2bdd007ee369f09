"""The Hugging Face hub: whether it can be reached, and what its errors mean.

    hub.settle()                          before a library loads a name: if the hub cannot be reached, only the cache
    hub.explain("org/name", error)        the hub's error for that name in one line; None: no error of the hub's
    hub.pinned("org/name@v2")             the repository, and its commit as the library's argument
    hub.is_pointer(path)                  whether a file is git-lfs's placeholder instead of the file itself

Left to itself the library asks six times for each file, half a minute in all, before it looks into its cache.
The library is imported inside functions.
"""

from __future__ import annotations

import os
import re
import ssl
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import getproxies

PATIENCE = 5.0
"""Seconds that the hub may take to answer."""
STANDS = 60.0
"""Seconds for which the result of a request is reused."""
NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w.-]+(?:/[\w.-]+)*))?")
"""A repository of the hub, with a revision after @: a commit, a tag or a branch."""
POINTER = b"version https://git-lfs.github.com/spec/"

_asked: tuple[float, str | None] | None = None
"""Time of the last request to the hub, and why it could not be reached."""
_commits: dict[str, str] = {}
"""The commit of each name that was asked for."""


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


def offline_reason() -> str | None:
    """Reason why the hub was not reached at the last request, or None."""
    return None if _asked is None else _asked[1]


def named(path: str) -> tuple[str, str | None]:
    """A model's path as the library takes it: a directory as it is; of ``org/name@revision`` the two parts."""
    match = None if Path(path).exists() else NAME.fullmatch(path)
    return (path, None) if match is None else (match[1], match[2])


def pinned(path: str) -> tuple[str, dict[str, Any]]:
    """A model's path and, if it is a name, the commit as the library's argument ``revision``. A process looks it up
    once, so that all files are of one commit whatever a branch names by then. Raises the library's errors.
    """
    name, revision = named(path)
    if Path(path).exists():
        return name, {}
    # look the commit up once
    if path not in _commits:
        from huggingface_hub import hf_hub_download

        file = hf_hub_download(name, "config.json", revision=revision)
        _commits[path] = Path(file).parent.name  # .../snapshots/COMMIT/config.json
    return name, {"revision": _commits[path]}


def explain(name: str, error: BaseException, kind: str = "model") -> str | None:
    """Explain the hub's error behind ``error`` for the repository ``name`` of a ``kind`` (model, dataset); None for
    others.
    """
    from huggingface_hub import constants, errors

    place = constants.ENDPOINT
    for cause in causes(error):
        if isinstance(cause, errors.GatedRepoError):
            return f"{name} at {place} is gated; ask for access on its page, then log in (hf auth login)"
        if isinstance(cause, errors.RepositoryNotFoundError):
            return (
                f"there is no {name} at {place}, or it is private; expected a directory or org/name; correct it, or "
                "log in (hf auth login)"
            )
        if isinstance(cause, errors.RevisionNotFoundError):
            return f"{name} at {place} has no such revision; expected a commit, tag or branch; correct it"
        if isinstance(cause, errors.RemoteEntryNotFoundError):
            return f"{name} at {place} lacks a file that is needed: {' '.join(str(cause).split())[:200]}"
        if isinstance(cause, errors.LocalEntryNotFoundError | ConnectionError):
            # neither in the cache nor to be reached
            reason = settle() or ("HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else None)
            options = "" if kind == "model" else f"--repo-type {kind} "
            repository, revision = named(name)
            options += f"--revision {revision} " if revision else ""
            why = f"{place} cannot be reached ({reason})" if reason else f"{place} did not answer"
            return (
                f"{name} is no directory here and not in the hub's cache, and {why}; correct the path, or run with a "
                f"network: hf download {options}{repository}"
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
        behind = list(causes(error))
        if any(isinstance(cause, ssl.SSLError) for cause in behind):
            return None  # it is there; the library may have other certificates
        for cause in reversed(behind):
            if isinstance(cause, OSError) and cause.errno is not None:
                return os.strerror(cause.errno) if cause.errno > 0 else str(cause.strerror)
    except http.Refused:
        pass
    return None  # the library will say what it makes of it


async def _ask(endpoint: str) -> None:
    from taut.io import http

    async with http.open_client(PATIENCE) as client:
        await http.request(client, "HEAD", endpoint, http.Limits(PATIENCE, max_bytes=0))


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those behind it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
