"""Tokenised sources: samples as flat arrays, on disk in a directory named by the hash of all that they depend on.

    <cache>/<key>/manifest.json       of each shard: its counts, the digest of its meta.json, the sizes of its files
                  00000/ 00001/ ...   shards: an entry each, of 256 MiB or a little more

    <shard>/      NAME.npy            an array of its samples (entries.py)
                  meta.json           rows read, their forms, incidents, the largest id, how many samples end, and the
                                      SHA-256 of each array

A shard is written in a temporary folder and renamed, so it is whole or absent. Those of a source that has several wait
in ``<key>.partial``: after a kill the next process goes on from them. The directory takes its name with the last shard.

When a source is loaded, its files must be there in their sizes, and each meta.json as it was written. A shard's arrays
are checked against their hashes, and against the arrays they point into, when it is first opened; that of a source with
a single shard at once. A source that fails when it is loaded is reported and made again; a shard that fails later is a
DataError that names it. Neither is ever used. Does not know how a key is made (``dataset.py``).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Annotated, Any, Literal, TypeAlias

import numpy as np
import pydantic
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import TypedDict

from taut.config import first_problem, user_path
from taut.data.entries import (
    ARRAYS,
    PLACES,
    REQUIRED,
    Counts,
    Entry,
    Facts,
    Shards,
    digest_of,
    require_sound,
)
from taut.data.lengths import LengthCounts
from taut.data.messages import RowForm
from taut.data.render import Incident
from taut.errors import DataError, ModelError, OutputError
from taut.io import files
from taut.io.temporary import TemporaryFolder, clear

META_LIMIT = 2**29
"""Largest meta.json of a shard, in bytes: it lists every row that was left out or cut."""
MANIFEST_LIMIT = 2**28
"""Largest manifest.json, in bytes."""
MANIFEST = "manifest.json"
FORMAT = 2
"""Of manifest.json and meta.json. Raise it when they say more, or other things: older entries are made again."""
PARTIAL, LOCK = ".partial", "lock"
"""End of the name of a directory of finished shards whose source is not; the file in it that its process has locked."""
KEPT_SECONDS = 7 * 24 * 3600
"""Finished shards that nobody goes on from are removed after this time."""


Digest: TypeAlias = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Incident(TypedDict):
    """An ``Incident``."""

    place: str
    kind: Literal["dropped", "cut"]
    reason: str
    targets_lost: int


class _Counts(TypedDict):
    """``Counts``."""

    num_rows: Annotated[int, Field(ge=1)]
    num_samples: Annotated[int, Field(ge=1)]
    num_groups: Annotated[int, Field(ge=1)]
    num_tokens: Annotated[int, Field(ge=1)]
    num_targets: Annotated[int, Field(ge=0)]
    num_pictures: Annotated[int, Field(ge=0)]


class Meta(_Counts):
    """``meta.json`` of a shard."""

    lengths: list[tuple[int, Annotated[int, Field(ge=1)]]]
    """Number of tokens -> samples that have it, ascending."""
    incidents: list[_Incident]
    is_fleeting: bool
    forms: dict[RowForm, Annotated[int, Field(ge=0)]]
    ends: list[int]
    largest_id: Annotated[int, Field(ge=0)]
    num_ended: Annotated[int, Field(ge=0)]
    values: list[str]
    """``Facts``, and the tokens that end an answer."""
    sha256: dict[Annotated[str, Field(pattern=r"^\w+(\.\w+)*$")], str]
    """Array -> the digest of its file."""


class Listed(_Counts):
    """A shard in ``manifest.json``."""

    meta: str
    """The SHA-256 of its meta.json, which has those of the arrays."""
    sizes: dict[str, int]
    """Array -> bytes of its file."""


class ListedShard(TypedDict):
    """All that is noted of a shard."""

    name: Digest
    """The SHA-256 of its meta.json."""
    meta: Meta
    sizes: dict[str, int]
    """Array -> bytes of its file: of those that its meta.json lists."""


class _Manifest(TypedDict):
    """``manifest.json`` of a source."""

    format: int
    shards: Annotated[list[Listed], Field(min_length=1)]


class _OtherFormat(ValueError):
    """An entry is whole, and says other things than this version needs."""


FAILURES = (OSError, ValueError, LookupError, TypeError, ArithmeticError, EOFError)
"""Errors of files that are not those that were written."""


def default_directory() -> Path:
    """$TAUT_CACHE, else the user's cache directory."""
    return directory_of(None)


def directory_of(configured: str | None) -> Path:
    """``configured``, else the default."""
    chosen = configured or os.environ.get("TAUT_CACHE")
    if not chosen:
        base = os.environ.get("XDG_CACHE_HOME")
        return (Path(base) if base else Path.home() / ".cache") / "taut"
    return user_path(chosen, "data.cache" if configured else "TAUT_CACHE")


