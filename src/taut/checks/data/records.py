"""What the checks of data look at: records as the files have them, rows as they are read, samples in flat arrays.

A bounded part of each, since looking must not take longer than a moment: the first records of each source, and
samples spread evenly over a split. Findings say how many were looked at. Imported by this group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from taut.checks.data.seen import Hashes, seen_in
from taut.checks.owned import owned_by
from taut.checks.session import Session
from taut.config import home_path
from taut.data.dataset import Dataset, sources
from taut.data.messages import Completion, Conversation, Row, text_of
from taut.data.prompts import PromptSet
from taut.data.schema import Columns, best_row, read_any
from taut.data.sources import open_source
from taut.errors import DataError
from taut.types import IntArray

RECORDS = 2000
"""Records of a split that are looked at, the first of each source."""
SAMPLES = 20_000
TOKENS = 1_000_000
"""Samples of a split, and their tokens, that are looked at."""


class Record(NamedTuple):
    """A row as its file has it."""

    split: str
    source: str
    place: str
    value: Any
    columns: Columns
    folder: Path
    """Where its file is."""


def words_in(value: Any) -> list[str]:
    """All texts in a value, however deep."""
    if isinstance(value, str):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in inside for text in words_in(item)]


@owned_by("data.rows")
def records(session: Session) -> list[Record]:
    """The first records of each source of both splits; those that are no records are left to data.rows."""
    return [record for split in splits(session) for record in _of_split(session, split)]


def splits(session: Session) -> list[Any]:
    """train, and eval where there is one."""
    return ["train", "eval"] if session.run.data.eval else ["train"]


def _of_split(session: Session, split: Any) -> Iterator[Record]:
    named = sources(session.run.data, split, session.run.objective.kind)
    for source, columns in named:
        found = open_source(source)
        folder = home_path(source.path).parent
        for number, value in islice(found.attempts(), RECORDS // len(named) + 1):
            if not isinstance(value, DataError):
                place = f"{found.path}:{number}"
                yield Record(split, found.path, place, value, columns, folder)


def rows(session: Session) -> list[Row]:
    """The records of the training data, as rows, where answers are judged the best of each; those that cannot be read
    are left to data.rows.
    """
    return [
        row
        for record in session.once(records)
        if record.split == "train" and (row := _row(record)) is not None
    ]


def _row(record: Record) -> Row | None:
    try:
        return best_row(read_any(record.value, record.place, record.columns))
    except DataError:
        return None


class Exchange(NamedTuple):
    """A prompt and the answer that is learned."""

    place: str
    prompt: str
    """What was said before the answer, without what a template writes around it."""
    answer: str


def exchanges(session: Session) -> list[Exchange]:
    """Prompts and answers of the training data; a conversation's last learned turn, or what a prompt's answer is held
    to. Documents have none.
    """
    found = []
    if isinstance(session.train, PromptSet):
        for asked in session.train.asked:
            messages = [] if isinstance(asked.prompt, str) else asked.prompt
            said = "\n".join(text_of(message["content"]) for message in messages) or str(
                asked.prompt
            )
            found += [Exchange(asked.place, said, answer) for answer in asked.references[:1]]
        return found
    for row in session.once(rows):
        if isinstance(row, Completion):
            found.append(Exchange(row.place, row.prompt, row.completion))
        elif isinstance(row, Conversation) and row.learned:
            last = row.learned[-1]
            said = "\n".join(text_of(message["content"]) for message in row.messages[:last])
            found.append(Exchange(row.place, said, text_of(row.messages[last]["content"])))
    return found


class Flat(NamedTuple):
    """Samples of a split, one after another."""

    data: Dataset
    index_S: IntArray
    """Which samples of the split."""
    ids_T: NDArray[np.int32]
    start_S: IntArray
    """Where each begins; one more, the end."""
    is_target_T: NDArray[np.bool_]
    seen_T: Hashes
    """Each token with the pictures before it, for telling samples apart."""

    @property
    def sample_T(self) -> IntArray:
        """The number, in here, of the sample that each token belongs to."""
        return np.repeat(np.arange(self.index_S.size), np.diff(self.start_S))

    @property
    def looked_at(self) -> str:
        """For a finding: nothing where it is all of them."""
        if self.index_S.size == len(self.data):
            return ""
        return f"; {self.index_S.size:,} of {len(self.data):,} samples looked at"

    def name(self, number: int) -> str:
        return self.data.sample_id(int(self.index_S[number]))


def flat_train(session: Session) -> Flat:
    """Samples of the training data."""
    return flat(session.train)


def flat(data: Dataset, tokens: int = TOKENS, samples: int = SAMPLES) -> Flat:
    """Samples spread evenly, at most so many, and about so many tokens."""
    share = tokens / int(data.lengths.sum())
    most = min(len(data), samples, max(1, int(share * len(data))))
    index_S = np.unique(np.linspace(0, len(data) - 1, most).astype(np.int64))
    first, ids, seen, targets = 0, [], [], []
    for part in data.parts:
        arrays = part.entry.arrays
        num_samples = len(arrays["line"])
        chosen = index_S[(index_S >= first) & (index_S < first + num_samples)] - first
        first += num_samples
        starts, lengths = _bounds(arrays["offsets"], chosen)
        places = spread(starts, lengths)
        ids.append(np.asarray(arrays["ids"][places]))
        seen.append(_seen(arrays, chosen, ids[-1], np.cumsum(lengths)))
        is_target = np.zeros(places.size, dtype=bool)
        bounds, counts = _bounds(arrays["target_offsets"], chosen)
        at = arrays["target_at"][spread(bounds, counts)]
        own_starts = np.cumsum(lengths) - lengths
        is_target[at + np.repeat(own_starts, counts)] = True
        targets.append(is_target)
    start_S = np.concatenate([[0], np.cumsum(data.lengths[index_S])])
    is_target_T, seen_T = np.concatenate(targets), np.concatenate(seen)
    return Flat(data, index_S, np.concatenate(ids), start_S, is_target_T, seen_T)


def _seen(
    arrays: Mapping[str, NDArray[Any]], chosen: IntArray, ids_T: NDArray[Any], stops: IntArray
) -> Hashes:
    """The chosen samples' tokens with the pictures before them."""
    if "media.offsets" not in arrays:
        return ids_T.astype(np.uint64)
    pairs = zip(chosen.tolist(), np.split(ids_T, stops[:-1]), strict=True)
    return np.concatenate([seen_in(arrays, index, own_T) for index, own_T in pairs])


def _bounds(offsets: IntArray, chosen: IntArray) -> tuple[IntArray, IntArray]:
    starts = np.asarray(offsets[chosen])
    return starts, np.asarray(offsets[chosen + 1]) - starts


def spread(starts: IntArray, lengths: IntArray) -> IntArray:
    """The places of ranges, one after another."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
