"""Tokenised sources: samples as flat arrays, a few hundred megabytes of them in a shard.

    ids             int32 [T]     the tokens of all samples, one after another
    offsets         int64 [S+1]   start of each sample
    target_at       int32 [N]     positions inside the sample
    target_offsets  int64 [S+1]
    line            int64 [S]     the line or record each sample comes from
    part            int32 [S]     number of the sample in its row; 0: the only one

and, where a row has several samples,

    row_offsets     int64 [G+1]   start of the samples of each row that has any

and, where a target has another weight than 1 (of such a shard all, else none),

    target_weight   float64 [N]

and, where answers are judged,

    value.NAME      float64 [S]   a value of each sample
    read_at         int32 [R]     positions inside the sample where a scalar head is read
    read_offsets    int64 [S+1]
    read_value.NAME float64 [R]   a value of each such position

and, where there are images (M is the number of their places in samples, P that of distinct images),

    media.offsets   int64 [S+1]   start of each sample's images
    media.at        int32 [M, 2]  span of the placeholders inside the sample
    media.grid      int32 [M, 3]  zeros: numbered as text
    media.picture   int32 [M]     number of the image below
    picture.content uint8 [P, 32] SHA-256 of the encoded image
    picture.company int32 [P]     number of images in its row
    picture.offsets int64 [P+1]   start of each source
    picture.source  uint8         the paths of the files, UTF-8, one after another
    picture.stamp   int64 [P, 2]  size and time of last change of each file; -1: it does not exist
    film.{offsets,source,stamp}   the same of the videos whose frames the images are

They may be in memory or mapped from files (cache.py): ``require_sound`` says whether they are those of samples.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from taut.data.lengths import LengthCounts
from taut.data.messages import RowForm
from taut.data.render import Incident
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
        self.digest = digests[0] if len(digests) == 1 else digest_of(digests)
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


def digest_of(digests: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(digests)).encode()).hexdigest()


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
