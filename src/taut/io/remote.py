"""Files at addresses: fetched once into a folder, whole or not at all, then read like any other file.

    fetch("s3://bucket/chats/*.jsonl", folder, suffixes)     [("s3://bucket/chats/a.jsonl", Path), ...], sorted; a note

    folder/<hash of the address>/<hash of the version>.jsonl    the version: ETag, or size and time of last change
    folder/<hash of the address>/files.json                     which addresses a pattern or directory stood for

http and https go through ``taut.io.http``; s3, gs and hf (hf://datasets/owner/name/FILE) through fsspec; the libraries
of s3 and gs are extras. A broken transfer goes on at the byte it had reached; after ATTEMPTS without a new byte
nothing of it is left, and RemoteError names address and byte. A file that changes meanwhile is a RemoteError too.

    find("s3://bucket/shards/manifest.json", folder)         its Path, or None
    copy(url, path, size)                                    one file whose size is known, to a path

With HF_HUB_OFFLINE=1 nothing is asked: the newest version in the folder is used, or RemoteError raised. Where no
connection can be made, the newest version is used too, and the note says so. Credentials are
the libraries' own (environment, profiles); none is in a message. A disk that is full is an OutputError.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from taut.errors import DataError, OutputError, TautError
from taut.io import extras, files, hub

SCHEMES = ("http", "https", "s3", "gs", "hf", "ms")
EXTRA_OF = {"s3": "s3", "gs": "gs"}
ATTEMPTS = 4
"""Attempts without a single new byte before a transfer is given up."""
PAUSE = 0.5
"""Seconds before the second attempt; doubled before each that follows."""
PATIENCE = 20.0
"""Seconds without a byte after which a transfer has broken off."""
BLOCK = 2**23
"""Bytes that are read at a time from a store."""
LISTING = "files.json"
OLD = "as it was fetched before, since no connection can be made"
CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; FSSPEC_S3_ANON=true for a public bucket",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or log in: gcloud auth application-default login",
    "hf": "set HF_TOKEN, or log in: hf auth login",
}
"""Scheme -> what to do about missing credentials."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_FORBIDDEN = re.compile(
    r"credential|Permission|Forbidden|AccessDenied|Unauthori|\b40[13]\b", re.IGNORECASE
)
_AWAY = re.compile(r"Unreachable|ConnectError|EndpointConnection|OfflineMode|ConnectorE")
"""Names of the stores' errors: no right to read, and no connection."""


class RemoteError(DataError):
    """An address cannot be read."""


class Unreachable(RemoteError):
    """No connection can be made to an address."""


class _Broken(Exception):
    """A transfer broke off; another attempt may help."""


class Version(NamedTuple):
    """Version of the file at an address."""

    tag: str
    """Another one for other content."""
    size: int | None
    """Size in bytes, if the server says it."""


class _Store(Protocol):
    def find(self, url: str) -> list[str]:
        """List the addresses of the files of a pattern or a directory; a file is its own."""

    def head(self, url: str) -> Version: ...

    def read(self, url: str, version: Version, file: IO[bytes]) -> None:
        """Append to ``file`` what follows the bytes it has. Raises _Broken, and leaves what has arrived."""


def scheme_of(path: str) -> str | None:
    """The scheme of an address, in lower case; None for a path or a name. Raises RemoteError for one that cannot be
    read.
    """
    match = _SCHEME.match(path)
    if match is None:
        return None
    scheme, fault = match[1].lower(), ""
    try:
        urlsplit(path)
    except ValueError as error:
        fault = f"{path!r:.200} is no address ({error}); expected one as https://host/file.jsonl; correct it"
    else:
        if scheme not in SCHEMES:
            known = ", ".join(SCHEMES)
            fault = f"{_shown(path)} has the scheme {scheme}; expected one of {known}; fetch the file, and name it here"
    if fault:
        raise RemoteError(f"data: {fault}")
    return scheme


class Fetched(NamedTuple):
    """Files from an address."""

    files: list[tuple[str, Path]]
    """Each with its own address."""
    note: str = ""
    """Why they may not be what is there now."""


def fetch(url: str, folder: Path, suffixes: Sequence[str]) -> Fetched:
    """The files at an address, fetched where ``folder`` does not have them. ``suffixes``: of the files that are read
    of a directory.
    """
    listing = folder / _hash(url) / LISTING
    if hub.is_offline():
        return Fetched(_kept(url, folder, listing))
    try:
        return Fetched(_fetch_all(url, folder, suffixes, listing))
    except Unreachable:
        with suppress(RemoteError):
            return Fetched(_kept(url, folder, listing), OLD)
        raise