def load(directory: Path, key: str) -> tuple[Shards | None, str]:
    """The source's shards; or None and the reason why none can be used.

    Before the first source that a process loads, half-written ones of killed processes are removed.
    """
    clear([directory])
    folder = directory / key
    if not folder.is_dir():
        return None, "not in the cache"
    if not (folder / MANIFEST).exists() and (folder / "meta.json").exists():
        return None, "the cached entry is of an older version"
    try:
        metas = [shard["meta"] for shard in listed(directory, key)]
    except _OtherFormat as error:
        return None, str(error)
    except FAILURES as error:
        return None, f"the cached entry is damaged ({reason_of(error)})"

    def open_shard(number: int) -> Entry:
        try:
            return open_entry(folder / shard_name(number), metas[number])
        except FAILURES as error:
            raise DataError(
                f"{folder / shard_name(number)}: the tokenised data are damaged ({reason_of(error)}); expected them as "
                f"they were written; remove {folder} and run again, and the data are tokenised again"
            ) from None

    shards = shards_of(metas, open_shard)
    if len(shards) == 1 or shards.num_pictures:  # pictures are looked at when data are loaded
        try:
            for number, meta in enumerate(metas):
                shards.opened[number] = open_entry(folder / shard_name(number), meta)
        except FAILURES as error:
            return None, f"the cached entry is damaged ({reason_of(error)})"
    return shards, ""


def listed(directory: Path, key: str) -> list[ListedShard]:
    """All that is noted of the shards of a source. Raises one of FAILURES."""
    raw = files.read_json(directory / key / MANIFEST, MANIFEST_LIMIT)
    if isinstance(raw, dict) and "shards" in raw and raw.get("format", 1) != FORMAT:
        raise _OtherFormat("the cached entry is of another version")
    shards = pydantic.TypeAdapter(_Manifest).validate_python(raw, strict=True)["shards"]
    found: list[ListedShard] = []
    for number, shard in enumerate(shards):
        meta = _require_files(directory / key / shard_name(number), shard)
        found.append({"name": shard["meta"], "meta": meta, "sizes": shard["sizes"]})
    return found


def shards_of(
    metas: Sequence[Meta], open_shard: Callable[[int], Entry], *, is_remote: bool = False
) -> Shards:
    """The shards of a source, from what is noted of each."""
    return Shards(
        [_counts(meta) for meta in metas],
        open_shard,
        incidents=[Incident(**incident) for meta in metas for incident in meta["incidents"]],
        is_fleeting=any(meta["is_fleeting"] for meta in metas),
        forms=sum((Counter(meta["forms"]) for meta in metas), Counter[RowForm]()),
        digests=[_digest_of_arrays(meta) for meta in metas],
        lengths=LengthCounts.joined(map(_lengths, metas)),
        facts=[_facts(meta) for meta in metas],
        is_remote=is_remote,
    )


def _require_files(folder: Path, listed: Listed) -> Meta:
    """The meta.json of a shard whose files are there, in their sizes."""
    path = folder / "meta.json"
    content = files.read_regular(path, META_LIMIT)
    if hashlib.sha256(content).hexdigest() != listed["meta"]:
        raise ValueError(f"{folder.name}/meta.json is not as it was written")
    meta = pydantic.TypeAdapter(Meta).validate_json(content, strict=True)
    require_arrays(meta, listed["sizes"], folder.name)
    for name, size in listed["sizes"].items():
        array = folder / f"{name}.npy"
        status = array.stat()
        files.require_regular(status, array)
        if status.st_size != size:
            raise ValueError(f"{folder.name}/{name}.npy has {status.st_size:,} bytes, not {size:,}")
    return meta


def require_arrays(meta: Meta, sizes: Mapping[str, int], name: str) -> None:
    """Raise ValueError unless the sizes are those of the arrays of a shard, by their names."""
    if not set(REQUIRED) <= set(meta["sha256"]) or set(meta["sha256"]) != set(sizes):
        raise ValueError(f"{name}/meta.json does not list the arrays of a shard")


def open_entry(folder: Path, meta: Meta) -> Entry:
    """The shard, memory-mapped, after a look at each of its bytes. Raises one of FAILURES."""
    for name, expected in meta["sha256"].items():
        if files.digest(folder / f"{name}.npy") != expected:
            raise ValueError(f"{folder.name}/{name}.npy is not as it was written")
    names = _names(meta)
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in names}
    require_sound(arrays)
    incidents = tuple(Incident(**incident) for incident in meta["incidents"])
    digest = _digest_of_arrays(meta)
    num_rows, is_fleeting, forms = meta["num_rows"], meta["is_fleeting"], meta["forms"]
    ends = tuple(meta["ends"])
    entry = Entry(arrays, num_rows, incidents, is_fleeting, forms, digest, ends)
    noted = _counts(meta), _lengths(meta), _facts(meta)
    if (entry.counts, entry.lengths, entry.facts) != noted:
        raise ValueError(f"{folder.name}/meta.json has other counts than the arrays")
    return entry


