"""Tokenised sources: samples as flat arrays, on disk in a directory named by the hash of all that they depend on.

    <cache>/<key>/ids.npy             int32 [T]     the tokens of all samples, one after another
                  offsets.npy         int64 [S+1]   start of each sample
                  target_at.npy       int32 [N]     positions inside the sample
                  target_offsets.npy  int64 [S+1]
                  line.npy            int64 [S]     the line or record each sample comes from
                  part.npy            int32 [S]     number of the sample in its row; 0: the only one
                  meta.json           rows read, their forms, incidents, and the SHA-256 of each array

and, where a row has several samples,

                  row_offsets.npy     int64 [G+1]   start of the samples of each row that has any

and, where answers are judged,

                  value.NAME.npy      float64 [S]   a value of each sample
                  read_at.npy         int32 [R]     positions inside the sample where a scalar head is read
                  read_offsets.npy    int64 [S+1]
                  read_value.NAME.npy float64 [R]   a value of each such position

and, where there are images (M is the number of their places in samples, P that of distinct images),

                  media.offsets.npy   int64 [S+1]   start of each sample's images
                  media.at.npy        int32 [M, 2]  span of the placeholders inside the sample
                  media.grid.npy      int32 [M, 3]  zeros: numbered as text
                  media.picture.npy   int32 [M]     number of the image below
                  picture.content.npy uint8 [P, 32] SHA-256 of the encoded image
                  picture.company.npy int32 [P]     number of images in its row
                  picture.offsets.npy int64 [P+1]   start of each source
                  picture.source.npy  uint8         the paths of the files, UTF-8, one after another
                  picture.stamp.npy   int64 [P, 2]  size and time of last change of each file; -1: it does not exist
                  film.{offsets,source,stamp}.npy   the same of the videos whose frames the images are

An entry is written in a temporary folder and renamed, so it is whole or absent. When read, every array is checked
against its hash and against the arrays it points into; an entry that fails is reported and made again, never used. Does
not know how a key is made (``dataset.py``).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
from taut.types import IntArray, Media, Sample

if TYPE_CHECKING:
    from taut.vision.image_store import ImageStore

REQUIRED = ("ids", "offsets", "target_at", "target_offsets", "line", "part")
"""Arrays that every entry has."""
PLACES: dict[str, tuple[Any, tuple[int, ...]]] = {
    f"{kind}.{name}": shape
    for kind in ("picture", "film")
    for name, shape in (
        ("offsets", (np.int64, ())),
        ("source", (np.uint8, ())),
        ("stamp", (np.int64, (2,))),
    )
}
"""Arrays that locate images and do not change what they are: not part of an entry's digest."""
ARRAYS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "ids": (np.int32, ()),
    "offsets": (np.int64, ()),
    "target_at": (np.int32, ()),
    "target_offsets": (np.int64, ()),
    "line": (np.int64, ()),
    "part": (np.int32, ()),
    "row_offsets": (np.int64, ()),
    "read_at": (np.int32, ()),
    "read_offsets": (np.int64, ()),
    "media.offsets": (np.int64, ()),
    "media.at": (np.int32, (2,)),
    "media.grid": (np.int32, (3,)),
    "media.picture": (np.int32, ()),
    "picture.content": (np.uint8, (32,)),
    "picture.company": (np.int32, ()),
    **PLACES,
}
"""Arrays of an entry, without those of values: dtype, and shape without the first dimension."""
VALUE, READ_VALUE = "value.", "read_value."
"""Prefixes of the arrays of values."""
OFFSETS = {"ids": "offsets", "target_at": "target_offsets", "read_at": "read_offsets"}
"""Arrays of samples one after another -> the array of their starts."""
BLOCK = 2**16
"""Samples that are checked at a time."""
META_LIMIT = 2**29
"""Largest meta.json of an entry, in bytes: it lists every row that was left out or cut."""


