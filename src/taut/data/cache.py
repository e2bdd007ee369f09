"""Pictures of samples as flat arrays of a cache entry, and back.

    media.offsets     int64 [S+1]    where each sample's pictures begin
    media.at          int32 [M, 2]   first placeholder, and after the last, inside the sample
    media.grid        int32 [M, 3]   zeros: numbered as text
    media.picture     int32 [M]      which of the pictures below
    picture.content   uint8 [P, 32]  SHA-256 of what was encoded
    picture.company   int32 [P]      how many pictures the row has that it is in
    picture.offsets   int64 [P+1]    where each source begins
    picture.source    uint8          the sources, UTF-8, one after another
    picture.stamp     int64 [P, 2]   size of each source, and when it was last written; -1: it is not there
    film.offsets, film.source, film.stamp   the same of the videos that pictures are frames of

Here M counts places and P pictures: the same picture in many samples is kept once. An entry without pictures has none
of these. Imported by ``tokenise.py`` and ``prompt_set.py``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pydantic
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import TypedDict

from taut.config import first_problem, user_path
from taut.data.messages import RowForm
from taut.data.render import Incident
from taut.errors import OutputError
from taut.io import files
from taut.io.temporary import TemporaryFolder, clear
from taut.types import Media

if TYPE_CHECKING:
    from taut.vision.image_store import Album


def media_arrays(
    media_S: Iterable[tuple[Media, ...]], films: Sequence[str] = ()
) -> dict[str, NDArray[Any]]:
    """The arrays of samples with these pictures; none where no sample has one. ``films``: the files of videos."""
    counts, places = [], []
    table: dict[tuple[str, str, int], int] = {}
    for media in media_S:
        counts.append(len(media))
        for one in media:
            its = one.picture
            number = table.setdefault((its.source, its.content, its.num_pictures), len(table))
            places.append((one.start, one.stop, *(one.grid or (0, 0, 0)), number))
    if not places:
        return {}
    placed = np.array(places, dtype=np.int32)
    return {
        "media.offsets": np.cumsum([0, *counts]),
        "media.at": placed[:, :2],
        "media.grid": placed[:, 2:5],
        "media.picture": placed[:, 5],
        "picture.content": np.array([list(bytes.fromhex(content)) for _, content, _ in table], np.uint8),
        "picture.company": np.array([company for _, _, company in table], dtype=np.int32),
        **_files("picture", [source for source, _, _ in table]),
        **_files("film", films),
    }  # fmt: skip


def _files(kind: str, paths: Sequence[str]) -> dict[str, NDArray[Any]]:
    if not paths:
        return {}
    encoded = [path.encode(errors="surrogateescape") for path in paths]
    return {
        f"{kind}.offsets": np.cumsum([0, *map(len, encoded)]),
        f"{kind}.source": np.frombuffer(b"".join(encoded), dtype=np.uint8),
        f"{kind}.stamp": np.array([_stamp(path) for path in paths], dtype=np.int64),
    }


def changed_source(arrays: Mapping[str, NDArray[Any]]) -> str | None:
    """The first picture's or video's file that is not as it was when the arrays were made, by size and time; None: all
    are.
    """
    for kind in ("film", "picture"):
        stamps = arrays.get(f"{kind}.stamp", np.empty((0, 2)))
        for source, stamp in zip(_sources(arrays, kind), stamps.tolist(), strict=True):
            if _stamp(source) != tuple(stamp):
                return source
    return None


def _sources(arrays: Mapping[str, NDArray[Any]], kind: str) -> Iterator[str]:
    if f"{kind}.source" not in arrays:
        return
    every, offsets = arrays[f"{kind}.source"].tobytes(), arrays[f"{kind}.offsets"].tolist()
    for begin, end in pairwise(offsets):
        yield every[begin:end].decode(errors="surrogateescape")


def _stamp(source: str) -> tuple[int, int]:
    try:
        found = Path(source).stat()
    except OSError:
        return -1, -1
    return found.st_size, found.st_mtime_ns


def media_at(
    arrays: Mapping[str, NDArray[Any]], index: int, name: str, album: Album | None
) -> tuple[Media, ...]:
    """The pictures of the sample ``index``, which errors call ``name``."""
    if "media.offsets" not in arrays:
        return ()
    assert album is not None, "data with pictures were read with an album"
    first, last = arrays["media.offsets"][index : index + 2]
    found = []
    for place in range(first, last):
        number = int(arrays["media.picture"][place])
        begin, end = arrays["picture.offsets"][number : number + 2]
        picture = album.picture(
            arrays["picture.source"][begin:end].tobytes().decode(),
            arrays["picture.content"][number].tobytes().hex(),
            int(arrays["picture.company"][number]),
            name,
        )
        start, stop = arrays["media.at"][place].tolist()
        t, h, w = arrays["media.grid"][place].tolist()
        two_way = album.processor.is_two_way
        found.append(Media(picture, start, stop, (t, h, w) if t else None, two_way))
    return tuple(found)


# --------------------------------------------------------------------------------------------------
# Tokenised sources on disk: flat arrays in a directory named by the hash of all that they depend
# on.
#
#     <cache>/<key>/ids.npy             int32 [T]     the tokens of all samples, one after another
#                   offsets.npy         int64 [S+1]   where each sample begins
#                   target_at.npy       int32 [N]     positions inside the sample
#                   target_offsets.npy  int64 [S+1]
#                   line.npy            int64 [S]     the line or record each sample comes from
#                   part.npy            int32 [S]     which sample of that row; 0: the only one
#                   meta.json           rows read, their forms, incidents, and the SHA-256 of each array
#
# and, where answers are judged,
#
#                   value.NAME.npy      float64 [S]   what is said of each sample
#                   read_at.npy         int32 [R]     positions inside the sample where a scalar head is read
#                   read_offsets.npy    int64 [S+1]
#                   read_value.NAME.npy float64 [R]   what is said of each
#
# and, where there are pictures, those of ``media_arrays.py``.
#
# An entry is written in a temporary folder and renamed, so it is there whole or not at all; when read, every array
# is checked against its hash and against what it points to, and an entry that fails is reported and made anew, never
# used. Does not
# know how a key is made (``dataset.py``, which imports it).

ARRAYS = {
    "ids": np.int32,
    "offsets": np.int64,
    "target_at": np.int32,
    "target_offsets": np.int64,
    "line": np.int64,
    "part": np.int32,
}
OTHER_ARRAYS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "read_at": (np.int32, ()),
    "read_offsets": (np.int64, ()),
    "media.offsets": (np.int64, ()),
    "media.at": (np.int32, (2,)),
    "media.grid": (np.int32, (3,)),
    "media.picture": (np.int32, ()),
    "picture.content": (np.uint8, (32,)),
    "picture.company": (np.int32, ()),
    **{
        f"{kind}.{name}": shape
        for kind in ("picture", "film")
        for name, shape in (
            ("offsets", (np.int64, ())),
            ("source", (np.uint8, ())),
            ("stamp", (np.int64, (2,))),
        )
    },
}
"""Arrays that only some entries have: dtype, and shape but for the first dimension."""
BLOCK = 2**16
"""Samples that are checked at a time."""
META_LIMIT = 2**29
"""Largest meta.json of an entry, in bytes: it lists every row that was left out or cut."""
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


class _Incident(TypedDict):
    """An ``Incident``."""

    place: str
    kind: Literal["dropped", "cut"]
    reason: str
    targets_lost: int


class _Meta(TypedDict):
    """``meta.json`` of an entry."""

    num_rows: Annotated[int, Field(ge=0)]
    incidents: list[_Incident]
    is_fleeting: bool
    forms: dict[RowForm, Annotated[int, Field(ge=0)]]
    sha256: dict[Annotated[str, Field(pattern=r"^\w+(\.\w+)*$")], str]
    """Array -> the digest of its file."""


def require_sound(arrays: Mapping[str, NDArray[Any]]) -> None:
    """Raise ValueError unless the arrays are those of samples: every offset and position is within what it points to.

    Digests do not show that: an entry may have been written, and its digests noted, by anything.
    """
    for name in arrays:
        dtype, shape = _expected(name)
        found = arrays[name]
        if found.dtype != dtype or found.shape[1:] != shape or not found.ndim:
            raise ValueError(f"{name} has the dtype {found.dtype} and the shape {found.shape}")
    offsets, num_samples = arrays["offsets"], len(arrays["line"])
    if len(arrays["part"]) != num_samples:
        raise ValueError(f"part has {len(arrays['part'])} entries for {num_samples} samples")
    _require_offsets(arrays, "offsets", "ids", num_samples)
    if num_samples and int(np.diff(offsets).min()) < 1:
        raise ValueError("offsets has a sample without tokens")
    _require_offsets(arrays, "target_offsets", "target_at", num_samples)
    _require_within(offsets, arrays["target_offsets"], arrays["target_at"], "target_at", first=1)
    if arrays["ids"].size and int(arrays["ids"].min()) < 0:
        raise ValueError("ids has a negative token id")
    if "read_at" in arrays or "read_offsets" in arrays:
        _require_offsets(arrays, "read_offsets", "read_at", num_samples)
        _require_within(offsets, arrays["read_offsets"], arrays["read_at"], "read_at", first=0)
    for name, values in arrays.items():
        of = "line" if name.startswith("value.") else "read_at"
        if name.startswith(("value.", "read_value.")) and len(values) != len(arrays[of]):
            raise ValueError(f"{name} has {len(values)} entries for {len(arrays[of])} of {of}")
    for kind in ("picture", "film"):
        if f"{kind}.source" in arrays:
            _require_offsets(arrays, f"{kind}.offsets", f"{kind}.source", None)
            if len(arrays[f"{kind}.stamp"]) != len(arrays[f"{kind}.offsets"]) - 1:
                raise ValueError(f"{kind}.stamp does not have one entry for each source")
    if "media.offsets" in arrays:
        _require_media(arrays, num_samples)


def _expected(name: str) -> tuple[Any, tuple[int, ...]]:
    """The dtype of an array, and its shape but for the first dimension."""
    if name in ARRAYS:
        return ARRAYS[name], ()
    if name.startswith(("value.", "read_value.")):
        return np.float64, ()
    if name not in OTHER_ARRAYS:
        raise ValueError(f"{name} is no array of an entry")
    return OTHER_ARRAYS[name]


def _require_offsets(
    arrays: Mapping[str, NDArray[Any]], name: str, of: str, count: int | None
) -> None:
    offsets, size = arrays[name], len(arrays[of])
    if count is not None and len(offsets) != count + 1:
        raise ValueError(f"{name} has {len(offsets)} entries for {count} samples")
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != size:
        raise ValueError(f"{name} does not lead from 0 to {size}, the length of {of}")
    if len(offsets) > 1 and int(np.diff(offsets).min()) < 0:
        raise ValueError(f"{name} does not ascend")


def _require_within(
    offsets: NDArray[Any], bounds: NDArray[Any], at: NDArray[Any], name: str, *, first: int
) -> None:
    """That positions inside samples ascend, from ``first`` on, and stay inside."""
    for begin in range(0, len(offsets) - 1, BLOCK):
        end = min(begin + BLOCK, len(offsets) - 1)
        counts = np.diff(bounds[begin : end + 1])
        own = at[bounds[begin] : bounds[end]].astype(np.int64)
        sample = np.repeat(np.arange(end - begin), counts)
        lengths = np.diff(offsets[begin : end + 1])
        is_next = np.diff(sample, prepend=-1) == 0
        is_ascending = np.diff(own, prepend=-1) > 0
        if not ((own >= first) & (own < lengths[sample]) & (is_ascending | ~is_next)).all():
            raise ValueError(f"{name} has a position outside its sample, or out of order")


def _require_media(arrays: Mapping[str, NDArray[Any]], num_samples: int) -> None:
    _require_offsets(arrays, "media.offsets", "media.at", num_samples)
    num_pictures = len(arrays["picture.content"])
    sizes = {name: len(arrays[name]) for name in ("media.grid", "media.picture")}
    if set(sizes.values()) != {len(arrays["media.at"])}:
        raise ValueError(f"media.at has {len(arrays['media.at'])} entries; found {sizes}")
    if {len(arrays["picture.company"]), len(arrays["picture.offsets"]) - 1} != {num_pictures}:
        raise ValueError(f"picture.content has {num_pictures} entries, other arrays not")
    numbers, at = arrays["media.picture"], arrays["media.at"]
    lengths = np.repeat(np.diff(arrays["offsets"]), np.diff(arrays["media.offsets"]))
    is_picture = (numbers >= 0) & (numbers < num_pictures)
    is_inside = (at[:, 0] >= 0) & (at[:, 0] < at[:, 1]) & (at[:, 1] <= lengths)
    if not (is_picture & is_inside).all():
        raise ValueError("media has a picture that is not there, or a place outside its sample")


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
        read = files.read_json(entry / "meta.json", META_LIMIT)
        if isinstance(read, dict) and "forms" not in read:
            return None, "the cached entry is of an older version"
        meta = pydantic.TypeAdapter(_Meta).validate_python(read, strict=True)
        names = [*ARRAYS, *sorted(set(meta["sha256"]) - set(ARRAYS))]
        for name in names:
            if files.digest(entry / f"{name}.npy") != meta["sha256"][name]:
                return None, f"the cached {name} is damaged"
        arrays = {name: np.load(entry / f"{name}.npy", mmap_mode="r") for name in names}
        require_sound(arrays)
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, EOFError) as error:
        return None, f"the cached entry is damaged ({_reason(error)})"
    what = [meta["sha256"][name] for name in names if name not in PLACES]
    digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()
    incidents = tuple(Incident(**incident) for incident in meta["incidents"])
    return Entry(
        arrays, meta["num_rows"], incidents, meta["is_fleeting"], meta["forms"], digest
    ), ""


def _reason(error: Exception) -> str:
    if isinstance(error, pydantic.ValidationError):
        return first_problem(error)
    reason = getattr(error, "strerror", None) or str(error)
    return " ".join(reason.split())[:200] or type(error).__name__


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
            digests[name] = files.digest(path)
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