def _fetch_all(
    url: str, folder: Path, suffixes: Sequence[str], listing: Path
) -> list[tuple[str, Path]]:
    store = _open_store(url)
    with _explained(url):
        found = store.find(url)
    # of a pattern or a directory, the files with a known suffix
    if found != [url]:
        found = sorted(one for one in found if _name(one).lower().endswith(tuple(suffixes)))
        if not found:
            raise RemoteError(
                f"data: no file matches {_shown(url)}; expected at least one that ends in {', '.join(suffixes)}; "
                "correct the address"
            )
    fetched = []
    for one in found:
        with _explained(one):
            version = store.head(one)
        fetched.append((_shown(one), _fetch_version(store, one, version, folder)))
    # what it stood for, for when nothing can be asked
    listing.parent.mkdir(parents=True, exist_ok=True)
    _write(listing, lambda file: file.write(json.dumps(found).encode()))
    return fetched


def find(url: str, folder: Path) -> Fetched | None:
    """The file at an address, fetched where ``folder`` does not have it; None if there is none, or none is known."""
    note = ""
    if not hub.is_offline():
        store, note = _open_store(url), OLD
        with suppress(Unreachable):
            with _explained(url):
                try:
                    version = store.head(url)
                except FileNotFoundError:
                    return None
            return Fetched([(_shown(url), _fetch_version(store, url, version, folder))])
    with suppress(OSError, ValueError):
        return Fetched([(_shown(url), _newest(url, folder))], note)
    return None


def copy(url: str, place: Path, size: int) -> None:
    """Fetch the file at an address, of so many bytes, to ``place``: whole, or not at all."""
    if hub.is_offline():
        raise _not_fetched(url, place.parent)
    store = _open_store(url)
    with _explained(url):
        _write(place, lambda file: _transfer(store, url, Version("", size), file))


def _not_fetched(url: str, folder: Path) -> RemoteError:
    return RemoteError(
        f"data: {_shown(url)} was not fetched before, and HF_HUB_OFFLINE is set; expected it in {folder}; run once "
        "with a network"
    )


def _newest(url: str, folder: Path) -> Path:
    """The version of a file that was fetched last. Raises OSError or ValueError where there is none."""
    versions = [path for path in (folder / _hash(url)).iterdir() if path.name != LISTING]
    return max(versions, key=lambda path: path.stat().st_mtime_ns)


def _kept(url: str, folder: Path, listing: Path) -> list[tuple[str, Path]]:
    """Files that were fetched before."""
    try:
        return [(_shown(one), _newest(one, folder)) for one in files.read_json(listing)]
    except (OSError, ValueError):
        raise _not_fetched(url, folder) from None


def _fetch_version(store: _Store, url: str, version: Version, folder: Path) -> Path:
    suffix = "".join(Path(_name(url)).suffixes[-2:])
    place = folder / _hash(url) / f"{_hash(version.tag)}{suffix}"
    if place.is_file():
        os.utime(place)  # the newest, where nothing can be asked
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with _explained(url):
        _write(place, lambda file: _transfer(store, url, version, file))
        if store.head(url) != version:
            place.unlink()
            raise RemoteError(
                f"data: {_shown(url)} changed while it was fetched; expected it to stay as it is; run again"
            )
    return place


def _transfer(store: _Store, url: str, version: Version, file: IO[bytes]) -> None:
    """Fetch all bytes; a transfer that breaks off goes on where it was."""
    num_idle = 0
    while True:
        before = file.tell()
        try:
            store.read(url, version, file)
            if version.size is None or file.tell() == version.size:
                break
            reason = f"{version.size:,} bytes were announced"
        except _Broken as error:
            reason = str(error)
        # an attempt that brought bytes does not count
        num_idle = 0 if file.tell() > before else num_idle + 1
        if num_idle == ATTEMPTS or file.tell() > (version.size or file.tell()):
            raise RemoteError(
                f"data: {_shown(url)} broke off at byte {file.tell():,} ({reason}); expected the whole file; nothing "
                "of it was kept; run again"
            )
        time.sleep(PAUSE * 2**num_idle * random.uniform(0.5, 1.0))


def _write(place: Path, fill: Any) -> None:
    """Write a file whole or not at all; of several processes that write it, the last one's stays."""
    number, name = tempfile.mkstemp(prefix=".", suffix=".partial", dir=place.parent)
    partial = Path(name)
    try:
        with _Sink(number, "wb") as file:
            file.folder = place.parent
            fill(file)
        files.sync(partial)
        partial.replace(place)
    finally:
        partial.unlink(missing_ok=True)


