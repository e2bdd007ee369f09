"""Tokenised sources: samples as flat arrays, on disk in a directory named by the hash of all that they depend on.

    <cache>/<key>/manifest.json       of each shard: its counts, the digest of its meta.json, the sizes of its files
                  00000/ 00001/ ...   shards: an entry each, of 256 MiB or a little more

    <shard>/      ids.npy             int32 [T]     the tokens of all samples, one after another
                  offsets.npy         int64 [S+1]   start of each sample
                  target_at.npy       int32 [N]     positions inside the sample
                  target_offsets.npy  int64 [S+1]
                  line.npy            int64 [S]     the line or record each sample comes from
                  part.npy            int32 [S]     number of the sample in its row; 0: the only one
                  meta.json           rows read, their forms, incidents, the largest id, how many samples end, and the
                                      SHA-256 of each array

and, where a row has several samples,

                  row_offsets.npy     int64 [G+1]   start of the samples of each row that has any

and, where a target has another weight than 1 (of such a shard all, else none),

                  target_weight.npy   float64 [N]

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
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, overload

import numpy as np
import pydantic
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import TypedDict

from taut.config import first_problem, user_path
from taut.data.lengths import LengthCounts
from taut.data.messages import RowForm
from taut.data.render import Incident
from taut.errors import DataError, ModelError, OutputError
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
    "target_weight": (np.float64, ()),
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


@dataclass(frozen=True)
class Counts:
    """The sizes of a shard."""

    num_rows: int
    """Rows read."""
    num_samples: int
    num_groups: int
    """Rows that have samples."""
    num_tokens: int
    num_targets: int
    num_pictures: int
    """Distinct images."""


@dataclass(frozen=True)
class Facts:
    """What a run asks of all samples of a shard before it begins, noted when the shard is written: so no shard is
    opened for it.
    """

    largest_id: int
    num_ended: int
    """Samples with a token that ends an answer among their targets."""
    values: tuple[str, ...]
    """The arrays of values of samples in which one is not 0."""


@dataclass(frozen=True, eq=False)
class Entry:
    """A shard of a tokenised source."""

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
    ends: tuple[int, ...] = ()
    """The tokens that end an answer, ascending."""

    @cached_property
    def counts(self) -> Counts:
        arrays = self.arrays
        num_samples = len(arrays["line"])
        return Counts(
            num_rows=self.num_rows,
            num_samples=num_samples,
            num_groups=len(arrays["row_offsets"]) - 1 if "row_offsets" in arrays else num_samples,
            num_tokens=len(arrays["ids"]),
            num_targets=len(arrays["target_at"]),
            num_pictures=len(arrays.get("picture.content", ())),
        )

    def sample(self, index: int, name: str, image_store: ImageStore | None = None) -> Sample:
        """The sample number ``index``. ``image_store``: holds its images."""
        arrays = self.arrays
        start, stop = arrays["offsets"][index : index + 2]
        first, last = arrays["target_offsets"][index : index + 2]
        target_at_N = arrays["target_at"][first:last].astype(np.int64)
        weights = arrays.get("target_weight")
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
            np.ones(target_at_N.size) if weights is None else np.array(weights[first:last]),
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

    @cached_property
    def lengths(self) -> LengthCounts:
        """How many samples have each number of tokens."""
        return LengthCounts.of(np.diff(self.arrays["offsets"]))

    @cached_property
    def facts(self) -> Facts:
        """What a run asks of all samples before it begins."""
        ids, arrays = self.arrays["ids"], self.arrays
        values = (name for name in arrays if name.startswith(VALUE) and arrays[name].any())
        return Facts(int(ids.max()), self._num_ended(), tuple(sorted(values)))

    def _num_ended(self) -> int:
        """How many samples have one of ``ends`` among their targets."""
        arrays, num = self.arrays, 0
        offsets, bounds = arrays["offsets"], arrays["target_offsets"]
        for first in range(0, len(offsets) - 1, BLOCK):
            last = min(first + BLOCK, len(offsets) - 1)
            starts_S, bounds_S = offsets[first:last], bounds[first : last + 1]
            left_S = np.flatnonzero(np.diff(bounds_S))
            # most answers end with such a token: the last target is looked at first
            last_at = arrays["target_at"][bounds_S[left_S + 1] - 1]
            is_hit_S = np.isin(arrays["ids"][starts_S[left_S] + last_at], self.ends)
            num += int(is_hit_S.sum())
            left_S = left_S[~is_hit_S]
            counts = np.diff(bounds_S)[left_S]
            places = np.repeat(bounds_S[left_S] - np.cumsum(counts) + counts, counts)
            at = arrays["target_at"][places + np.arange(places.size)]
            is_hit = np.isin(arrays["ids"][at + np.repeat(starts_S[left_S], counts)], self.ends)
            num += np.unique(np.repeat(left_S, counts)[is_hit]).size
        return num

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
                if file_stamp(path) != tuple(stamp):
                    return f"{Path(path).name} has changed"
        return ""


class Shards(Sequence[Entry]):
    """A tokenised source: its shards, in order. Their counts are known at once; a shard is opened when it is first
    asked for, and stays open.
    """

    def __init__(
        self,
        counts: Sequence[Counts],
        open_shard: Callable[[int], Entry],
        *,
        incidents: Sequence[Incident],
        is_fleeting: bool,
        forms: Mapping[RowForm, int],
        digests: Sequence[str],
        lengths: LengthCounts,
        facts: Sequence[Facts],
        is_remote: bool = False,
    ) -> None:
        self.counts = tuple(counts)
        self.facts = tuple(facts)
        self.is_remote = is_remote
        """Whether a shard is fetched when it is asked for; then it may be removed again, and does not stay open."""
        self.incidents = tuple(incidents)
        """Of all shards."""
        self.is_fleeting = is_fleeting
        self.forms = forms
        """Number of rows of each form, in all shards."""
        self.digest = digests[0] if len(digests) == 1 else _digest_of(digests)
        """Equal where the samples are, and the shards. That of a single shard is the shard's."""
        self.starts_K: IntArray = np.cumsum([0, *(counted.num_samples for counted in counts)])
        """The first sample of each of K shards, and one more, the end."""
        self.groups_K: IntArray = np.cumsum([0, *(counted.num_groups for counted in counts)])
        """The first row with samples of each shard, and one more, the end."""
        self.lengths = lengths
        """How many samples have each number of tokens, in all shards."""
        self._open_shard = open_shard
        self.opened: dict[int, Entry] = {}
        """Those that are open, by number."""

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> Shards:
        """Shards that are in memory."""
        return cls(
            [entry.counts for entry in entries],
            entries.__getitem__,
            incidents=[incident for entry in entries for incident in entry.incidents],
            is_fleeting=any(entry.is_fleeting for entry in entries),
            forms=sum((Counter(entry.forms) for entry in entries), Counter[RowForm]()),
            digests=[entry.digest for entry in entries],
            lengths=LengthCounts.joined(entry.lengths for entry in entries),
            facts=[entry.facts for entry in entries],
        )

    def __len__(self) -> int:
        return len(self.counts)

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...
    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        """Opened. Raises DataError where the shard is damaged."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        if self.is_remote:
            return self._open_shard(number)
        if number not in self.opened:
            self.opened[number] = self._open_shard(number)
        return self.opened[number]

    def locate(self, index: int) -> tuple[Entry, int]:
        """The shard of the sample number ``index``, and the sample's number in it."""
        number = self._shard_of(index)
        return self[number], index - int(self.starts_K[number])

    def row(self, index: int) -> range:
        """The samples of a row. Rows without samples are not counted."""
        number = int(np.searchsorted(self.groups_K, index, side="right")) - 1
        own, first = (
            self[number].row(index - int(self.groups_K[number])),
            int(self.starts_K[number]),
        )
        return range(first + own.start, first + own.stop)

    def row_of(self, index: int) -> int:
        """The row of a sample."""
        number = self._shard_of(index)
        own = self[number].row_of(index - int(self.starts_K[number]))
        return int(self.groups_K[number]) + own

    def holding(self, indices: IntArray, *, rows: bool) -> IntArray:
        """The numbers of the shards that hold these samples, or rows, each once and in the order of first use."""
        starts_K = self.groups_K if rows else self.starts_K
        number_S, first_S = np.unique(
            np.searchsorted(starts_K, indices, side="right") - 1, return_index=True
        )
        return number_S[np.argsort(first_S)]

    def _shard_of(self, index: int) -> int:
        return int(np.searchsorted(self.starts_K, index, side="right")) - 1

    @property
    def num_rows(self) -> int:
        return sum(counts.num_rows for counts in self.counts)

    @property
    def num_samples(self) -> int:
        return int(self.starts_K[-1])

    @property
    def num_groups(self) -> int:
        """Rows that have samples."""
        return sum(counts.num_groups for counts in self.counts)

    @property
    def num_tokens(self) -> int:
        return sum(counts.num_tokens for counts in self.counts)

    @property
    def num_targets(self) -> int:
        return sum(counts.num_targets for counts in self.counts)

    @property
    def num_pictures(self) -> int:
        """Distinct images of each shard."""
        return sum(counts.num_pictures for counts in self.counts)

    def stale_reason(self) -> str:
        """Why the source has to be tokenised again for the sake of its images; empty if it does not."""
        if self.is_fleeting:
            return "pictures could not be read the last time"
        if not self.num_pictures:
            return ""
        return next((reason for entry in self if (reason := entry.stale_reason())), "")


