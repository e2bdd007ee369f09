"""Shards at an address: each is fetched when it is needed, or a little ahead, into a folder of bounded size.

    folder/<hash of its meta.json>/ids.npy ...     a shard as the cache has it, verified before it gets this name
    folder/<hash>.partial/                         the shard that is being fetched; its complete files are kept

The shards that the next steps read are known, since the order of samples is a pure function of seed and step. After
``expect`` a thread fetches them in the order of their use. Where the folder has no more room, the shard is removed that
is used last, or not at all in the known steps: a shard that is fetched ahead never takes the place of one that is
needed sooner. A shard that is missing when a sample of it is asked for is fetched at once.

The processes of one machine share the folder: one of them fetches at a time, under a lock, and the others find what it
fetched. A shard that is removed while another process reads it stays readable there until the next ``expect``. What the
thread could not fetch is tried again where it is needed, and the error is raised there.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from taut.data.store import cache
from taut.data.store.shards import Shard
from taut.errors import DataError, OutputError, TautError
from taut.io import files, remote

PARTIAL, LOCK = ".partial", "lock"


@dataclass(frozen=True)
class RemoteShard:
    """A shard at an address."""

    url: str
    """Address of the folder of its files."""
    name: str
    """SHA-256 of its meta.json, which has the hashes of its arrays."""
    meta: cache.Meta = field(compare=False, repr=False)
    sizes: dict[str, int] = field(compare=False, repr=False)
    """Array -> bytes of its file."""

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes.values())


class ShardFetcher:
    """Fetches shards into a folder of this disk, and opens them."""

    def __init__(self, folder: Path, limit: int | None) -> None:
        """``limit``: maximum bytes of shards in ``folder``; without one all fetched shards stay."""
        self.folder, self.limit = folder, limit
        self.num_fetched, self.num_bytes = 0, 0
        """Number of shards that this process fetched, and their bytes."""
        self.waited = 0.0
        """Seconds that steps waited for shards."""
        self._opened: dict[str, cache.ShardFiles] = {}
        """Shards that were opened, by name; another process may have removed them since."""
        self._lock = threading.RLock()
        """Held while a shard is fetched."""
        self._upcoming: tuple[RemoteShard, ...] = ()
        """Shards of the known steps, in the order of first use."""
        self._told = threading.Event()
        self._num_waiting = 0
        self._thread: threading.Thread | None = None

    def as_fields(self) -> dict[str, float]:
        """Fields of the run log."""
        return {"shards": self.num_fetched, "bytes": self.num_bytes, "waited": self.waited}

    def open(self, wanted: RemoteShard) -> Shard:
        """Fetch and verify a shard. Raises DataError where it cannot be fetched, or is not the one that was written."""
        if wanted.name in self._opened and (shard := self._kept(wanted)) is not None:
            return shard
        began = time.monotonic()
        self._num_waiting += 1
        try:
            with self._alone():
                shard = self._open(wanted, is_needed=True)
        finally:
            self._num_waiting -= 1
            self.waited += time.monotonic() - began
        assert shard is not None, "what is needed has room"
        return shard

    def expect(self, shards: Iterable[RemoteShard]) -> None:
        """Fetch ahead these shards, which the next steps read in this order."""
        self._upcoming = tuple(dict.fromkeys(shards))
        for name in list(self._opened):
            if not (self.folder / name).is_dir():  # another process needed the room
                self._forget(name)
        self._told.set()
        if self._thread is None or not self._thread.is_alive():  # a fork has no threads
            self._thread = threading.Thread(
                target=self._fetch_ahead, name="taut-shards", daemon=True
            )
            self._thread.start()

    def _fetch_ahead(self) -> None:
        while True:
            self._told.wait()
            self._told.clear()
            for wanted in self._upcoming:
                while self._num_waiting:  # a step waits for another one
                    time.sleep(0.01)
                if self._told.is_set():
                    break
                if wanted.name in self._opened:
                    continue
                try:
                    with self._alone():
                        if self._open(wanted, is_needed=False) is None:
                            break  # the room is full of what is needed sooner
                except (TautError, OSError):
                    break  # raised where the shard is needed

    def _kept(self, wanted: RemoteShard) -> Shard | None:
        """The shard, if it is in the folder and whole."""
        new = cache.ShardFiles(self.folder / wanted.name, wanted.meta)
        try:
            return self._opened.setdefault(wanted.name, new).open()
        except cache.FAILURES as error:
            cache.reason_of(error)
            self._forget(wanted.name)
            return None

    def _forget(self, name: str) -> None:
        if (shard_files := self._opened.pop(name, None)) is not None:
            shard_files.close()

    # -- under the lock

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the folder for one thread of one process."""
        with self._lock:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                number = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise self._unwritable(error) from None
            try:
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(number, fcntl.LOCK_EX)
                yield
            finally:
                os.close(number)

    def _open(self, wanted: RemoteShard, *, is_needed: bool) -> Shard | None:
        """The shard, fetched if it is missing; None if there is no room and it is not needed yet."""
        # Use it if it is there and whole.
        if (shard := self._kept(wanted)) is not None:
            return shard
        place = self.folder / wanted.name
        if place.is_dir():
            files.remove(place)  # the disk changed it; fetched again
        if not self._make_room(wanted, is_needed=is_needed):
            return None
        # Else fetch it, and give it its name when it is whole.
        partial = self.folder / f"{wanted.name}{PARTIAL}"
        try:
            shard_files = self._fetch(wanted, partial)
            shard = shard_files.open()
            partial.rename(place)
        except OSError as error:
            raise self._unwritable(error) from None
        shard_files.folder = place
        self._opened[wanted.name] = shard_files
        self.num_fetched += 1
        self.num_bytes += wanted.num_bytes
        return shard

    def _fetch(self, wanted: RemoteShard, partial: Path) -> cache.ShardFiles:
        for left in self.folder.glob(f"*{PARTIAL}"):
            if left != partial:
                shutil.rmtree(left, ignore_errors=True)
        if partial.is_symlink():
            partial.unlink()
        partial.mkdir(exist_ok=True)
        for name, size in wanted.sizes.items():
            path = partial / f"{name}.npy"
            if not path.is_file() or path.stat().st_size != size:
                remote.copy(f"{wanted.url}/{name}.npy", path, size)
        files.sync(partial)
        shard_files = cache.ShardFiles(partial, wanted.meta)
        try:
            shard_files.open()
        except cache.FAILURES as error:
            reason = cache.reason_of(error)
            shutil.rmtree(partial, ignore_errors=True)
            raise DataError(
                f"data: {wanted.url} is not the shard that was written ({reason}); expected that of its "
                f"{cache.MANIFEST}; put the shard back, or tokenize again"
            ) from None
        return shard_files

    def _make_room(self, wanted: RemoteShard, *, is_needed: bool) -> bool:
        """Remove the shards needed last until the wanted one fits; False if it does not. Nothing that is needed sooner
        is removed for a shard that is fetched ahead.
        """
        if self.limit is None:
            return True
        # When each shard is needed next, and the room that it takes.
        place_of = {upcoming.name: number for number, upcoming in enumerate(self._upcoming)}
        never = len(place_of)
        own = place_of.get(wanted.name, never)
        sizes = {
            path: sum(file.stat().st_size for file in path.iterdir())
            for path in self.folder.iterdir()
            if path.is_dir()
        }
        sizes.pop(self.folder / f"{wanted.name}{PARTIAL}", None)
        while sum(sizes.values()) + wanted.num_bytes > self.limit:
            last = max(
                sizes, key=lambda path: (place_of.get(path.name, never), -path.stat().st_mtime_ns)
            )
            if not is_needed and place_of.get(last.name, never) <= own:
                return False
            self._forget(last.name)
            files.remove(last)
            del sizes[last]
        return True

    def _unwritable(self, error: OSError) -> OutputError:
        return OutputError(
            f"{self.folder}: fetched shards cannot be kept there: {cache.reason_of(error)}; expected a directory with "
            "room; free some, set data.fetched_gb, or set data.cache or TAUT_CACHE"
        )


@functools.cache
def shard_fetcher(folder: Path, limit: int | None) -> ShardFetcher:
    """The fetcher of a folder: one in the process, since train and eval share its room."""
    return ShardFetcher(folder, limit)


@dataclass(frozen=True)
class RemoteShards:
    """The shards of a source at an address, and what fetches them."""

    fetcher: ShardFetcher
    shards: tuple[RemoteShard, ...]


def require_room(shards: Sequence[RemoteShard], limit: int | None) -> None:
    """Raise DataError where the largest shard is larger than all that may be kept."""
    largest = max(shard.num_bytes for shard in shards)
    if limit is not None and largest > limit:
        raise DataError(
            f"data.fetched_gb={limit / 1e9:g}, and the largest shard has {largest / 1e9:.3g} GB; expected room for one "
            "at least; raise it"
        )