def _facts(meta: Meta) -> Facts:
    return Facts(meta["largest_id"], meta["num_ended"], tuple(meta["values"]))


def _lengths(meta: Meta) -> LengthCounts:
    return LengthCounts(tuple(meta["lengths"]))


def _counts(of: _Counts) -> Counts:
    return Counts(
        of["num_rows"],
        of["num_samples"],
        of["num_groups"],
        of["num_tokens"],
        of["num_targets"],
        of["num_pictures"],
    )


def _names(meta: Meta) -> list[str]:
    """The arrays of a shard, in the order of its digest."""
    return [*REQUIRED, *sorted(set(meta["sha256"]) - set(REQUIRED))]


def _digest_of_arrays(meta: Meta) -> str:
    return digest_of([meta["sha256"][name] for name in _names(meta) if name not in PLACES])


def reason_of(error: Exception) -> str:
    if isinstance(error, pydantic.ValidationError):
        return first_problem(error)
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(text.split())[:200] or type(error).__name__


def shard_name(number: int) -> str:
    return f"{number:05d}"


def save(directory: Path, key: str, entries_from: Callable[[int], Iterator[Entry]]) -> int:
    """Write a source, shard by shard, and give it its name. It replaces a damaged one of the same name.

    ``entries_from(n)`` makes the entries of all rows after the first n: those are in shards that a process finished
    which ended before the last. An error of the data, or of the template, removes the finished shards; after any other
    end they stay. Returns how many rows those had.
    """
    writer = _Writer(directory, key)
    try:
        num_finished = writer.num_rows
        for entry in entries_from(num_finished):
            writer.add(entry)
            del entry  # while the next one is made
        writer.finish()
        return num_finished
    except (DataError, ModelError):
        writer.forget()
        raise
    finally:
        writer.close()


