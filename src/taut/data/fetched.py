"""Tokenised shards at an address: each is fetched when it is needed, or a little ahead, into a folder of bounded size.

    folder/<hash of its meta.json>/ids.npy ...     a shard as the cache has it, verified before it got this name
    folder/<hash>.partial/                         the one that is being fetched; its whole files are kept

Which shards the next steps read is known, since the order of samples is a pure function of seed and step. ``expect`` is
told them: a thread fetches them in the order of their use, and where the folder has no more room the shard goes that is
used last, or not at all in the steps that are known. So a shard that is fetched ahead never takes the place of one that
is needed sooner. Where a sample is asked for whose shard is not there, that shard is fetched at once.

The processes of one machine share the folder: one of them fetches at a time, under a lock, and the others find what it
fetched. A shard that is removed while another process reads it stays readable there, and is let go by the next
``expect``. What a thread could not fetch is tried again by who needs it, and the error is raised there.
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

from taut.data import cache
from taut.data.entries import Entry
from taut.errors import DataError, OutputError, TautError
from taut.io import files, remote

PARTIAL, LOCK = ".partial", "lock"


@dataclass(frozen=True)
class RemoteShard:
    """A shard at an address."""

    url: str
    """Of the folder of its files."""
    name: str
    """The SHA-256 of its meta.json, which has those of its arrays."""
    meta: cache.Meta = field(compare=False, repr=False)
    sizes: dict[str, int] = field(compare=False, repr=False)
    """Array -> bytes of its file."""

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes.values())


class FetchedShards:
    """The shards of a data set that were fetched to this disk."""

    def __init__(self, folder: Path, limit: int | None) -> None:
        """``limit``: most bytes of shards in ``folder``; None: all that are fetched stay."""
        self.folder, self.limit = folder, limit
        self.num_fetched, self.num_bytes = 0, 0
        """Shards that this process fetched, and their bytes."""
        self.waited = 0.0
        """Seconds that steps waited for shards."""
        self._opened: dict[str, Entry] = {}
        self._lock = threading.RLock()
        """Held while a shard is fetched."""
        self._upcoming: tuple[RemoteShard, ...] = ()
        """Those of the steps that are known, in the order of first use."""
        self._told = threading.Event()
        self._num_waiting = 0
        self._thread: threading.Thread | None = None

    def as_fields(self) -> dict[str, float]:
        """For the run log."""
        return {"shards": self.num_fetched, "bytes": self.num_bytes, "waited": self.waited}

    def open(self, shard: RemoteShard) -> Entry:
        """The shard, verified. Raises DataError where it cannot be fetched, or is not the one that was written."""
        if (entry := self._opened.get(shard.name)) is not None:
            return entry
        began = time.monotonic()
        self._num_waiting += 1
        try:
            with self._alone():
                entry = self._open(shard, is_needed=True)
        finally:
            self._num_waiting -= 1
            self.waited += time.monotonic() - began
        assert entry is not None, "what is needed has room"
        return entry

    def expect(self, shards: Iterable[RemoteShard]) -> None:
        """The next steps read these shards, in this order: fetch ahead what is not there."""
        self._upcoming = tuple(dict.fromkeys(shards))
        for name in list(self._opened):
            if not (self.folder / name).is_dir():  # another process needed the room
                self._opened.pop(name, None)
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
            for shard in self._upcoming:
                while self._num_waiting:  # a step waits for another one
                    time.sleep(0.01)
                if self._told.is_set():
                    break
                if shard.name in self._opened:
                    continue
                try:
                    with self._alone():
                        if self._open(shard, is_needed=False) is None:
                            break  # the room is full of what is needed sooner
                except (TautError, OSError):
                    break  # raised where the shard is needed

    # -- under the lock

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One thread of one process at a time fetches into the folder."""
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

    def _open(self, shard: RemoteShard, *, is_needed: bool) -> Entry | None:
        """The shard, fetched where it is not there; None: it is not needed yet, and there is no room."""
        if (entry := self._opened.get(shard.name)) is not None:
            return entry
        place = self.folder / shard.name
        if place.is_dir():
            try:
                self._opened[shard.name] = cache.open_entry(place, shard.meta)
                return self._opened[shard.name]
            except cache.FAILURES:
                shutil.rmtree(place)  # the disk changed it; fetched again
        if not self._make_room(shard, is_needed=is_needed):
            return None
        partial = self.folder / f"{shard.name}{PARTIAL}"
        try:
            entry = self._fetch(shard, partial)
            partial.rename(place)
        except OSError as error:
            raise self._unwritable(error) from None
        self._opened[shard.name] = entry
        self.num_fetched += 1
        self.num_bytes += shard.num_bytes
        return entry

    def _fetch(self, shard: RemoteShard, partial: Path) -> Entry:
        for left in self.folder.glob(f"*{PARTIAL}"):
            if left != partial:
                shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(exist_ok=True)
        for name, size in shard.sizes.items():
            path = partial / f"{name}.npy"
            if not path.is_file() or path.stat().st_size != size:
                remote.copy(f"{shard.url}/{name}.npy", path, size)
        files.sync(partial)
        try:
            return cache.open_entry(partial, shard.meta)
        except cache.FAILURES as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise DataError(
                f"data: {shard.url} is not the shard that was written ({cache.reason_of(error)}); expected the one of "
                f"its {cache.MANIFEST}; nothing of it was kept; tokenise again, or put back the shard"
            ) from None

    def _make_room(self, shard: RemoteShard, *, is_needed: bool) -> bool:
        """Remove what is needed last until the shard fits; whether it does. For a shard that is fetched ahead nothing
        goes that is needed sooner.
        """
        if self.limit is None:
            return True
        place_of = {upcoming.name: number for number, upcoming in enumerate(self._upcoming)}
        never = len(place_of)
        own = place_of.get(shard.name, never)
        sizes = {path: _size(path) for path in self.folder.iterdir() if path.is_dir()}
        sizes.pop(self.folder / f"{shard.name}{PARTIAL}", None)
        while sum(sizes.values()) + shard.num_bytes > self.limit:
            last = max(sizes, key=lambda path: (place_of.get(path.name, never), -_used(path)))
            if not is_needed and place_of.get(last.name, never) <= own:
                return False
            self._opened.pop(last.name, None)
            shutil.rmtree(last)
            del sizes[last]
        return True

    def _unwritable(self, error: OSError) -> OutputError:
        return OutputError(
            f"{self.folder}: fetched shards cannot be kept there: {error.strerror or error}; expected a directory with "
            "room; free some, set data.fetched_gb, or set data.cache or TAUT_CACHE"
        )


@functools.cache
def fetched_shards(folder: Path, limit: int | None) -> FetchedShards:
    """Those in a folder: one for the whole process, since train and eval share its room."""
    return FetchedShards(folder, limit)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _used(folder: Path) -> int:
    return folder.stat().st_mtime_ns


def require_room(shards: Sequence[RemoteShard], limit: int | None) -> None:
    """Raise DataError where the largest shard is larger than all that may be kept."""
    largest = max(shard.num_bytes for shard in shards)
    if limit is not None and largest > limit:
        raise DataError(
            f"data.fetched_gb={limit / 1e9:g}, and the largest shard has {largest / 1e9:.3g} GB; expected room for one "
            "at least; raise it"
        )
