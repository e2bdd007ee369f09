"""Tokenised sources on disk: flat arrays in a directory named by the hash of all that they depend
on.

    <cache>/<key>/ids.npy             int32 [T]     the tokens of all samples, one after another
                  offsets.npy         int64 [S+1]   where each sample begins
                  target_at.npy       int32 [N]     positions inside the sample
                  target_offsets.npy  int64 [S+1]
                  line.npy            int64 [S]     the line or record each sample comes from
                  part.npy            int32 [S]     which sample of that row; 0: the only one
                  meta.json           rows read, their forms, incidents, and the SHA-256 of each array

and, where answers are judged,

                  value.NAME.npy      float64 [S]   what is said of each sample
                  read_at.npy         int32 [R]     positions inside the sample where a scalar head is read
                  read_offsets.npy    int64 [S+1]
                  read_value.NAME.npy float64 [R]   what is said of each

and, where there are pictures, those of ``media_arrays.py``.

An entry is written in a temporary folder and renamed, so it is there whole or not at all; when read, every array
is checked against its hash, and an entry that fails is reported and made anew, never used. Does not
know how a key is made (``dataset.py``, which imports it).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from taut import durable
from taut.config import user_path
from taut.data.formats import RowForm
from taut.data.length import Incident
from taut.errors import OutputError
from taut.temporary import TemporaryFolder, clear

ARRAYS = {
    "ids": np.int32,
    "offsets": np.int64,
    "target_at": np.int32,
    "target_offsets": np.int64,
    "line": np.int64,
    "part": np.int32,
}
PLACES = tuple(
    f"{it}.{name}" for it in ("picture", "film") for name in ("source", "offsets", "stamp")
)
"""Where pictures are, and since when, says nothing of what they are."""


@dataclass(frozen=True, eq=False)
class Entry:
    """One tokenised source."""

    arrays: Mapping[str, NDArray[Any]]
    num_rows: int
    incidents: tuple[Incident, ...]
    """Places relative to the source: ``17`` or ``17#2``."""
    is_fleeting: bool = False
    """Whether rows were left out for a reason that may be gone the next time: a picture that could not be read."""
    forms: Mapping[RowForm, int] = field(default_factory=dict)
    """How many rows have each form."""
    digest: str = ""
    """Of the arrays as they are on the disk: equal where the samples are, wherever their pictures lie."""


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


def load(directory: Path, key: str) -> tuple[Entry | None, str]:
    """The entry, memory-mapped; or None and the reason why there is none that can be used.

    Before the first entry that a process loads, half-written ones of killed processes are removed.
    """
    clear([directory])
    entry = directory / key
    if not entry.is_dir():
        return None, "not in the cache"
    try:
        meta = json.loads((entry / "meta.json").read_text())
        if "forms" not in meta:
            return None, "the cached entry is of an older version"
        names = [*ARRAYS, *sorted(set(meta["sha256"]) - set(ARRAYS))]
        for name in names:
            if durable.digest(entry / f"{name}.npy") != meta["sha256"][name]:
                return None, f"the cached {name} is damaged"
        arrays = {name: np.load(entry / f"{name}.npy", mmap_mode="r") for name in names}
        incidents = tuple(Incident(**incident) for incident in meta["incidents"])
        what = [meta["sha256"][name] for name in names if name not in PLACES]
        digest = hashlib.sha256(json.dumps(what).encode())
        num_rows, is_fleeting = int(meta["num_rows"]), bool(meta["is_fleeting"])
        forms = dict(meta["forms"])
        return Entry(arrays, num_rows, incidents, is_fleeting, forms, digest.hexdigest()), ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, f"the cached entry is damaged ({type(error).__name__})"


def save(directory: Path, key: str, entry: Entry) -> None:
    """Write an entry; a damaged one that is there under the key is replaced."""
    with _new_entry(directory, key) as fresh:
        digests = {}
        for name, array in entry.arrays.items():
            path = fresh / f"{name}.npy"
            with path.open("wb") as file:
                np.save(file, np.asarray(array, dtype=ARRAYS.get(name)))
                file.flush()
                os.fsync(file.fileno())
            digests[name] = durable.digest(path)
        incidents = [asdict(incident) for incident in entry.incidents]
        meta = {
            "num_rows": entry.num_rows,
            "incidents": incidents,
            "is_fleeting": entry.is_fleeting,
            "forms": dict(entry.forms),
            "sha256": digests,
        }
        (fresh / "meta.json").write_text(json.dumps(meta))


def forget(directory: Path, key: str) -> None:
    """Take an entry out; whoever reads it goes on reading what it had."""
    try:
        with TemporaryFolder("cache", directory) as folder:
            (directory / key).rename(folder / "old")
    except OSError as error:
        raise OutputError(
            f"the cache entry {directory / key} cannot be made anew: {error.strerror}; expected a directory that can "
            "be written; set data.cache or TAUT_CACHE"
        ) from None


@contextmanager
def _new_entry(directory: Path, key: str) -> Iterator[Path]:
    """A directory to fill, renamed to its key at the end, and removed if anything fails."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFolder("cache", directory) as folder:
            fresh = folder / "new"
            fresh.mkdir()
            yield fresh
            try:
                fresh.rename(directory / key)
            except OSError:
                if load(directory, key)[0] is None:  # else another process was faster, and as good
                    (directory / key).rename(folder / "old")
                    fresh.rename(directory / key)
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        reason = getattr(error, "strerror", None) or error
        raise OutputError(
            f"the cache {directory} cannot be written: {reason}; expected a "
            "directory with space; "
            "set data.cache or TAUT_CACHE"
        ) from None
