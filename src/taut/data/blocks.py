"""Samples of rows on their way into shards: a block is tokenised at once, and blocks are joined until a shard is full.

Where shards end follows from the rows alone: a block's rows do not depend on who tokenised it. A row's samples are in
one shard, and every shard has samples. Reads and writes no file.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from taut.data.entries import OFFSETS, READ_VALUE, VALUE, Entry, file_stamp, row_starts
from taut.data.messages import RowForm
from taut.data.render import Incident
from taut.types import Media, Sample

SHARD_BYTES = 2**28
"""A shard ends with the block of rows that brings its arrays to this size."""
MEDIA_BYTES, INCIDENT_BYTES = 64, 128
"""What an image of a sample, and an incident, count towards the size of a shard."""
WEIGHT = "target_weight"
"""The array of weights, of blocks and entries in which one is not 1."""
LENGTHS = "length."
"""Prefix, in a block, of the arrays of lengths."""


@dataclass(frozen=True)
class Block:
    """The samples of rows that follow each other, on their way into a shard."""

    arrays: dict[str, NDArray[Any]]
    """As in an entry, with the length of each sample's part (``LENGTHS``) in place of offsets, without images."""
    media: Sequence[tuple[Media, ...]]
    """The images of each sample."""
    num_rows: int
    incidents: Sequence[Incident]
    is_fleeting: bool
    forms: Mapping[RowForm, int]
    films: Sequence[str]

    @property
    def num_bytes(self) -> int:
        arrays = sum(array.nbytes for array in self.arrays.values())
        return (
            arrays + MEDIA_BYTES * sum(map(len, self.media)) + INCIDENT_BYTES * len(self.incidents)
        )


class BlockBuilder:
    """Collects the samples of a block, row by row."""

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

    def add(self, number: int, place: str, samples: Sequence[Sample]) -> None:
        """Add the samples of row ``number``, whose ids are ``place`` or begin with it."""
        for sample in samples:
            self._joined["ids"].append(sample.ids_T.astype(np.int32))
            self._joined["target_at"].append(sample.target_at_N.astype(np.int32))
            self._joined[WEIGHT].append(sample.weight_N)
            self._per_sample["line"].append(number)
            self._per_sample["part"].append(int(sample.id[len(place) + 1 :] or 0))
            self._media.append(sample.media)
            for name, value in sample.values.items():
                self._per_sample[VALUE + name].append(value)
            if sample.read_at_R is not None:
                self._joined["read_at"].append(sample.read_at_R.astype(np.int32))
            for name, value_R in sample.read_values.items():
                self._joined[READ_VALUE + name].append(value_R)

    def build(self) -> Block:
        arrays = {name: np.concatenate(pieces) for name, pieces in self._joined.items()}
        for name in OFFSETS:
            if name in arrays:
                arrays[LENGTHS + name] = np.array([len(piece) for piece in self._joined[name]])
        arrays |= {name: np.asarray(values) for name, values in self._per_sample.items()}
        if WEIGHT in arrays and (arrays[WEIGHT] == 1).all():
            del arrays[WEIGHT]
        media, films = tuple(self._media), tuple(self.films)
        incidents = tuple(self.incidents)
        return Block(
            arrays, media, self.num_rows, incidents, self.is_fleeting, dict(self.forms), films
        )


def joined(blocks: Sequence[Block], ends: Sequence[int] = ()) -> Entry:
    """The entry of blocks that follow each other; one of them has samples. ``ends``: the tokens that end an answer.

    The arrays are taken out of the blocks, one after another, so that a shard is not held twice.
    """
    names = dict.fromkeys(name for block in blocks for name in block.arrays)
    if WEIGHT in names:
        for block in blocks:
            if "target_at" in block.arrays:
                block.arrays.setdefault(WEIGHT, np.ones(len(block.arrays["target_at"])))
    found = {
        name: np.concatenate([block.arrays.pop(name) for block in blocks if name in block.arrays])
        for name in names
    }
    arrays = {name: array for name, array in found.items() if not name.startswith(LENGTHS)}
    for name, offsets in OFFSETS.items():
        if name in arrays:
            arrays[offsets] = np.concatenate([[0], np.cumsum(found[LENGTHS + name])])
    starts, num_samples = row_starts(arrays["line"]), len(arrays["line"])
    if starts.size < num_samples:
        arrays["row_offsets"] = np.append(starts, num_samples)
    films = dict.fromkeys(film for block in blocks for film in block.films)
    media_S = (media for block in blocks for media in block.media)
    arrays |= media_arrays(media_S, list(films))
    return Entry(
        arrays,
        sum(block.num_rows for block in blocks),
        tuple(incident for block in blocks for incident in block.incidents),
        any(block.is_fleeting for block in blocks),
        sum((Counter(block.forms) for block in blocks), Counter[RowForm]()),
        ends=tuple(sorted(ends)),
    )


def in_shards(blocks: Iterable[Block], ends: Sequence[int] = ()) -> Iterator[Entry]:
    """The entries of all blocks. One ends before the first block with samples after ``SHARD_BYTES``; what has none goes
    with the samples before it. ``ends``: the tokens that end an answer.
    """
    pending: list[Block] = []
    size = 0
    for block in blocks:
        if size >= SHARD_BYTES and block.media:
            yield joined(pending, ends)
            pending, size = [], 0
        pending.append(block)
        size += block.num_bytes
    if pending:
        yield joined(pending, ends)


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
            arrays[f"{kind}.stamp"] = np.array([file_stamp(path) for path in paths], dtype=np.int64)
    return arrays
