"""Tokenized sources on disk: shards, in a directory named by the hash of all that the samples depend on.

    <cache>/<key>/manifest.json       of each shard: its counts, the digest of its meta.json, the sizes of its files
                  00000/ 00001/ ...   shards of 256 MiB or a little more

    <shard>/      NAME.npy            an array of its samples (shards.py)
                  meta.json           its Summary, and the SHA-256 of each array

A shard is written in a temporary folder and renamed, so it is whole or absent. Shards of a source that has several wait
in ``<key>.partial``: after a kill the next process continues from them. The directory gets its name after the last one.

When a source is loaded, its files must have their sizes, and each meta.json its digest. The arrays of a shard are
compared with their hashes, and validated (``require_sound``), when it is first opened; a source with a single shard is
opened at once. A source that fails when it is loaded is reported and tokenized again; a shard that fails later is a
DataError that names it. Does not know how a key is made (``dataset.py``).

A run may have any number of shards: a process has ``MOST_OPEN_FILES`` of their files open, those of the shards that it
used last. To map a closed shard again takes a tenth of a millisecond; its bytes are verified again where a file has
another size or time than it had.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import resource
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Annotated, Any, Literal, TypeAlias, cast

import numpy as np
import pydantic
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import TypedDict

from taut.config import first_problem, user_path
from taut.data.render.render import Incident
from taut.data.rows.messages import RowForm
from taut.data.store.shards import (
    ARRAYS,
    PLACES,
    REQUIRED,
    Counts,
    LengthCounts,
    Shard,
    Shards,
    Summary,
    digest_of,
    file_stamp,
    require_sound,
)
from taut.errors import DataError, ModelError, OutputError, TautError
from taut.io import files
from taut.io.temporary import TemporaryFolder, clear

META_LIMIT = 2**29
"""Largest meta.json of a shard, in bytes: it lists every row that was left out or cut."""
MANIFEST_LIMIT = 2**28
"""Largest manifest.json, in bytes."""
MANIFEST = "manifest.json"
FORMAT = 2
"""Version of manifest.json and meta.json. Raise it when their meaning changes: older sources are tokenized again."""
PARTIAL, LOCK = ".partial", "lock"
"""Suffix of the directory of an unfinished source; the file in it that the writing process has locked."""
MOST_OPEN_FILES = 64
"""Files of shards that are open at a time. A shard has 6 to 20; one is open in any case."""
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Error numbers of a process, or a machine, that has no room for another open file or mapping."""
KEPT_SECONDS = 7 * 24 * 3600
"""Finished shards of an unfinished source are removed after this time."""

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
    """``Summary.depends_on_files``."""
    forms: dict[RowForm, Annotated[int, Field(ge=0)]]
    ends: list[int]
    largest_id: Annotated[int, Field(ge=0)]
    num_ended: Annotated[int, Field(ge=0)]
    values: list[str]
    sha256: dict[Annotated[str, Field(pattern=r"^\w+(\.\w+)*$")], str]
    """Array -> digest of its file."""


class ManifestShard(_Counts):
    """A shard in ``manifest.json``."""

    meta: str
    """The SHA-256 of its meta.json, which has those of the arrays."""
    sizes: dict[str, int]
    """Array -> bytes of its file."""


class ShardRecord(TypedDict):
    """A shard as ``taut-shards.json`` lists it (``pretokenized.py``)."""

    name: Digest
    """The SHA-256 of its meta.json."""
    meta: Meta
    sizes: dict[str, int]
    """Array -> bytes of its file: of those that its meta.json lists."""


class _Manifest(TypedDict):
    """``manifest.json`` of a source."""

    format: int
    shards: Annotated[list[ManifestShard], Field(min_length=1)]


FAILURES = (OSError, ValueError, LookupError, TypeError, ArithmeticError, EOFError)
"""Errors of files that are not those that were written."""


def default_directory() -> Path:
    """The cache directory where none is configured."""
    return directory_of(None)