class _Writer:
    """The shards of one source on their way to disk. The first stays in a temporary folder until there is a second: a
    small source leaves nothing behind when its process is killed.
    """

    def __init__(self, directory: Path, key: str) -> None:
        self.directory, self.target = directory, directory / key
        self.partial = directory / f"{key}{PARTIAL}"
        self.listed: list[Listed] = []
        self.temporary: TemporaryFolder | None = None
        self.lock: int | None = None
        """The descriptor of the locked file in ``partial``, if this process writes there."""
        with self._as_output_error():
            if self.partial.is_dir() and self._lock():
                self._go_on()

    @property
    def num_rows(self) -> int:
        """Rows whose samples are in finished shards."""
        return sum(shard["num_rows"] for shard in self.listed)

    def add(self, entry: Entry) -> None:
        with self._as_output_error():
            fresh = self._fresh()
            name = shard_name(len(self.listed))
            self.listed.append(write_shard(fresh / name, entry))
            if self.lock is None and len(self.listed) == 2:
                _remove_old(self.directory)
                self.partial.mkdir(exist_ok=True)
                if self._lock():
                    self._empty()
            if self.lock is not None:
                for path in sorted(fresh.iterdir()):
                    path.rename(self.partial / path.name)
                files.sync(self.partial)

    def finish(self) -> None:
        with self._as_output_error():
            fresh = self.partial if self.lock is not None else self._fresh()
            manifest: _Manifest = {"format": FORMAT, "shards": self.listed}
            files.write_text(fresh / MANIFEST, json.dumps(manifest))
            if self.lock is not None:
                (self.partial / LOCK).unlink()
            try:
                fresh.rename(self.target)
            except OSError:
                if load(self.directory, self.target.name)[0] is None:  # else another process did
                    self.target.rename(self._temporary() / "old")
                    fresh.rename(self.target)
                elif self.lock is not None:
                    self.forget()

    def forget(self) -> None:
        """Remove the finished shards."""
        if self.lock is not None:
            shutil.rmtree(self.partial, ignore_errors=True)

    def close(self) -> None:
        if self.temporary is not None:
            self.temporary.close()
        if self.lock is not None:
            os.close(self.lock)

    def _temporary(self) -> Path:
        if self.temporary is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.temporary = TemporaryFolder("cache", self.directory)
        return self.temporary.path

    def _fresh(self) -> Path:
        """Where a shard is written."""
        fresh = self._temporary() / "new"
        fresh.mkdir(exist_ok=True)
        return fresh

    def _lock(self) -> bool:
        """Lock the directory of finished shards; not where another process has, or the file system has no locks."""
        self.lock = locked(self.partial)
        return self.lock is not None

    def _go_on(self) -> None:
        """Take over the finished shards, as far as they are whole."""
        (self.partial / MANIFEST).unlink(missing_ok=True)
        for number in range(len(list(self.partial.iterdir())) - 1):
            folder = self.partial / shard_name(number)
            try:
                listed = _listed(folder)
                entry = open_entry(folder, _require_files(folder, listed))
            except FAILURES:
                break
            if entry.stale_reason():
                break
            self.listed.append(listed)
        self._empty()

    def _empty(self) -> None:
        """Remove what is not one of the shards taken over."""
        kept = {LOCK, *(shard_name(number) for number in range(len(self.listed)))}
        keep_only(self.partial, kept)

    @contextmanager
    def _as_output_error(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: not a valid path
            reason = getattr(error, "strerror", None) or error
            raise OutputError(
                f"the cache {self.directory} cannot be written: {reason}; expected a directory with space; set "
                "data.cache or TAUT_CACHE, or another out"
            ) from None


def keep_only(folder: Path, names: Collection[str]) -> None:
    """Remove from a folder all but these files and folders."""
    for path in folder.iterdir():
        if path.name not in names:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def write_shard(folder: Path, entry: Entry) -> Listed:
    """Write a shard's files. Returns how a manifest lists it."""
    folder.mkdir()
    digests = {}
    for name, array in entry.arrays.items():
        path = folder / f"{name}.npy"
        with path.open("wb") as file:
            _save(file, np.asarray(array, dtype=ARRAYS.get(name, (None,))[0]))
            file.flush()
            os.fsync(file.fileno())
        digests[name] = files.digest(path)
    meta = {
        **asdict(entry.counts),
        "lengths": entry.lengths.pairs,
        "incidents": [asdict(incident) for incident in entry.incidents],
        "is_fleeting": entry.is_fleeting,
        "forms": dict(entry.forms),
        "ends": entry.ends,
        **asdict(entry.facts),
        "sha256": digests,
    }
    files.write_text(folder / "meta.json", json.dumps(meta))
    return _listed(folder)


def _save(file: IO[bytes], array: NDArray[Any]) -> None:
    """``np.save``, which loses the reason where the disk takes a part of the bytes."""
    try:
        np.save(file, array)
    except OSError as error:
        if error.errno is not None:
            raise
        raise OSError(errno.ENOSPC, f"the disk takes no more ({error} bytes)") from None


def _listed(folder: Path) -> Listed:
    """A shard on disk as its manifest lists it."""
    content = files.read_regular(folder / "meta.json", META_LIMIT)
    meta = pydantic.TypeAdapter(Meta).validate_json(content, strict=True)
    sizes = {name: (folder / f"{name}.npy").stat().st_size for name in meta["sha256"]}
    return {
        "num_rows": meta["num_rows"],
        "num_samples": meta["num_samples"],
        "num_groups": meta["num_groups"],
        "num_tokens": meta["num_tokens"],
        "num_targets": meta["num_targets"],
        "num_pictures": meta["num_pictures"],
        "meta": hashlib.sha256(content).hexdigest(),
        "sizes": sizes,
    }


def locked(folder: Path) -> int | None:
    """The descriptor of the folder's file LOCK, locked; None where another process has it, or none can be had."""
    try:
        number = os.open(
            folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
    except OSError:
        return None
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(number).st_nlink:  # else its process has just finished
            return number
    except OSError:
        pass
    os.close(number)
    return None


def _remove_old(directory: Path) -> None:
    """Remove finished shards that no process has gone on from for KEPT_SECONDS."""
    for partial in directory.glob(f"*{PARTIAL}"):
        if time.time() - partial.stat().st_mtime > KEPT_SECONDS:
            lock = locked(partial)
            if lock is not None:
                shutil.rmtree(partial, ignore_errors=True)
                os.close(lock)


def forget(directory: Path, key: str) -> None:
    """Remove an entry. A process that has it mapped keeps reading the removed files."""
    try:
        with TemporaryFolder("cache", directory) as folder:
            (directory / key).rename(folder / "old")
    except OSError as error:
        raise OutputError(
            f"the cache entry {directory / key} cannot be replaced: {error.strerror}; expected a directory that can "
            "be written; set data.cache or TAUT_CACHE"
        ) from None


def read_shard(folder: Path, listed: Listed) -> Entry:
    """A shard that ``write_shard`` wrote, after a look at each of its bytes. Raises one of FAILURES."""
    return open_entry(folder, _require_files(folder, listed))