class _Sink(io.FileIO):
    """A file that is written without a buffer. Where the disk takes no more, OutputError: no attempt would help."""

    folder: Path

    def write(self, content: Any) -> int:
        left = memoryview(content)
        try:
            while left:
                left = left[super().write(left) :]
        except OSError as error:
            raise OutputError(
                f"{self.folder}: what is fetched cannot be written there: {error.strerror or error}; expected a "
                "directory with room; free some, or set data.cache or TAUT_CACHE"
            ) from None
        return len(content)


def _open_store(url: str) -> _Store:
    scheme = urlsplit(url).scheme.lower()
    if scheme in ("http", "https"):
        return _Web()
    if scheme in EXTRA_OF:
        extras.require(EXTRA_OF[scheme], f"data: {_shown(url)}")
    return _FileSystem(scheme)


class _Web:
    """A server of http or https."""

    def find(self, url: str) -> list[str]:
        return [url]

    def head(self, url: str) -> Version:
        from taut.io import http

        headers = http.head(url, PATIENCE)
        size = headers.get("content-length", "")
        tag = headers.get("etag") or f"{headers.get('last-modified')} {size}"
        return Version(tag, int(size) if size.isdecimal() else None)

    def read(self, url: str, version: Version, file: IO[bytes]) -> None:
        from taut.io import http

        try:
            http.download(url, file, PATIENCE)
        except http.Unanswered as error:
            raise _Broken(str(error)) from None


class _FileSystem:
    """A store that fsspec knows."""

    def __init__(self, scheme: str) -> None:
        import fsspec

        if scheme == "hf":
            hub.settle()
        options: dict[str, Any] = {}
        if scheme == "s3":  # by itself the library waits a minute, five times
            retries = {"max_attempts": 1}
            options["config_kwargs"] = {"connect_timeout": PATIENCE, "retries": retries}
        self.system = fsspec.filesystem(scheme, **options)
        self.scheme = scheme

    def find(self, url: str) -> list[str]:
        if re.search(r"[*?\[]", url):
            found = self.system.glob(url)
        elif self.system.isfile(url):
            return [url]
        else:
            found = self.system.find(url)
        return [f"{self.scheme}://{path}" for path in found]

    def head(self, url: str) -> Version:
        found = self.system.info(url)
        if found.get("type") == "directory":
            raise FileNotFoundError(url)
        keys = ("ETag", "etag", "md5Hash", "blob_id", "LastModified", "updated", "mtime", "size")
        tag = " ".join(str(found[key]) for key in keys if found.get(key))
        return Version(tag, found.get("size"))

    def read(self, url: str, version: Version, file: IO[bytes]) -> None:
        assert version.size is not None, "a store says how large its files are"
        while (start := file.tell()) < version.size:
            try:
                stop = min(start + BLOCK, version.size)
                content = self.system.cat_file(url, start=start, end=stop)
            except PermissionError:
                raise
            except (OSError, ValueError, RuntimeError) as error:
                raise _Broken(_line(error)) from None
            if not content:
                raise _Broken("no more bytes came")
            file.write(content)


@contextmanager
def _explained(url: str) -> Iterator[None]:
    """Raise any error of a store's library as a RemoteError, in one line."""
    try:
        yield
    except TautError:
        raise
    except Exception as error:  # noqa: BLE001 (each store has its own errors, of libraries that may not be installed)
        scheme = urlsplit(url).scheme.lower()
        names = " ".join(f"{type(cause).__name__} {cause}" for cause in hub.causes(error))
        if isinstance(error, FileNotFoundError):
            problem, remedy = "is not there", "correct the address"
        elif _FORBIDDEN.search(names):
            problem = f"may not be read ({_line(error)})"
            login = "the server asks for a login, which taut does not send; fetch the file"
            remedy = CREDENTIALS.get(scheme, login)
        else:
            problem = f"cannot be read ({_line(error)})"
            remedy = "check the address and the network"
        kind = Unreachable if _AWAY.search(names) else RemoteError
        raise kind(f"data: {_shown(url)} {problem}; expected a file; {remedy}") from None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _name(url: str) -> str:
    """The path in an address."""
    return urlsplit(url).path if url.lower().startswith("http") else url


def _shown(url: str) -> str:
    """An address without what may be secret: a password, or the query of a signed one."""
    parts = urlsplit(url)
    if parts.scheme.lower() not in ("http", "https"):
        return url
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