@dataclass(frozen=True, eq=False)
class Entry:
    """One tokenised source."""

    arrays: Mapping[str, NDArray[Any]]
    num_rows: int
    incidents: tuple[Incident, ...]
    """Places relative to the source: ``17`` or ``17#2``."""
    is_fleeting: bool = False
    """Whether rows were left out for a reason that may not last: an image that could not be read."""
    forms: Mapping[RowForm, int] = field(default_factory=dict)
    """Number of rows of each form."""
    digest: str = ""
    """Digest of the arrays on disk: equal where the samples are, wherever their images lie."""

    def sample(self, index: int, name: str, image_store: ImageStore | None = None) -> Sample:
        """The sample number ``index``. ``image_store``: holds its images."""
        arrays = self.arrays
        start, stop = arrays["offsets"][index : index + 2]
        first, last = arrays["target_offsets"][index : index + 2]
        target_at_N = arrays["target_at"][first:last].astype(np.int64)
        values = {
            key.removeprefix(VALUE): float(array[index])
            for key, array in arrays.items()
            if key.startswith(VALUE)
        }
        read_at_R, read_values = None, {}
        if "read_at" in arrays:
            first, last = arrays["read_offsets"][index : index + 2]
            read_at_R = arrays["read_at"][first:last].astype(np.int64)
            read_values = {
                key.removeprefix(READ_VALUE): array[first:last].astype(np.float64)
                for key, array in arrays.items()
                if key.startswith(READ_VALUE)
            }
        return Sample(
            name,
            arrays["ids"][start:stop].astype(np.int64),
            target_at_N,
            np.ones(target_at_N.size),
            media=self._media(index, name, image_store),
            values=values,
            read_at_R=read_at_R,
            read_values=read_values,
        )

    def _media(self, index: int, name: str, image_store: ImageStore | None) -> tuple[Media, ...]:
        arrays = self.arrays
        if "media.offsets" not in arrays:
            return ()
        assert image_store is not None, "data with pictures were read with an image store"
        first, last = arrays["media.offsets"][index : index + 2]
        media = []
        for place in range(first, last):
            number = int(arrays["media.picture"][place])
            begin, end = arrays["picture.offsets"][number : number + 2]
            picture = image_store.picture(
                arrays["picture.source"][begin:end].tobytes().decode(),
                arrays["picture.content"][number].tobytes().hex(),
                int(arrays["picture.company"][number]),
                name,
            )
            start, stop = arrays["media.at"][place].tolist()
            t, h, w = arrays["media.grid"][place].tolist()
            two_way = image_store.processor.is_two_way
            media.append(Media(picture, start, stop, (t, h, w) if t else None, two_way))
        return tuple(media)

    @property
    def num_samples(self) -> int:
        return len(self.arrays["line"])

    @property
    def num_groups(self) -> int:
        """Rows that have samples."""
        offsets = self.arrays.get("row_offsets")
        return self.num_samples if offsets is None else len(offsets) - 1

    def row(self, index: int) -> range:
        """The samples of a row, which are neighbours. Rows without samples are not counted."""
        offsets = self.arrays.get("row_offsets")
        if offsets is None:
            return range(index, index + 1)
        return range(int(offsets[index]), int(offsets[index + 1]))

    def row_of(self, index: int) -> int:
        """The row of a sample."""
        offsets = self.arrays.get("row_offsets")
        return index if offsets is None else int(np.searchsorted(offsets, index, side="right")) - 1

    def stale_reason(self) -> str:
        """Why the entry has to be made again for the sake of its images; empty if it does not."""
        if self.is_fleeting:
            return "pictures could not be read the last time"
        for kind in ("film", "picture"):
            if f"{kind}.source" not in self.arrays:
                continue
            paths = self.arrays[f"{kind}.source"].tobytes()
            bounds = pairwise(self.arrays[f"{kind}.offsets"].tolist())
            stamps = self.arrays[f"{kind}.stamp"].tolist()
            for (start, stop), stamp in zip(bounds, stamps, strict=True):
                path = paths[start:stop].decode(errors="surrogateescape")
                if _stamp(path) != tuple(stamp):
                    return f"{Path(path).name} has changed"
        return ""