def directory_of(configured: str | None) -> Path:
    """The cache directory: ``configured``, else $TAUT_CACHE, else the user's."""
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
    # The manifest, and each shard's meta.json.
    folder = directory / key
    if not folder.is_dir():
        return None, "not in the cache"
    if not (folder / MANIFEST).exists() and (folder / "meta.json").exists():
        return None, "the cached entry is of an older version"
    try:
        records = read_manifest(folder)
    except FAILURES as error:
        return None, f"the cached entry is damaged ({reason_of(error)})"
    if records is None:
        return None, "the cached entry is of another version"
    of = [ShardFiles(folder / shard_name(n), record["meta"]) for n, record in enumerate(records)]

    def opened(number: int) -> Shard:
        try:
            return of[number].open()
        except FAILURES as error:
            raise DataError(
                f"{folder / shard_name(number)}: the tokenized data are damaged ({reason_of(error)}); expected them as "
                f"they were written; remove {folder} and run again, and the data are tokenized again"
            ) from None

    # The arrays of a shard when it is first asked for; at once where there is one shard.
    shards = Shards([summary_of(record["meta"]) for record in records], opened)
    if len(shards) == 1 or shards.num_pictures:  # pictures are looked at when data are loaded
        try:
            for shard_files in of:
                shard_files.open()
        except FAILURES as error:
            return None, f"the cached entry is damaged ({reason_of(error)})"
    return shards, ""


def read_manifest(folder: Path) -> list[ShardRecord] | None:
    """The shards of a source; None where another version wrote them. Raises one of FAILURES where a file is not as it
    was written.
    """
    raw = files.read_json(folder / MANIFEST, MANIFEST_LIMIT)
    if isinstance(raw, dict) and "shards" in raw and raw.get("format", 1) != FORMAT:
        return None
    shards = pydantic.TypeAdapter(_Manifest).validate_python(raw, strict=True)["shards"]
    return [
        {
            "name": shard["meta"],
            "meta": _read_meta(folder / shard_name(number), shard),
            "sizes": shard["sizes"],
        }
        for number, shard in enumerate(shards)
    ]


def _read_meta(folder: Path, listed: ManifestShard) -> Meta:
    """The meta.json of a shard whose files are there, in their sizes."""
    content = files.read_regular(folder / "meta.json", META_LIMIT)
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
    """Raise ValueError unless ``sizes`` has the arrays of a shard, by name."""
    if not set(REQUIRED) <= set(meta["sha256"]) or set(meta["sha256"]) != set(sizes):
        raise ValueError(f"{name}/meta.json does not list the arrays of a shard")


def summary_of(meta: Meta) -> Summary:
    """The summary of a shard that is not opened."""
    digests = [meta["sha256"][name] for name in _names(meta) if name not in PLACES]
    return Summary(
        Counts(*(meta[name] for name in _Counts.__annotations__)),  # type: ignore[literal-required]
        LengthCounts(tuple(meta["lengths"])),
        meta["largest_id"],
        meta["num_ended"],
        tuple(meta["values"]),
        tuple(Incident(**incident) for incident in meta["incidents"]),
        meta["is_fleeting"],
        meta["forms"],
        digest_of(digests),
    )


def _names(meta: Meta) -> list[str]:
    """The arrays of a shard, in the order of its digest."""
    return [*REQUIRED, *sorted(set(meta["sha256"]) - set(REQUIRED))]


def open_shard(folder: Path, meta: Meta) -> Shard:
    """Verify each byte of a shard, and map it into memory. Raises one of FAILURES."""
    for name, expected in meta["sha256"].items():
        if files.digest(folder / f"{name}.npy") != expected:
            raise ValueError(f"{folder.name}/{name}.npy is not as it was written")
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _names(meta)}
    require_sound(arrays)
    noted = summary_of(meta)
    shard = Shard(
        arrays,
        meta["num_rows"],
        noted.incidents,
        noted.depends_on_files,
        noted.forms,
        noted.digest,
        tuple(meta["ends"]),
    )
    if shard.summary != noted:
        raise ValueError(f"{folder.name}/meta.json has other counts than the arrays")
    return shard


