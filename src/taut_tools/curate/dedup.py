"""Find duplicates: rows that repeat an earlier one, exactly or nearly.

Exact: context, prompt and answers are equal once they are normalized (``rows.normalized``). Near: the context is equal,
and the Jaccard similarity of the sets of word n-grams is at least the threshold, of the prompts and of the answers:

    similarity(a, b) = min over the prompt and each answer of |a & b| / |a | b|

so a long prompt that many rows share makes none of them a duplicate, and neither does a common answer. MinHash
(Broder 1997) only proposes candidates: 128 minima of hashes, cut into bands; two rows with a band in common are
compared, by their sets. So each removed row has that similarity to the kept row, up to collisions of 64-bit hashes; a
duplicate is overlooked where no band is equal, which at the threshold happens to less than 1 in 1,000.

Each row is compared with the rows that were kept before it, so that the first of several duplicates stays. Memory per
row: its bands (16 to 64 of 8 bytes), a digest of 16 bytes, and the sets of rows with a common band (8 bytes an n-gram).

The sources are read twice: to sign all rows, and to compare and hand on each. rensa (MIT) computes the minima, and is
imported here only.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from taut_tools.curate.rows import (
    Content,
    RowSet,
    Verdict,
    chunks,
    content,
    normalized,
    shingles,
)
from taut_tools.curate.settings import Part

HASHES = 128
"""Minima of a signature."""
SEED = 1
MISS = 1e-3
"""Probability at which a pair exactly as similar as the threshold may be overlooked."""
CHUNK = 2048
"""Rows signed at a time."""
MOST = 100
"""Maximum kept rows that a band lists, and candidates that a row is compared with."""
DECIMALS = 4
"""Decimals of a similarity in the file of removed rows."""
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)

Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Signed:
    """Exact duplicates and common bands of all rows, from the first reading."""

    twin_N: npt.NDArray[np.int64]
    """The first of the rows that equal row i exactly, which may be i."""
    starts_N: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64]
    """Bands that row i has in common with others: groups[starts[i] : starts[i + 1]]."""


class Sets(NamedTuple):
    """The parts of a row that decide whether it is a near duplicate."""

    context: bytes
    hashes: tuple[Hashes, ...]
    """Sorted hashes of the n-grams of the prompt, and of each answer."""


class Deduplicator:
    """Finds the duplicates of a set of rows."""

    def __init__(self, rows: RowSet, on: Part, threshold: float | None, ngram: int) -> None:
        """``threshold=None`` finds exact duplicates only."""
        self.rows, self.on, self.threshold, self.ngram = rows, on, threshold, ngram
        self.num_capped = 0
        """Rows with more than MOST candidates."""

    def verdicts(self) -> Iterator[Verdict]:
        """Judge each row, in order."""
        signed = self._sign()
        places: list[str] = []
        near: dict[int, tuple[int, float]] = {}
        kept_with = defaultdict[int, list[int]](list)
        sets: dict[int, Sets] = {}
        for index, line in enumerate(self.rows.lines()):
            places.append(line.place)
            twin = int(signed.twin_N[index])
            if twin < index and twin not in near:
                yield Verdict(line, "exact", {"kept": places[twin]})
                continue
            groups = signed.groups[signed.starts_N[index] : signed.starts_N[index + 1]].tolist()
            if twin < index:
                near[index] = near[twin]
            elif groups:
                own = self._sets(line.content)
                if found := self._most_similar(own, groups, kept_with, sets):
                    near[index] = found
                else:
                    sets[index] = own
                    for group in groups:
                        if len(kept_with[group]) < MOST:
                            kept_with[group].append(index)
            if index in near:
                kept, similarity = near[index]
                details = {"kept": places[kept], "similarity": round(similarity, DECIMALS)}
                yield Verdict(line, "near", details)
            else:
                yield Verdict(line)

    def _most_similar(
        self,
        own: Sets,
        groups: Sequence[int],
        kept_with: dict[int, list[int]],
        sets: dict[int, Sets],
    ) -> tuple[int, float] | None:
        """The most similar kept row and its similarity, or None where none reaches the threshold."""
        assert self.threshold is not None
        shared = Counter(index for group in groups for index in kept_with.get(group, ()))
        self.num_capped += len(shared) > MOST
        found: tuple[int, float] | None = None
        for index, _ in shared.most_common(MOST):
            similarity = _similarity(own, sets[index])
            if similarity >= self.threshold and (found is None or similarity > found[1]):
                found = index, similarity
        return found

    # -- the first reading

    def _sign(self) -> Signed:
        first_of: dict[bytes, int] = {}
        twins: list[int] = []
        bands: list[Hashes] = []
        contents = (content(row) for _, _, row in self.rows.rows())
        for chunk in chunks(contents, CHUNK):
            compared = [self._compared(each) for each in chunk]
            for texts in compared:
                twins.append(first_of.setdefault(digest(*texts), len(twins)))
            if self.threshold is not None:
                bands.append(self._bands(compared))
        twin_N = np.array(twins, dtype=np.int64)
        return Signed(twin_N, *_groups(bands, twin_N))

    def _compared(self, each: Content) -> tuple[str, ...]:
        """The text that duplicates share exactly, then the texts that may differ a little."""
        if self.on == "prompt":
            return each.context, normalized(each.prompt)
        return each.context + each.judgment, *map(normalized, (each.prompt, *each.answers))

    def _bands(self, compared: Sequence[tuple[str, ...]]) -> Hashes:
        """Hashes of the bands and the context: [rows, bands]."""
        import rensa

        assert self.threshold is not None
        size = band_size(self.threshold)
        tokens = [
            [
                f"{number}:{gram}"  # n-grams of different texts differ
                for number, text in enumerate(texts)
                for gram in shingles(text, self.ngram)
            ]
            for _, *texts in compared
        ]
        minima = np.array(
            rensa.RMinHash.digests_from_token_sets(tokens, HASHES, SEED), dtype=np.uint64
        )
        cut = minima[:, : HASHES // size * size].reshape(len(compared), -1, size)
        contexts = np.array(
            [int.from_bytes(digest(context)[:8], "little") for context, *_ in compared],
            dtype=np.uint64,
        )
        hashed = np.repeat(contexts[:, None], cut.shape[1], axis=1)
        for at in range(size):
            hashed = (hashed ^ cut[:, :, at]) * MULTIPLIER
            hashed ^= hashed >> np.uint64(29)
        return hashed

    def _sets(self, each: Content) -> Sets:
        import rensa

        context, *texts = self._compared(each)
        grams = [[*shingles(text, self.ngram)] for text in texts]
        hashes = rensa.RMinHash.hash_token_sets(grams)
        return Sets(
            digest(context), tuple(np.unique(np.array(row, dtype=np.uint64)) for row in hashes)
        )


def band_size(threshold: float) -> int:
    """Largest number of minima in a band with which a pair at the threshold is missed with probability MISS or less."""
    sizes = range(HASHES, 1, -1)
    return next((size for size in sizes if (1 - threshold**size) ** (HASHES // size) <= MISS), 1)


def _groups(
    bands: Sequence[Hashes], twin_N: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """``Signed.starts_N`` and ``Signed.groups``, which leave out exact duplicates."""
    first = np.flatnonzero(twin_N == np.arange(twin_N.size))
    members, groups, num_groups = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
    for band in range(bands[0].shape[1] if bands else 0):
        hash_N = np.concatenate([chunk[:, band] for chunk in bands])
        _, group, count = np.unique(hash_N[first], return_inverse=True, return_counts=True)
        is_shared = count[group] > 1
        members.append(first[is_shared])
        groups.append(group[is_shared] + num_groups)
        num_groups += count.size
    member = np.concatenate(members)
    order = np.argsort(member, kind="stable")
    starts_N = np.searchsorted(member[order], np.arange(twin_N.size + 1))
    return starts_N, np.concatenate(groups)[order]


def _similarity(left: Sets, right: Sets) -> float:
    """The smallest Jaccard similarity of the texts of two rows."""
    if left.context != right.context or len(left.hashes) != len(right.hashes):
        return 0.0
    similarity = 1.0
    for a, b in zip(left.hashes, right.hashes, strict=True):
        both = np.intersect1d(a, b, assume_unique=True).size
        either = a.size + b.size - both
        similarity = min(similarity, both / either if either else 1.0)
    return similarity


def digest(*texts: str) -> bytes:
    """16 bytes that identify a sequence of texts."""
    hashed = blake2b(digest_size=16)
    for text in texts:
        encoded = text.encode("utf-8", "surrogatepass")
        hashed.update(len(encoded).to_bytes(8, "little") + encoded)
    return hashed.digest()
