"""What preference data say of their own labels: contradictions, repeats, lengths, suspected flips.

Contradictions (a pair, and the same pair with the opposite label), repeats and pairs of equal answers are exact, on
token ids, over all pairs; so are the lengths. Flips are estimated (``taut.data.flips``) on at most 10,000 distinct
pairs, sampled by the seed; that takes about two seconds of one core. Nothing here decides what a run may do: the check
does, by ``PairReport.is_many`` and ``Flips.is_alarming``.

Needs numpy only. Checks import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from taut.data.flips import Flips, PairIds, find_flips
from taut.types import IntArray

MOST_PAIRS = 10_000


class Earlier(NamedTuple):
    """A pair, and the first one that it repeats or contradicts."""

    place: str
    earlier: str


@dataclass(frozen=True, slots=True)
class Lengths:
    """How the lengths of the answers, in tokens, go with the labels."""

    num_longer: int
    """Pairs whose chosen answer is the longer one."""
    num_shorter: int
    mean_difference: float
    """Chosen minus rejected."""
    correlation: float
    """Of the difference of lengths with the label, each pair taken in both orders; 0 where no lengths differ."""

    @property
    def num_unequal(self) -> int:
        """Pairs whose answers differ in length: the trials of which ``num_longer`` are hits."""
        return self.num_longer + self.num_shorter

    @property
    def accuracy(self) -> float:
        """How often length alone tells the label of a pair whose answers differ in length, in the better direction."""
        return max(self.num_longer, self.num_shorter) / max(1, self.num_unequal)


@dataclass(frozen=True, slots=True)
class PairReport:
    """What can be said of the labels of preference data from the data alone."""

    num_pairs: int
    identical: tuple[str, ...]
    """Where chosen and rejected are the same ids; these count in nothing below."""
    repeats: tuple[Earlier, ...]
    """The same prompt and answers, with the same label, again."""
    contradictions: tuple[Earlier, ...]
    """The same prompt and answers with the opposite label."""
    lengths: Lengths
    flips: Flips

    def is_many(self, count: int) -> bool:
        """Whether so many contradictions, or pairs of equal answers, are a mistake rather than an accident."""
        return count >= 5 and count >= 0.01 * self.num_pairs


def examine_pairs(pairs: Sequence[PairIds], seed: int = 0) -> PairReport:
    """Look at the labels of ``pairs``; each pair is read at most twice."""
    first: dict[tuple[bytes, bytes, bytes], str] = {}
    identical: list[str] = []
    repeats: list[Earlier] = []
    contradictions: list[Earlier] = []
    distinct: list[int] = []
    differences: list[int] = []
    for index, pair in enumerate(pairs):
        prompt, chosen, rejected = (_digest(ids) for ids in pair[1:])
        if chosen == rejected:
            identical.append(pair.place)
            continue
        differences.append(pair.chosen.size - pair.rejected.size)
        if (prompt, rejected, chosen) in first:
            contradictions.append(Earlier(pair.place, first[prompt, rejected, chosen]))
        if (prompt, chosen, rejected) in first:
            repeats.append(Earlier(pair.place, first[prompt, chosen, rejected]))
            continue
        first[prompt, chosen, rejected] = pair.place
        distinct.append(index)
    if len(distinct) > MOST_PAIRS:
        drawn = np.random.default_rng(seed).choice(distinct, MOST_PAIRS, replace=False)
        distinct = sorted(drawn.tolist())
    return PairReport(
        len(pairs),
        tuple(identical),
        tuple(repeats),
        tuple(contradictions),
        _lengths(np.array(differences, dtype=np.int64)),
        find_flips([pairs[index] for index in distinct], seed),
    )


def _lengths(difference: IntArray) -> Lengths:
    longer, shorter = int((difference > 0).sum()), int((difference < 0).sum())
    if not longer + shorter:
        return Lengths(0, 0, 0.0, 0.0)
    mean = float(difference.mean())
    spread = float(np.sqrt(np.square(difference, dtype=np.float64).mean()))
    return Lengths(longer, shorter, mean, mean / spread)


def _digest(ids: IntArray) -> bytes:
    return blake2b(ids.tobytes(), digest_size=16).digest()
