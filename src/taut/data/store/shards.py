"""A shard: the samples of a source's rows as flat arrays, a few hundred megabytes of them.

    ids             int32 [T]     the tokens of all samples, one after another
    offsets         int64 [S+1]   start of each sample
    target_at       int32 [N]     positions inside the sample
    target_offsets  int64 [S+1]
    line            int64 [S]     line or record that each sample comes from
    part            int32 [S]     number of the sample in its row; 0: the only one

and, where a row has several samples,

    row_offsets     int64 [G+1]   start of the samples of each row that has any

and, where any target has another weight than 1 (then for all targets of the shard),

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
    media.picture   int32 [M]     index of the image below
    picture.content uint8 [P, 32] SHA-256 of the encoded image
    picture.company int32 [P]     number of images in its row
    picture.offsets int64 [P+1]   start of each source
    picture.source  uint8         the paths of the files, UTF-8, one after another
    picture.stamp   int64 [P, 2]  size and time of last change of each file; -1: it does not exist
    film.{offsets,source,stamp}   likewise for the videos whose frames the images are

``ShardBuilder`` makes a shard from samples, ``Shards`` is a source of several. The arrays are in memory or mapped from
files (``cache.py``); ``require_sound`` validates them. Reads and writes no file.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from taut.data.render.render import Incident
from taut.data.rows.messages import RowForm
from taut.types import IntArray, Media, Sample

if TYPE_CHECKING:
    from taut.vision.image_store import ImageStore

REQUIRED = ("ids", "offsets", "target_at", "target_offsets", "line", "part")
"""Arrays that every shard has."""
PLACES: dict[str, tuple[Any, tuple[int, ...]]] = {
    f"{kind}.{name}": shape
    for kind in ("picture", "film")
    for name, shape in (
        ("offsets", (np.int64, ())),
        ("source", (np.uint8, ())),
        ("stamp", (np.int64, (2,))),
    )
}
"""Arrays that locate images and do not change what they are: not part of a shard's digest."""
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
"""Arrays of a shard except values: dtype, and shape without the first dimension."""
VALUE, READ_VALUE = "value.", "read_value."
"""Prefixes of the arrays of values."""
OFFSETS = {"ids": "offsets", "target_at": "target_offsets", "read_at": "read_offsets"}
"""Array of the samples' parts, one after another -> the array of their starts."""
SAMPLES_AT_A_TIME = 2**16
"""Samples that are validated at a time."""
SHARD_BYTES = 2**28
"""A shard ends with the rows that bring its arrays to this size."""
MEDIA_BYTES, INCIDENT_BYTES = 64, 128
"""Bytes by which an image of a sample, and an incident, count towards the size of a shard."""
WEIGHT = "target_weight"
LENGTHS = "length."
"""Prefix of the arrays of lengths in a ShardBuilder."""


