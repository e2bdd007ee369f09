"""Parts of real samples, small enough for a check, and what a model says of them. The session and checks import it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from taut.data.dataset import Dataset
from taut.data.messages import Conversation, Row
from taut.types import IntArray, Media, Packed, Sample

BoolArray = NDArray[np.bool_]


class Words(NamedTuple):
    """What a model says of a token, for people."""

    one: str
    many: str
    unit: str


LOGPS, SCORES = Words("a log-prob", "log-probs", "nats"), Words("a score", "scores", "points")


AFTER = 8
"""Tokens that are looked at after a picture, where so many are."""
GENERATED = "what is learned is generated"
"""Why nothing is asked of the data's answers."""


def as_question(row: Row) -> Row:
    """What is asked, without the answer that the row may have."""
    if not isinstance(row, Conversation):
        return row
    messages = row.messages[:-1] if row.messages[-1]["role"] == "assistant" else row.messages
    return replace(row, messages=messages, learned=(), excluded=())


def whole(sample: Sample, most: int) -> Sample:
    """The first tokens of a sample, or those around its first picture, every one but the first a target. A scalar head
    is read where they are predicted, so that whatever is asked of the one can be asked of the other. A picture is
    whole, or not there; its placeholders are no targets.
    """
    start, stop = 0, max(2, most)
    if sample.media:
        start = max(0, sample.media[0].start - stop // 2)
        stop = max(start + stop, sample.media[0].stop + AFTER)
    ids_T, media = part(sample, start, stop)
    if ids_T.size == 1:
        ids_T = np.repeat(ids_T, 2)
    at_N = np.flatnonzero(_is_text(ids_T.size, media)[1:]) + 1
    return Sample(sample.id, ids_T, at_N, np.ones(at_N.size), media=media, read_at_R=at_N - 1)


def part(sample: Sample, start: int, stop: int) -> tuple[IntArray, tuple[Media, ...]]:
    """The ids from ``start`` to ``stop``, or a little more where that would cut a picture, and the pictures in them."""
    start, stop = _around_pictures(sample, max(0, start), stop)
    return sample.ids_T[start:stop], _media(sample, start, stop)


def backwards(sample: Sample) -> Sample:
    """The same words the other way round; pictures stay."""
    ids_T, is_text_T = sample.ids_T.copy(), text_at(sample)
    ids_T[is_text_T] = ids_T[is_text_T][::-1]
    return replace(sample, id=f"{sample.id} backwards", ids_T=ids_T)


def text_at(sample: Sample) -> BoolArray:
    """Which tokens are no part of a picture."""
    return _is_text(sample.num_tokens, sample.media)


def _is_text(num_tokens: int, media: Iterable[Media]) -> BoolArray:
    is_text_T = np.ones(num_tokens, dtype=bool)
    for one in media:
        is_text_T[one.start : one.stop] = False
    return is_text_T


def pictured(data: Dataset, most: int) -> list[int]:
    """Of the first ``most`` samples that have pictures, which they are, the shortest first."""
    found: list[int] = []
    first = 0
    for part in data.parts:
        arrays = part.entry.arrays
        if "media.offsets" in arrays:
            has_one = np.diff(arrays["media.offsets"]) > 0
            found += (np.flatnonzero(has_one)[: most - len(found)] + first).tolist()
        first += len(arrays["line"])
    return sorted(found, key=data.lengths.__getitem__)


def _around_pictures(sample: Sample, start: int, stop: int) -> tuple[int, int]:
    """The bounds of a cut, moved out of the pictures they fall into; with a token after the last."""
    for one in sample.media:
        if one.start < start < one.stop:
            start = one.start
        if one.start < stop <= one.stop:
            stop = min(one.stop + 1, sample.num_tokens)
    return start, stop


def _media(sample: Sample, start: int, stop: int) -> tuple[Media, ...]:
    """The pictures of a cut, which are in it as a whole or not at all."""
    return tuple(
        replace(one, start=one.start - start, stop=one.stop - start)
        for one in sample.media
        if start <= one.start and one.stop <= stop
    )


def ending(sample: Sample, most: int) -> Sample:
    """A sample's last tokens up to its last target, where it is longer than ``most``: with at least that target, and
    with all that is said of it. One whose steps are all before is left whole.
    """
    if sample.num_tokens <= most:
        return sample
    stop = max(int(sample.target_at_N[-1]) + 1, most)
    start, _ = _around_pictures(sample, _seen_from(sample, stop - most, stop), stop)
    kept = sample.target_at_N > start
    cut = replace(
        sample,
        ids_T=sample.ids_T[start:stop],
        target_at_N=sample.target_at_N[kept] - start,
        weight_N=sample.weight_N[kept],
        media=_media(sample, start, stop),
        streams={name: value[kept] for name, value in sample.streams.items()},
    )
    if sample.read_at_R is None:
        return cut
    is_read = (sample.read_at_R >= start) & (sample.read_at_R < stop)
    if not is_read.any():
        return sample
    values = {name: value[is_read] for name, value in sample.read_values.items()}
    return replace(cut, read_at_R=sample.read_at_R[is_read] - start, read_values=values)


def _seen_from(sample: Sample, start: int, stop: int) -> int:
    """``start``, or the beginning of the last picture before ``stop`` where that is earlier: what is said is said of
    it.
    """
    before = [one.start for one in sample.media if one.stop <= stop]
    return min(start, max(0, before[-1] - 1)) if before else start


def shortest(rows: Iterable[tuple[Sample, ...]], most: int) -> list[tuple[Sample, ...]]:
    """The shortest of rows, ``most`` tokens in all or a little more; two with pictures come before the others."""
    ordered = sorted(rows, key=num_tokens)
    pictured = [row for row in ordered if any(one.media for one in row)][:2]
    chosen: list[tuple[Sample, ...]] = []
    left = most
    for some in dict.fromkeys([*pictured, *ordered]):
        left -= num_tokens(some)
        if chosen and left < 0:
            break
        chosen.append(some)
    return chosen


def around(answers: Sequence[Sample], most: int) -> tuple[Sample, ...]:
    """Answers to one prompt, each cut to the end of the prompt and its own beginning, where all have more than ``most``
    tokens together. Left whole where too little of them would differ.
    """
    if num_tokens(answers) <= most:
        return tuple(answers)
    kept = max(2, most // (2 * len(answers)))
    cut = [_window(one, kept, kept) for one in answers]
    is_kept = len({one.ids_T.tobytes() for one in cut}) == len({a.ids_T.tobytes() for a in answers})
    return tuple(cut if is_kept else answers)


def _window(sample: Sample, before: int, after: int) -> Sample:
    """So many tokens before a sample's first target, and from it on."""
    first = int(sample.target_at_N[0])
    start = _seen_from(sample, max(0, first - before), first)
    start, stop = _around_pictures(sample, start, first + after)
    inside = sample.target_at_N < stop
    return replace(
        sample,
        ids_T=sample.ids_T[start:stop],
        target_at_N=sample.target_at_N[inside] - start,
        weight_N=sample.weight_N[inside],
        media=_media(sample, start, stop),
        streams={name: value[inside] for name, value in sample.streams.items()},
    )


def num_tokens(samples: Iterable[Sample]) -> int:
    return sum(sample.num_tokens for sample in samples)


def by_sample(packed: Packed, values: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """Values of the targets or of the reads, sample by sample. ``rows``: the sample that each belongs to."""
    return {name: values[rows == row] for row, name in enumerate(packed.sample_ids)}