class EntryBuilder:
    """Collects the samples of a source, row by row, into the arrays of an entry."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.forms: Counter[RowForm] = Counter()
        self.incidents: list[Incident] = []
        self.films: dict[str, None] = {}
        """The files of videos, in their order."""
        self.is_fleeting = False
        self._joined: defaultdict[str, list[NDArray[Any]]] = defaultdict(list)
        self._per_sample: defaultdict[str, list[float]] = defaultdict(list)
        self._media: list[tuple[Media, ...]] = []

    @property
    def num_samples(self) -> int:
        return len(self._media)

    def add(self, number: int, place: str, samples: Sequence[Sample]) -> None:
        """Add the samples of row ``number``, whose ids are ``place`` or begin with it."""
        for sample in samples:
            self._joined["ids"].append(sample.ids_T.astype(np.int32))
            self._joined["target_at"].append(sample.target_at_N.astype(np.int32))
            self._per_sample["line"].append(number)
            self._per_sample["part"].append(int(sample.id[len(place) + 1 :] or 0))
            self._media.append(sample.media)
            for name, value in sample.values.items():
                self._per_sample[VALUE + name].append(value)
            if sample.read_at_R is not None:
                self._joined["read_at"].append(sample.read_at_R.astype(np.int32))
            for name, value_R in sample.read_values.items():
                self._joined[READ_VALUE + name].append(value_R)

    def build(self) -> Entry:
        arrays = {name: np.concatenate(pieces) for name, pieces in self._joined.items()}
        for name, offsets in OFFSETS.items():
            if name in arrays:
                arrays[offsets] = np.cumsum([0, *map(len, self._joined[name])])
        arrays |= {name: np.asarray(values) for name, values in self._per_sample.items()}
        if self.num_samples:
            starts = row_starts(arrays["line"])
            if starts.size < self.num_samples:
                arrays["row_offsets"] = np.append(starts, self.num_samples)
        arrays |= media_arrays(self._media, list(self.films))
        incidents = tuple(self.incidents)
        return Entry(arrays, self.num_rows, incidents, self.is_fleeting, self.forms)


def row_starts(line_S: IntArray) -> IntArray:
    """Start of the samples of each row."""
    return np.flatnonzero(np.diff(line_S, prepend=-1))


def media_arrays(
    media_S: Iterable[tuple[Media, ...]], films: Sequence[str] = ()
) -> dict[str, NDArray[Any]]:
    """The arrays of the samples' images; none where no sample has one. ``films``: the files of videos."""
    counts, places = [], []
    table: dict[tuple[str, str, int], int] = {}
    for media in media_S:
        counts.append(len(media))
        for image in media:
            picture = image.picture
            key = (picture.source, picture.content, picture.num_pictures)
            number = table.setdefault(key, len(table))
            places.append((image.start, image.stop, *(image.grid or (0, 0, 0)), number))
    if not places:
        return {}
    places_M = np.array(places, dtype=np.int32)
    arrays: dict[str, NDArray[Any]] = {
        "media.offsets": np.cumsum([0, *counts]),
        "media.at": places_M[:, :2],
        "media.grid": places_M[:, 2:5],
        "media.picture": places_M[:, 5],
        "picture.content": np.array([list(bytes.fromhex(content)) for _, content, _ in table], np.uint8),
        "picture.company": np.array([company for _, _, company in table], dtype=np.int32),
    }  # fmt: skip
    for kind, paths in (("picture", [source for source, _, _ in table]), ("film", films)):
        if paths:
            encoded = [path.encode(errors="surrogateescape") for path in paths]
            arrays[f"{kind}.offsets"] = np.cumsum([0, *map(len, encoded)])
            arrays[f"{kind}.source"] = np.frombuffer(b"".join(encoded), dtype=np.uint8)
            arrays[f"{kind}.stamp"] = np.array([_stamp(path) for path in paths], dtype=np.int64)
    return arrays


def _stamp(path: str) -> tuple[int, int]:
    try:
        status = Path(path).stat()
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


# -- entries on disk


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
    """The entry, memory-mapped; or None and the reason why none can be used.

    Before the first entry that a process loads, half-written ones of killed processes are removed.
    """
    clear([directory])
    entry = directory / key
    if not entry.is_dir():
        return None, "not in the cache"
    try:
        raw = files.read_json(entry / "meta.json", META_LIMIT)
        if isinstance(raw, dict) and "forms" not in raw:
            return None, "the cached entry is of an older version"
        meta = pydantic.TypeAdapter(_Meta).validate_python(raw, strict=True)
        names = [*REQUIRED, *sorted(set(meta["sha256"]) - set(REQUIRED))]
        for name in names:
            if files.digest(entry / f"{name}.npy") != meta["sha256"][name]:
                return None, f"the cached {name} is damaged"
        arrays = {name: np.load(entry / f"{name}.npy", mmap_mode="r") for name in names}
        require_sound(arrays)
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, EOFError) as error:
        if isinstance(error, pydantic.ValidationError):
            reason = first_problem(error)
        else:
            text = getattr(error, "strerror", None) or str(error)
            reason = " ".join(text.split())[:200] or type(error).__name__
        return None, f"the cached entry is damaged ({reason})"
    digests = [meta["sha256"][name] for name in names if name not in PLACES]
    digest = hashlib.sha256(json.dumps(digests).encode()).hexdigest()
    incidents = tuple(Incident(**incident) for incident in meta["incidents"])
    return Entry(
        arrays, meta["num_rows"], incidents, meta["is_fleeting"], meta["forms"], digest
    ), ""