@dataclass(frozen=True)
class LengthCounts:
    """Counts of samples by their number of tokens; no array over all samples is needed."""

    pairs: tuple[tuple[int, int], ...]
    """(number of tokens, number of samples), ascending."""

    @classmethod
    def of(cls, length_S: IntArray) -> LengthCounts:
        """Count samples of these lengths."""
        sizes, counts = np.unique(length_S, return_counts=True)
        return cls(tuple(zip(sizes.tolist(), counts.tolist(), strict=True)))

    @classmethod
    def joined(cls, parts: Iterable[LengthCounts]) -> LengthCounts:
        """Add up the counts of several parts."""
        counts: Counter[int] = Counter()
        for part in parts:
            counts.update(dict(part.pairs))
        return cls(tuple(sorted(counts.items())))

    @cached_property
    def size_L(self) -> IntArray:
        """Distinct numbers of tokens."""
        return np.array([size for size, _ in self.pairs], dtype=np.int64)

    @cached_property
    def count_L(self) -> IntArray:
        """Number of samples of each size."""
        return np.array([count for _, count in self.pairs], dtype=np.int64)

    @property
    def shortest(self) -> int:
        return self.pairs[0][0]

    @property
    def longest(self) -> int:
        return self.pairs[-1][0]

    @property
    def median(self) -> int:
        """Median number of tokens, rounded down."""
        upto_L = np.cumsum(self.count_L)
        middle = [(upto_L[-1] - 1) // 2, upto_L[-1] // 2]
        return int(self.size_L[np.searchsorted(upto_L, middle, side="right")].sum()) // 2

    def num_over(self, size: float) -> int:
        """Number of samples with more than ``size`` tokens."""
        return int(self.count_L[self.size_L > size].sum())


@dataclass(frozen=True)
class Counts:
    """Sizes of a shard."""

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
class Summary:
    """Everything that a run reads of a shard before its first step. It is stored when the shard is written, so that a
    run opens no shard to get it.
    """

    counts: Counts
    lengths: LengthCounts
    largest_id: int
    num_ended: int
    """Samples with a token that ends an answer among their targets."""
    values: tuple[str, ...]
    """Arrays of sample values that are not all 0."""
    incidents: tuple[Incident, ...]
    depends_on_files: bool
    forms: Mapping[RowForm, int]
    digest: str


@dataclass(frozen=True, eq=False)
class Shard:
    """Samples of rows that follow each other in a source."""

    arrays: Mapping[str, NDArray[Any]]
    num_rows: int
    incidents: tuple[Incident, ...]
    """Places relative to the source: ``17`` or ``17#2``."""
    depends_on_files: bool = False
    """Whether rows were left out because of an image that could not be read, which may be readable later."""
    forms: Mapping[RowForm, int] = field(default_factory=dict)
    """Number of rows of each form."""
    digest: str = ""
    """Digest of the arrays on disk, without the places of images: equal for equal samples."""
    ends: tuple[int, ...] = ()
    """Tokens that end an answer, ascending."""

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
        """Build the sample at ``index``. ``image_store`` holds its images."""
        arrays = self.arrays
        start, stop = arrays["offsets"][index : index + 2]
        first, last = arrays["target_offsets"][index : index + 2]
        target_at_N = arrays["target_at"][first:last].astype(np.int64)
        weights = arrays.get("target_weight")
        weight_N = np.ones(last - first) if weights is None else np.array(weights[first:last])
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
        # Its images.
        media: list[Media] = []
        begin, end = (
            arrays["media.offsets"][index : index + 2] if "media.offsets" in arrays else (0, 0)
        )
        for place in range(begin, end):
            assert image_store is not None, "data with pictures were read with an image store"
            number = int(arrays["media.picture"][place])
            path = slice(*arrays["picture.offsets"][number : number + 2])
            picture = image_store.picture(
                arrays["picture.source"][path].tobytes().decode(),
                arrays["picture.content"][number].tobytes().hex(),
                int(arrays["picture.company"][number]),
                name,
            )
            begins, ends = arrays["media.at"][place].tolist()
            t, h, w = arrays["media.grid"][place].tolist()
            two_way = image_store.processor.is_two_way
            media.append(Media(picture, begins, ends, (t, h, w) if t else None, two_way))
        return Sample(
            name,
            arrays["ids"][start:stop].astype(np.int64),
            target_at_N,
            weight_N,
            media=tuple(media),
            values=values,
            read_at_R=read_at_R,
            read_values=read_values,
        )

    @cached_property
    def summary(self) -> Summary:
        """Counts and statistics of all samples."""
        ids, arrays = self.arrays["ids"], self.arrays
        values = (name for name in arrays if name.startswith(VALUE) and arrays[name].any())
        return Summary(
            counts=self.counts,
            lengths=LengthCounts.of(np.diff(arrays["offsets"])),
            largest_id=int(ids.max()),
            num_ended=self._num_ended(),
            values=tuple(sorted(values)),
            incidents=self.incidents,
            depends_on_files=self.depends_on_files,
            forms=self.forms,
            digest=self.digest,
        )

    def _num_ended(self) -> int:
        """Count the samples that have one of ``ends`` among their targets."""
        arrays, num = self.arrays, 0
        offsets, bounds = arrays["offsets"], arrays["target_offsets"]
        for first in range(0, len(offsets) - 1, SAMPLES_AT_A_TIME):
            last = min(first + SAMPLES_AT_A_TIME, len(offsets) - 1)
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
        """Indices of a row's samples, which are neighbors. Rows without samples are not counted."""
        offsets = self.arrays.get("row_offsets")
        if offsets is None:
            return range(index, index + 1)
        return range(int(offsets[index]), int(offsets[index + 1]))

    def row_of(self, index: int) -> int:
        """Index of a sample's row."""
        offsets = self.arrays.get("row_offsets")
        return index if offsets is None else int(np.searchsorted(offsets, index, side="right")) - 1

    def stale_reason(self) -> str:
        """Reason to tokenize the shard again because of its images; empty if there is none."""
        if self.depends_on_files:
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


class Shards(Sequence[Shard]):
    """The shards of a tokenized source, in order. A shard is opened, or fetched, when it is asked for."""

    def __init__(self, summaries: Sequence[Summary], open_shard: Callable[[int], Shard]) -> None:
        """``open_shard``: is called each time a shard is asked for."""
        self.summaries, self._open_shard = tuple(summaries), open_shard
        digests = [summary.digest for summary in summaries]
        self.digest = digests[0] if len(digests) == 1 else digest_of(digests)
        """Equal for equal samples in equal shards."""
        self.incidents = tuple(incident for it in summaries for incident in it.incidents)
        self.depends_on_files = any(summary.depends_on_files for summary in summaries)
        self.forms = sum((Counter(summary.forms) for summary in summaries), Counter[RowForm]())
        """Number of rows of each form."""
        self.lengths = LengthCounts.joined(summary.lengths for summary in summaries)
        counts = [summary.counts for summary in summaries]
        self.starts_K: IntArray = np.cumsum([0, *(counted.num_samples for counted in counts)])
        """First sample of each of K shards; the last entry is the number of samples."""
        self.groups_K: IntArray = np.cumsum([0, *(counted.num_groups for counted in counts)])
        """First row with samples of each of K shards; the last entry is the number of such rows."""
        self.num_rows = sum(counted.num_rows for counted in counts)
        self.num_samples = int(self.starts_K[-1])
        self.num_groups = int(self.groups_K[-1])
        """Rows that have samples."""
        self.num_tokens = sum(counted.num_tokens for counted in counts)
        self.num_targets = sum(counted.num_targets for counted in counts)
        self.num_pictures = sum(counted.num_pictures for counted in counts)
        """Distinct images of each shard."""

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> Shards:
        """Shards that are in memory."""
        return cls([shard.summary for shard in shards], shards.__getitem__)

    def __len__(self) -> int:
        return len(self.summaries)

    @overload
    def __getitem__(self, index: int) -> Shard: ...
    @overload
    def __getitem__(self, index: slice) -> list[Shard]: ...
    def __getitem__(self, index: int | slice) -> Shard | list[Shard]:
        """The shard, opened. Raises DataError where it is damaged."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return self._open_shard(range(len(self))[index])

    def locate(self, index: int) -> tuple[Shard, int]:
        """The shard of a sample, and the sample's index in it."""
        number = int(np.searchsorted(self.starts_K, index, side="right")) - 1
        return self[number], index - int(self.starts_K[number])

    def row(self, index: int) -> range:
        """Indices of a row's samples. Rows without samples are not counted."""
        number = int(np.searchsorted(self.groups_K, index, side="right")) - 1
        own = self[number].row(index - int(self.groups_K[number]))
        first = int(self.starts_K[number])
        return range(first + own.start, first + own.stop)

    def row_of(self, index: int) -> int:
        """Index of a sample's row."""
        number = int(np.searchsorted(self.starts_K, index, side="right")) - 1
        own = self[number].row_of(index - int(self.starts_K[number]))
        return int(self.groups_K[number]) + own

    def holding(self, indices: IntArray, *, rows: bool) -> IntArray:
        """Numbers of the shards that hold these samples, or rows, each once and in the order of first use."""
        starts_K = self.groups_K if rows else self.starts_K
        number_S, first_S = np.unique(
            np.searchsorted(starts_K, indices, side="right") - 1, return_index=True
        )
        return number_S[np.argsort(first_S)]

    def stale_reason(self) -> str:
        """Reason to tokenize the source again because of its images; empty if there is none."""
        if self.depends_on_files:
            return "pictures could not be read the last time"
        if not self.num_pictures:
            return ""
        return next((reason for shard in self if (reason := shard.stale_reason())), "")


# -- building shards


class ShardBuilder:
    """Samples of rows on their way into a shard.

    A block of rows is tokenized into a builder of its own, in this process or another; builders are joined in the order
    of their rows until the shard is full (``in_shards``).
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self.forms: Counter[RowForm] = Counter()
        self.incidents: list[Incident] = []
        self.films: dict[str, None] = {}
        """Files of videos, in order."""
        self.depends_on_files = False
        self.media: list[tuple[Media, ...]] = []
        """Images of each sample."""
        self._pieces: defaultdict[str, list[NDArray[Any]]] = defaultdict(list)
        """Array -> its parts, one for each call of ``add`` that has any; LENGTHS + array -> lengths of the samples."""
        self._num_bytes = 0

    @property
    def num_samples(self) -> int:
        return len(self.media)

    @property
    def num_bytes(self) -> int:
        """Size towards SHARD_BYTES."""
        return self._num_bytes + INCIDENT_BYTES * len(self.incidents)

    def add(self, rows: Iterable[tuple[int, str, Sequence[Sample]]]) -> None:
        """Add the samples of rows, each with its number and with its place, with which the ids of its samples begin."""
        joined, per_sample = defaultdict[str, list[Any]](list), defaultdict[str, list[float]](list)
        for number, place, samples in rows:
            for sample in samples:
                joined["ids"].append(sample.ids_T.astype(np.int32))
                joined["target_at"].append(sample.target_at_N.astype(np.int32))
                joined[WEIGHT].append(sample.weight_N)
                per_sample["line"].append(number)
                per_sample["part"].append(int(sample.id[len(place) + 1 :] or 0))
                self.media.append(sample.media)
                self._num_bytes += MEDIA_BYTES * len(sample.media)
                for name, value in sample.values.items():
                    per_sample[VALUE + name].append(value)
                if sample.read_at_R is not None:
                    joined["read_at"].append(sample.read_at_R.astype(np.int32))
                for name, value_R in sample.read_values.items():
                    joined[READ_VALUE + name].append(value_R)
        if not joined:
            return
        # Weights only where one is not 1, and lengths, of which offsets are made.
        arrays = {name: np.concatenate(pieces) for name, pieces in joined.items()}
        if (arrays[WEIGHT] == 1).all():
            del arrays[WEIGHT]
        else:
            self._fill_weights()
        for name in OFFSETS:
            if name in arrays:
                arrays[LENGTHS + name] = np.array([len(piece) for piece in joined[name]])
        arrays |= {name: np.asarray(values) for name, values in per_sample.items()}
        for name, array in arrays.items():
            self._pieces[name].append(array)
            self._num_bytes += array.nbytes

    def extend(self, other: ShardBuilder) -> None:
        """Join the rows that follow."""
        self.num_rows += other.num_rows
        self.forms.update(other.forms)
        self.incidents += other.incidents
        self.films |= other.films
        self.depends_on_files |= other.depends_on_files
        self.media += other.media
        if WEIGHT in self._pieces or WEIGHT in other._pieces:
            self._fill_weights()
            other._fill_weights()
        for name, pieces in other._pieces.items():
            self._pieces[name] += pieces
        self._num_bytes += other._num_bytes

    def _fill_weights(self) -> None:
        """Add weights of 1 for the last parts of ``target_at`` that have none."""
        if parts := self._pieces.get("target_at"):
            weights = self._pieces[WEIGHT]
            weights += [np.ones(len(at_N)) for at_N in parts[len(weights) :]]

    def build(self, ends: Sequence[int] = ()) -> Shard:
        """Build the shard; it has at least one sample. ``ends``: tokens that end an answer. The builder gives its
        arrays away one by one, so that memory never holds the shard twice.
        """
        # Join the parts of each array.
        if WEIGHT in self._pieces:
            self._fill_weights()
        arrays = {name: np.concatenate(self._pieces.pop(name)) for name in list(self._pieces)}
        # Offsets from lengths, rows from lines, and the images.
        for name, offsets in OFFSETS.items():
            if name in arrays:
                arrays[offsets] = np.concatenate([[0], np.cumsum(arrays.pop(LENGTHS + name))])
        starts, num_samples = row_starts(arrays["line"]), len(arrays["line"])
        if starts.size < num_samples:
            arrays["row_offsets"] = np.append(starts, num_samples)
        arrays |= media_arrays(self.media, list(self.films))
        return Shard(
            arrays,
            self.num_rows,
            tuple(self.incidents),
            self.depends_on_files,
            self.forms,
            ends=tuple(sorted(ends)),
        )


def in_shards(blocks: Iterable[ShardBuilder], ends: Sequence[int] = ()) -> Iterator[Shard]:
    """Join blocks of rows to shards. A shard of SHARD_BYTES or more ends before the next block that has samples; a
    block without samples goes into the shard before it. So the ends of shards depend on the rows alone.
    """
    pending: ShardBuilder | None = None
    for block in blocks:
        if pending is not None and pending.num_bytes >= SHARD_BYTES and block.num_samples:
            yield pending.build(ends)
            pending = None
        if pending is None:
            pending = block
        else:
            pending.extend(block)
    if pending is not None:
        yield pending.build(ends)


def media_arrays(
    media_S: Iterable[tuple[Media, ...]], films: Sequence[str] = ()
) -> dict[str, NDArray[Any]]:
    """Arrays of the samples' images; none where no sample has one. ``films``: files of videos."""
    # Each image once, and its places in samples.
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
    # The files that they are in.
    for kind, paths in (("picture", [source for source, _, _ in table]), ("film", films)):
        if paths:
            encoded = [path.encode(errors="surrogateescape") for path in paths]
            arrays[f"{kind}.offsets"] = np.cumsum([0, *map(len, encoded)])
            arrays[f"{kind}.source"] = np.frombuffer(b"".join(encoded), dtype=np.uint8)
            arrays[f"{kind}.stamp"] = np.array([file_stamp(path) for path in paths], dtype=np.int64)
    return arrays


def row_starts(line_S: IntArray) -> IntArray:
    """Index of each row's first sample."""
    return np.flatnonzero(np.diff(line_S, prepend=-1))


def file_stamp(path: str | Path) -> tuple[int, int]:
    """Size and time of last change of a file; -1 and -1 where it does not exist."""
    try:
        status = Path(path).stat()
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


def digest_of(digests: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(digests)).encode()).hexdigest()