class ShardFiles:
    """A shard on disk: verified when it is first opened, and mapped while it is one of those used last."""

    def __init__(self, folder: Path, meta: Meta) -> None:
        self.folder, self.meta = folder, meta
        self._verified: Shard | None = None
        """The shard without its arrays; None: it was never opened."""
        self._layout: dict[str, tuple[Any, ...]] = {}
        """Of each array the stamp of its file, its dtype, shape, offset and strides."""

    def open(self) -> Shard:
        """Raises one of FAILURES."""
        if (shard := _open.pop(self, None)) is None:
            room = MOST_OPEN_FILES - len(self.meta["sha256"])
            for used_before in [*_open]:  # a copy: another thread may open shards too
                if sum(len(other.arrays) for other in [*_open.values()]) > room:
                    used_before.close()
            shard = self._mapped_again() or self._verify()
        _open[self] = shard
        return shard

    def close(self) -> None:
        """Close its files, once nobody reads them any more."""
        _open.pop(self, None)

    def _verify(self) -> Shard:
        stamps = {name: file_stamp(self.folder / f"{name}.npy") for name in _names(self.meta)}
        shard = open_shard(self.folder, self.meta)
        arrays: Mapping[str, Any] = shard.arrays
        for name, it in arrays.items():
            self._layout[name] = stamps[name], it.dtype, it.shape, it.offset, it.strides
        self._verified = replace(shard, arrays={})
        return shard

    def _mapped_again(self) -> Shard | None:
        """The shard that was verified; None where there is none, or a file has changed. By what is known of the arrays:
        ``np.load`` takes seven times as long.
        """
        arrays = {}
        for name, (stamp, dtype, shape, offset, strides) in self._layout.items():
            path = self.folder / f"{name}.npy"
            if file_stamp(path) != stamp:
                return None
            with files.open_regular(path) as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            arrays[name] = np.ndarray(shape, dtype, content, offset, strides)
        return self._verified and replace(self._verified, arrays=arrays)


_open: dict[ShardFiles, Shard] = {}
"""Open shards; the one that was used last is the last."""


def read_shard(folder: Path, listed: ManifestShard) -> Shard:
    """Verify and map a shard that ``write_shard`` wrote. Raises one of FAILURES."""
    return open_shard(folder, _read_meta(folder, listed))


def reason_of(error: Exception) -> str:
    """What is wrong with files. Raises TautError where it is not the files: this process can open no other."""
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        num_own = sum(len(shard.arrays) for shard in [*_open.values()])
        raise TautError(
            f"{error.filename or 'a file'} cannot be opened ({error.strerror}): a process may have {most:,} files open "
            f"here (ulimit -n), and this one has {num_own} of shards beside its others; expected room for one more; "
            "the data are sound: raise the limit (ulimit -n 65536), and run again"
        ) from None
    if isinstance(error, pydantic.ValidationError):
        return first_problem(error)
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(text.split())[:200] or type(error).__name__


def shard_name(number: int) -> str:
    return f"{number:05d}"


def save(directory: Path, key: str, shards_from: Callable[[int], Iterator[Shard]]) -> int:
    """Write a source, shard by shard, and give it its name. It replaces a damaged one of the same name.

    ``shards_from(n)`` makes the shards of all rows after the first n, which an interrupted process has finished. An
    error of the data, or of the template, removes the finished shards; after any other end they stay. Returns n.
    """
    writer = ShardWriter(directory, key)
    try:
        num_finished = writer.num_rows
        for shard in shards_from(num_finished):
            writer.add(shard)
            del shard  # while the next one is made
        writer.finish()
        return num_finished
    except (DataError, ModelError):
        writer.forget()
        raise
    finally:
        writer.close()