def save(directory: Path, key: str, entry: Entry) -> None:
    """Write an entry in a temporary folder and rename it to its key. It replaces a damaged one under the same key."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFolder("cache", directory) as folder:
            fresh = folder / "new"
            fresh.mkdir()
            digests = {}
            for name, array in entry.arrays.items():
                path = fresh / f"{name}.npy"
                with path.open("wb") as file:
                    np.save(file, np.asarray(array, dtype=ARRAYS.get(name, (None,))[0]))
                    file.flush()
                    os.fsync(file.fileno())
                digests[name] = files.digest(path)
            meta = {
                "num_rows": entry.num_rows,
                "incidents": [asdict(incident) for incident in entry.incidents],
                "is_fleeting": entry.is_fleeting,
                "forms": dict(entry.forms),
                "sha256": digests,
            }
            (fresh / "meta.json").write_text(json.dumps(meta))
            try:
                fresh.rename(directory / key)
            except OSError:
                if load(directory, key)[0] is None:  # else another process wrote the same entry
                    (directory / key).rename(folder / "old")
                    fresh.rename(directory / key)
    except (OSError, ValueError) as error:  # ValueError: not a valid path
        reason = getattr(error, "strerror", None) or error
        raise OutputError(
            f"the cache {directory} cannot be written: {reason}; expected a directory with space; set data.cache or "
            "TAUT_CACHE"
        ) from None


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


# -- whether arrays are sound


def require_sound(arrays: Mapping[str, NDArray[Any]]) -> None:
    """Raise ValueError unless the arrays are those of samples: every offset and position points into its array.

    Digests do not prove that: any program may have written an entry with the digests of its arrays.
    """
    for name, array in arrays.items():
        is_value = name.startswith((VALUE, READ_VALUE))
        expected = (np.float64, ()) if is_value else ARRAYS.get(name)
        if expected is None:
            raise ValueError(f"{name} is no array of an entry")
        if not array.ndim or (array.dtype, array.shape[1:]) != expected:
            raise ValueError(f"{name} has the dtype {array.dtype} and the shape {array.shape}")
    offsets, num_samples = arrays["offsets"], len(arrays["line"])
    if len(arrays["part"]) != num_samples:
        raise ValueError(f"part has {len(arrays['part'])} entries for {num_samples} samples")
    _require_offsets(arrays, "offsets", "ids", num_samples)
    if num_samples and int(np.diff(offsets).min()) < 1:
        raise ValueError("offsets has a sample without tokens")
    if "row_offsets" in arrays:
        _require_offsets(arrays, "row_offsets", "line", None)
    starts = arrays["row_offsets"][:-1] if "row_offsets" in arrays else np.arange(num_samples)
    if not np.array_equal(starts, row_starts(arrays["line"])):
        raise ValueError("row_offsets are not where the line changes")
    _require_offsets(arrays, "target_offsets", "target_at", num_samples)
    _require_within(offsets, arrays["target_offsets"], arrays["target_at"], "target_at", first=1)
    if arrays["ids"].size and int(arrays["ids"].min()) < 0:
        raise ValueError("ids has a negative token id")
    if "read_at" in arrays or "read_offsets" in arrays:
        _require_offsets(arrays, "read_offsets", "read_at", num_samples)
        _require_within(offsets, arrays["read_offsets"], arrays["read_at"], "read_at", first=0)
    for name, values in arrays.items():
        of = "line" if name.startswith(VALUE) else "read_at"
        if name.startswith((VALUE, READ_VALUE)) and len(values) != len(arrays[of]):
            raise ValueError(f"{name} has {len(values)} entries for {len(arrays[of])} of {of}")
    for kind in ("picture", "film"):
        if f"{kind}.source" in arrays:
            _require_offsets(arrays, f"{kind}.offsets", f"{kind}.source", None)
            if len(arrays[f"{kind}.stamp"]) != len(arrays[f"{kind}.offsets"]) - 1:
                raise ValueError(f"{kind}.stamp does not have one entry for each source")
    if "media.offsets" not in arrays:
        return
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
    """Require positions that ascend inside each sample, from ``first`` on."""
    for begin in range(0, len(offsets) - 1, BLOCK):
        end = min(begin + BLOCK, len(offsets) - 1)
        counts = np.diff(bounds[begin : end + 1])
        positions = at[bounds[begin] : bounds[end]].astype(np.int64)
        sample = np.repeat(np.arange(end - begin), counts)
        lengths = np.diff(offsets[begin : end + 1])
        is_next = np.diff(sample, prepend=-1) == 0
        is_ascending = np.diff(positions, prepend=-1) > 0
        is_inside = (positions >= first) & (positions < lengths[sample])
        if not (is_inside & (is_ascending | ~is_next)).all():
            raise ValueError(f"{name} has a position outside its sample, or out of order")