# -- validation


def require_sound(arrays: Mapping[str, NDArray[Any]]) -> None:
    """Raise ValueError unless every offset and position points into its array.

    Digests do not prove it: any program may have written a shard with the digests of its arrays.
    """
    for fault in _faults(arrays):
        raise ValueError(fault)


def _faults(arrays: Mapping[str, NDArray[Any]]) -> Iterator[str]:
    """Yield what is wrong with the arrays of a shard. Each fault is looked for as if there were none before it."""
    for name, array in arrays.items():
        is_value = name.startswith((VALUE, READ_VALUE))
        expected = (np.float64, ()) if is_value else ARRAYS.get(name)
        if expected is None:
            yield f"{name} is no array of a shard"
        if not array.ndim or (array.dtype, array.shape[1:]) != expected:
            yield f"{name} has the dtype {array.dtype} and the shape {array.shape}"
    # Samples and rows.
    offsets, num_samples = arrays["offsets"], len(arrays["line"])
    if len(arrays["part"]) != num_samples:
        yield f"part has {len(arrays['part'])} entries for {num_samples} samples"
    yield from _offsets_faults(arrays, "offsets", "ids", num_samples)
    if num_samples and int(np.diff(offsets).min()) < 1:
        yield "offsets has a sample without tokens"
    if "row_offsets" in arrays:
        yield from _offsets_faults(arrays, "row_offsets", "line", None)
    starts = arrays["row_offsets"][:-1] if "row_offsets" in arrays else np.arange(num_samples)
    if not np.array_equal(starts, row_starts(arrays["line"])):
        yield "row_offsets are not where the line changes"
    # Targets, their weights, the positions where a scalar head is read, and values.
    yield from _offsets_faults(arrays, "target_offsets", "target_at", num_samples)
    yield from _within_faults(
        offsets, arrays["target_offsets"], arrays["target_at"], "target_at", first=1
    )
    if arrays["ids"].size and int(arrays["ids"].min()) < 0:
        yield "ids has a negative token id"
    if (weights := arrays.get("target_weight")) is not None and not (
        len(weights) == len(arrays["target_at"])
        and np.isfinite(weights).all()
        and (weights > 0).all()
    ):
        yield "target_weight does not have a weight above 0 for each of target_at"
    if "read_at" in arrays or "read_offsets" in arrays:
        yield from _offsets_faults(arrays, "read_offsets", "read_at", num_samples)
        yield from _within_faults(
            offsets, arrays["read_offsets"], arrays["read_at"], "read_at", first=0
        )
    for name, values in arrays.items():
        of = "line" if name.startswith(VALUE) else "read_at"
        if name.startswith((VALUE, READ_VALUE)) and len(values) != len(arrays[of]):
            yield f"{name} has {len(values)} entries for {len(arrays[of])} of {of}"
    # Images, and the files that they are in.
    for kind in ("picture", "film"):
        if f"{kind}.source" in arrays:
            yield from _offsets_faults(arrays, f"{kind}.offsets", f"{kind}.source", None)
            if len(arrays[f"{kind}.stamp"]) != len(arrays[f"{kind}.offsets"]) - 1:
                yield f"{kind}.stamp does not have one entry for each source"
    if "media.offsets" not in arrays:
        return
    yield from _offsets_faults(arrays, "media.offsets", "media.at", num_samples)
    num_pictures = len(arrays["picture.content"])
    sizes = {name: len(arrays[name]) for name in ("media.grid", "media.picture")}
    if set(sizes.values()) != {len(arrays["media.at"])}:
        yield f"media.at has {len(arrays['media.at'])} entries; found {sizes}"
    if {len(arrays["picture.company"]), len(arrays["picture.offsets"]) - 1} != {num_pictures}:
        yield f"picture.content has {num_pictures} entries, other arrays not"
    numbers, at = arrays["media.picture"], arrays["media.at"]
    lengths = np.repeat(np.diff(arrays["offsets"]), np.diff(arrays["media.offsets"]))
    is_picture = (numbers >= 0) & (numbers < num_pictures)
    is_inside = (at[:, 0] >= 0) & (at[:, 0] < at[:, 1]) & (at[:, 1] <= lengths)
    if not (is_picture & is_inside).all():
        yield "media has a picture that is not there, or a place outside its sample"


def _offsets_faults(
    arrays: Mapping[str, NDArray[Any]], name: str, of: str, count: int | None
) -> Iterator[str]:
    """Yield what is wrong with an array of offsets into another. ``count``: number of its parts, if that is known."""
    offsets, size = arrays[name], len(arrays[of])
    if count is not None and len(offsets) != count + 1:
        yield f"{name} has {len(offsets)} entries for {count} samples"
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != size:
        yield f"{name} does not lead from 0 to {size}, the length of {of}"
    if len(offsets) > 1 and int(np.diff(offsets).min()) < 0:
        yield f"{name} does not ascend"


def _within_faults(
    offsets: NDArray[Any], bounds: NDArray[Any], at: NDArray[Any], name: str, *, first: int
) -> Iterator[str]:
    """Yield a fault unless positions ascend inside each sample, from ``first`` on. Of ascending ones the first and the
    last say whether all are inside.
    """
    for begin in range(0, len(offsets) - 1, SAMPLES_AT_A_TIME):
        end = min(begin + SAMPLES_AT_A_TIME, len(offsets) - 1)
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
            yield f"{name} has a position outside its sample, or out of order"