def row_starts(line_S: IntArray) -> IntArray:
    """Start of the samples of each row."""
    return np.flatnonzero(np.diff(line_S, prepend=-1))


def file_stamp(path: str) -> tuple[int, int]:
    """Size and time of last change of a file; -1: it does not exist."""
    try:
        status = Path(path).stat()
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


# -- entries on disk


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
    return _digest_of([meta["sha256"][name] for name in _names(meta) if name not in PLACES])


def _digest_of(digests: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(digests)).encode()).hexdigest()


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
    if (weights := arrays.get("target_weight")) is not None and not (
        len(weights) == len(arrays["target_at"])
        and np.isfinite(weights).all()
        and (weights > 0).all()
    ):
        raise ValueError("target_weight does not have a weight above 0 for each of target_at")
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
    """Require positions that ascend inside each sample, from ``first`` on. Of ascending ones the first and the last say
    whether all are inside.
    """
    for begin in range(0, len(offsets) - 1, BLOCK):
        end = min(begin + BLOCK, len(offsets) - 1)
        bounds_S, lengths_S = (
            bounds[begin : end + 1] - bounds[begin],
            np.diff(offsets[begin : end + 1]),
        )
        positions = np.asarray(at[bounds[begin] : bounds[end]])
        has_any_S = np.diff(bounds_S) > 0
        starts, stops = bounds_S[:-1][has_any_S], bounds_S[1:][has_any_S]
        is_ascending = positions[1:] > positions[:-1]
        is_ascending[starts[1:] - 1] = True
        is_inside = (positions[starts] >= first) & (positions[stops - 1] < lengths_S[has_any_S])
        if not (is_ascending.all() and is_inside.all()):
            raise ValueError(f"{name} has a position outside its sample, or out of order")
