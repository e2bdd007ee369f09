"""What happens to samples that are too long or too short.

    error      the first sample over max_length ends the run (the default)
    drop       it is left out
    truncate   its first max_length tokens stay, fewer where that would cut a picture: then what is
               before the picture; no end token is made up, so nothing false is learned; a sample
               left without targets is left out
    split      documents only: windows of max_length tokens, each beginning with the last token of
               the one before, so that every token but the document's first is a target exactly
               once; the end token is where the document really ends. Splitting a conversation is
               an error

Samples under min_length are left out. Whatever is left out or cut is returned as an Incident, to be
listed. Of answers that are judged ``answers.py`` decides. Imported by it and ``dataset.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from taut.data.pictures import uncut, within
from taut.errors import DataError
from taut.types import Sample

TooLong: TypeAlias = Literal["error", "drop", "split", "truncate"]


@dataclass(frozen=True, slots=True)
class Limits:
    """The length policy and what to do with rows that teach nothing."""

    max_length: int
    too_long: TooLong = "error"
    min_length: int = 0
    without_targets: Literal["error", "drop"] = "error"


@dataclass(frozen=True, slots=True)
class Incident:
    """A sample that was left out or cut."""

    place: str
    """``train.jsonl:17``, with ``#2`` for the second sample of the row."""
    kind: Literal["dropped", "cut"]
    reason: str
    targets_lost: int = 0
    """Targets of it that nobody learns."""


def fit(
    sample: Sample, limits: Limits, *, is_document: bool
) -> tuple[list[Sample], Incident | None]:
    """The sample as the policy leaves it: itself, parts of it, or nothing."""
    length = sample.num_tokens
    if not sample.num_targets:
        if limits.without_targets == "error":
            raise DataError(
                f"{sample.id}: the row has no targets; expected at least one assistant turn to "
                "learn; remove the row, "
                "or set data.without_targets=drop"
            )
        return [], Incident(sample.id, "dropped", "no targets")
    if length < limits.min_length:
        reason = f"{length} tokens, min_length {limits.min_length}"
        return [], Incident(sample.id, "dropped", reason, sample.num_targets)
    if length <= limits.max_length:
        return [sample], None
    return _shorten(sample, limits, is_document)


def _shorten(
    sample: Sample, limits: Limits, is_document: bool
) -> tuple[list[Sample], Incident | None]:
    found = f"{sample.num_tokens} tokens, max_length {limits.max_length}"
    if limits.too_long == "error":
        raise DataError(
            f"{sample.id}: {found}; expected no more; raise data.max_length, "
            "or set data.too_long to drop, truncate or (for plain text) split"
        )
    if limits.too_long == "drop":
        return [], Incident(sample.id, "dropped", found, sample.num_targets)
    if limits.too_long == "truncate":
        stop = uncut(sample.media, limits.max_length)
        if stop < limits.max_length:
            found = f"{found}, in a picture that begins at {stop}"
        return _truncate(sample, stop, found)
    if not is_document:
        raise DataError(
            f"{sample.id}: {found}; data.too_long=split is for plain text, and this is a "
            "conversation or completion; "
            "set data.too_long to drop or truncate, or raise data.max_length"
        )
    starts = range(0, sample.num_tokens - 1, limits.max_length - 1)
    windows = [
        _slice(sample, f"{sample.id}#{number}", start, start + limits.max_length)
        for number, start in enumerate(starts, start=1)
    ]
    return windows, Incident(sample.id, "cut", f"{found}, split into {len(windows)}")


def _truncate(sample: Sample, stop: int, found: str) -> tuple[list[Sample], Incident | None]:
    num_left = int((sample.target_at_N < stop).sum())
    if not num_left:
        reason = f"{found}, no target left"
        return [], Incident(sample.id, "dropped", reason, sample.num_targets)
    short = _slice(sample, sample.id, 0, stop)
    return [short], Incident(sample.id, "cut", found, sample.num_targets - num_left)


def _slice(sample: Sample, name: str, start: int, stop: int) -> Sample:
    is_inside = (sample.target_at_N > start) & (sample.target_at_N < stop)
    short = replace(
        sample,
        id=name,
        ids_T=np.ascontiguousarray(sample.ids_T[start:stop]),
        target_at_N=sample.target_at_N[is_inside] - start,
        weight_N=sample.weight_N[is_inside],
        media=within(sample.media, start, stop),
    )
    if sample.read_at_R is None:
        return short
    is_read = (sample.read_at_R >= start) & (sample.read_at_R < stop)
    read_values = {label: value_R[is_read] for label, value_R in sample.read_values.items()}
    return replace(short, read_at_R=sample.read_at_R[is_read] - start, read_values=read_values)