class ShardWriter:
    """Writes the shards of one source. The first stays in a temporary folder until there is a second: a small source
    leaves nothing behind when its process is killed.
    """

    def __init__(self, directory: Path, key: str) -> None:
        self.directory, self.target = directory, directory / key
        self.partial = directory / f"{key}{PARTIAL}"
        self.listed: list[ManifestShard] = []
        """Finished shards."""
        self.temporary: TemporaryFolder | None = None
        self.lock: int | None = None
        """Descriptor of the locked file in ``partial``, if this process writes there."""
        with self._as_output_error():
            # Take over the shards that an interrupted process finished, up to the first that is damaged.
            if self.partial.is_dir() and self._lock():
                (self.partial / MANIFEST).unlink(missing_ok=True)
                for number in range(len(list(self.partial.iterdir())) - 1):
                    folder = self.partial / shard_name(number)
                    try:
                        listed = _listed(folder)
                        if read_shard(folder, listed).stale_reason():
                            break
                    except FAILURES as error:
                        reason_of(error)
                        break
                    self.listed.append(listed)
                self._empty()

    @property
    def num_rows(self) -> int:
        """Rows whose samples are in finished shards."""
        return sum(shard["num_rows"] for shard in self.listed)

    def add(self, shard: Shard) -> None:
        with self._as_output_error():
            # Write the shard in a temporary folder.
            fresh = self._fresh()
            name = shard_name(len(self.listed))
            self.listed.append(write_shard(fresh / name, shard))
            # From the second shard on, keep finished ones for a process that continues after a kill.
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
        """A new folder for shards."""
        fresh = self._temporary() / "new"
        fresh.mkdir(exist_ok=True)
        return fresh

    def _lock(self) -> bool:
        """Lock the directory of finished shards; not where another process has, or the file system has no locks."""
        self.lock = locked(self.partial)
        return self.lock is not None

    def _empty(self) -> None:
        """Remove what is not one of the shards taken over."""
        kept = {LOCK, *(shard_name(number) for number in range(len(self.listed)))}
        keep_only(self.partial, kept)

    @contextmanager
    def _as_output_error(self) -> Iterator[None]:
        try:
            yield
        except TautError:  # it is a ValueError
            raise
        except (OSError, ValueError) as error:  # ValueError: not a valid path
            raise OutputError(
                f"the cache {self.directory} cannot be written: {reason_of(error)}; expected a directory with space; "
                "set data.cache or TAUT_CACHE, or another out"
            ) from None


def keep_only(folder: Path, names: Collection[str]) -> None:
    """Remove from a folder all but these files and folders."""
    for path in folder.iterdir():
        if path.name not in names:
            files.remove(path)


def write_shard(folder: Path, shard: Shard) -> ManifestShard:
    """Write a shard's files. Returns how a manifest lists it."""
    folder.mkdir()
    digests = {}
    for name, array in shard.arrays.items():
        path = folder / f"{name}.npy"
        with path.open("wb") as file:
            _save(file, np.asarray(array, dtype=ARRAYS.get(name, (None,))[0]))
            file.flush()
            os.fsync(file.fileno())
        digests[name] = files.digest(path)
    noted = shard.summary
    meta = {
        **asdict(noted.counts),
        "lengths": noted.lengths.pairs,
        "incidents": [asdict(incident) for incident in noted.incidents],
        "is_fleeting": noted.depends_on_files,
        "forms": dict(noted.forms),
        "ends": shard.ends,
        "largest_id": noted.largest_id,
        "num_ended": noted.num_ended,
        "values": noted.values,
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


def _listed(folder: Path) -> ManifestShard:
    """A shard on disk as its manifest lists it."""
    content = files.read_regular(folder / "meta.json", META_LIMIT)
    meta = pydantic.TypeAdapter(Meta).validate_json(content, strict=True)
    sizes = {name: (folder / f"{name}.npy").stat().st_size for name in meta["sha256"]}
    counts = {key: value for key, value in meta.items() if key in _Counts.__annotations__}
    digest = hashlib.sha256(content).hexdigest()
    return cast(ManifestShard, {**counts, "meta": digest, "sizes": sizes})


def locked(folder: Path) -> int | None:
    """The descriptor of the folder's file LOCK, locked; None where another process has it, none can be had, or the
    folder is a link, whose contents are not the cache's.
    """
    if folder.is_symlink():
        return None
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
    """Remove unfinished sources that no process has written to for KEPT_SECONDS."""
    for partial in directory.glob(f"*{PARTIAL}"):
        if time.time() - partial.stat().st_mtime > KEPT_SECONDS:
            lock = locked(partial)
            if lock is not None:
                shutil.rmtree(partial, ignore_errors=True)
                os.close(lock)


def remove(directory: Path, key: str) -> None:
    """Remove a source. A process that has it mapped keeps reading the removed files."""
    try:
        with TemporaryFolder("cache", directory) as folder:
            (directory / key).rename(folder / "old")
    except OSError as error:
        raise OutputError(
            f"the cache entry {directory / key} cannot be replaced: {error.strerror}; expected a directory that can "
            "be written; set data.cache or TAUT_CACHE"
        ) from None
