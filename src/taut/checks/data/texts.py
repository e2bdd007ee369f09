"""The words of all rows, gone through once: equal rows, rows that are equal but for case and white space, and broken
characters.

A row is what the run reads of it: the columns that its format does not read (an id, a source) are left out, and numbers
and pictures count too. Two rows are near-duplicates where they are equal once case and white space are gone. Up to ROWS
rows of a split are read, the first of each source; findings say so where there are more. 100,000 rows of 1.4 kB take
about 2 s of one core.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from taut.checks.data.records import splits
from taut.checks.owned import owned_by
from taut.checks.session import Session
from taut.data.dataset import sources
from taut.data.schema import Columns, recognise, renamed
from taut.data.sources import open_source
from taut.errors import DataError

ROWS = 200_000
CHARACTERS = 400_000_000
"""Of a split, beyond which no further row is read."""
WHITE_SPACE = b" \t\n\r\v\f"
ALLOWED = bytes(sorted({*range(256)} - {*range(32)} - {127} | {*b"\t\n\r"}))
"""All bytes but the control characters that no text has."""
REPLACED = "\ufffd"
UNDECODED, MISREAD, CONTROLS = (
    "a character that could not be decoded",
    "a wrong encoding",
    "a control character",
)
MOJIBAKE = re.compile("\u00c3[\u0080-\u00bf]|\u00c2[\u00a0-\u00bf]|\u00e2\u20ac|\u00ef\u00bb\u00bf")
"""UTF-8 that was read as Latin-1 or Windows-1252 and written again."""
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f]")
AROUND = 15
"""Characters shown on each side of a broken one."""


class Broken(NamedTuple):
    """A row with a broken character."""

    place: str
    what: str
    """UNDECODED, MISREAD or CONTROLS."""
    excerpt: str


class Texts(NamedTuple):
    """The rows of a split."""

    places: list[str]
    """``train.jsonl:17``, as the source names it."""
    exact_S: NDArray[np.int64]
    """A hash of each row, of this process only."""
    normal_S: NDArray[np.int64]
    """The same without case and white space."""
    broken: list[Broken]
    is_whole: bool
    """Whether all rows of the split were read."""

    @property
    def looked_at(self) -> str:
        """For a finding: nothing if all rows were read."""
        return "" if self.is_whole else f"; the first {len(self.places):,} rows looked at"


@owned_by("data.rows")
def texts(session: Session) -> dict[str, Texts]:
    """The rows of train, and of eval if there is one."""
    return {split: _read(session, split) for split in splits(session)}


def _read(session: Session, split: Any) -> Texts:
    places: list[str] = []
    exact: list[int] = []
    normal: list[int] = []
    broken: list[Broken] = []
    named = sources(session.run.data, split, session.run.objective.kind)
    most, room, is_whole = ROWS // len(named), CHARACTERS, True
    for source, columns in named:
        found = open_source(source)
        for number, (line, words) in enumerate(_rows(found.attempts(), columns)):
            if number == most or room < 0:
                is_whole = False
                break
            place, joined = f"{found.path}:{line}", "\0".join(words)
            room -= len(joined)
            places.append(place)
            exact.append(hash(joined))
            folded = joined.casefold().encode("utf-8", "surrogatepass")
            normal.append(hash(folded.translate(None, WHITE_SPACE)))
            if problem := broken_in(words):
                broken.append(Broken(place, *problem))
    hashes = np.array(exact, dtype=np.int64), np.array(normal, dtype=np.int64)
    return Texts(places, *hashes, broken, is_whole)


def _rows(attempts: Iterator[tuple[int, Any]], columns: Columns) -> Iterator[tuple[int, list[str]]]:
    """The line of each record and what is read of it; records that fit no format are left to data.columns."""
    read_by: dict[tuple[str, ...], list[str]] = {}
    for line, record in attempts:
        try:
            named = renamed(record, "", columns)
            names = tuple(named)
            if names not in read_by:
                unread = recognise(record, "", columns).unread
                read_by[names] = sorted(name for name in names if name not in unread)
        except DataError:
            continue
        yield line, [word for name in read_by[names] for word in _words(named[name])]


def _words(value: Any) -> list[str]:
    """All that a value says, in its order: texts, numbers, and a hash of bytes (a picture)."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [word for inside in value.values() for word in _words(inside)]
    if isinstance(value, list | tuple):
        return [word for inside in value for word in _words(inside)]
    if isinstance(value, bytes):
        return [hashlib.blake2b(value, digest_size=8).hexdigest()]
    return [] if value is None else [str(value)]


def broken_in(words: list[str]) -> tuple[str, str] | None:
    """What is wrong with the first broken character of these texts, and the words around it; None: there is none."""
    for text in words:
        if REPLACED in text:
            at = text.index(REPLACED)
            return UNDECODED, _excerpt(text, at, at + 1)
        if text.isascii():
            if text.encode().translate(None, ALLOWED) and (match := CONTROL.search(text)):
                return CONTROLS, _excerpt(text, *match.span())
            continue
        for what, pattern in ((MISREAD, MOJIBAKE), (CONTROLS, CONTROL)):
            if match := pattern.search(text):
                return what, _excerpt(text, *match.span())
    return None


def _excerpt(text: str, start: int, stop: int) -> str:
    return text[max(0, start - AROUND) : stop + AROUND]
