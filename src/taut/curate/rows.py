"""The rows of a data set as the tools of ``taut data`` compare them, and as they write them: unchanged.

Each source is read as training reads it (``taut.data``): its kind of row is recognised by its first one. ``Line`` is a
row as it stands in its file; ``Content`` is what it says:

    context     system messages, tools and pictures: rows that differ in it are different rows
    prompt      the turns before the answer
    answers     the last answer; of a row that compares answers, each of them
    judgement   which answer is the better one, or how good each is

Texts are compared as ``normalised``: NFKC, without case, and with one space for any white space.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeAlias

from taut.data.json_io import read_json
from taut.data.messages import Completion, Conversation, Document, Message, images_of, text_of
from taut.data.render import answers_of
from taut.data.schema import (
    Answers,
    AnyRow,
    Columns,
    Kind,
    OtherKindError,
    Stepwise,
    best_row,
    read_any,
    recognise,
)
from taut.data.sources import Opened, Source, open_source
from taut.errors import DataError

Part: TypeAlias = Literal["row", "prompt"]
"""What of a row is compared."""


class Content(NamedTuple):
    """What a row says."""

    context: str
    prompt: str
    answers: tuple[str, ...]
    judgement: str

    @property
    def text(self) -> str:
        """Prompt and answers."""
        return "\n".join(text for text in (self.prompt, *self.answers) if text)


@dataclass
class OpenRows:
    """A source that is open, and how its rows are read."""

    opened: Opened
    source: Source
    columns: Columns
    is_known: bool = False
    """Whether ``columns`` has the kind of its rows."""
    num_rows: int = field(default=0)

    def read(self, record: Any, place: str) -> AnyRow:
        """The row of a record. Raises DataError for one that training would refuse too."""
        if not self.is_known:
            self.columns = replace(self.columns, kind=kind_of(record, place, self.columns))
            self.is_known = True
        return read_any(record, place, self.columns)


class Line(NamedTuple):
    """A row as it stands in its file."""

    place: str
    text: bytes
    """Its line of JSON, without the line's end."""
    part: OpenRows

    def read(self) -> tuple[Any, AnyRow]:
        """The record, and the row that it is."""
        try:
            record = read_json(self.text.decode())
        except ValueError:  # the other readings of the file name the fault and its column
            raise DataError(f"{self.place}: the line is not JSON; expected an object") from None
        return record, self.part.read(record, self.place)

    @property
    def content(self) -> Content:
        return content(self.read()[1])


class Verdict(NamedTuple):
    """What becomes of a row."""

    line: Line
    reason: str = ""
    """In one word why it is removed; empty: it is kept."""
    details: Mapping[str, Any] = {}
    """What goes with the reason, for the file of removed rows."""


class RowSet:
    """The rows of all sources, which can be read more than once.

    A file that changes in between is a DataError (``taut.data.sources``).
    """

    def __init__(
        self, sources: Sequence[tuple[Source, Columns]], limit: int | None = None, *, is_auto: bool
    ) -> None:
        """``limit``: of rows of each source. ``is_auto``: their kind is recognised."""
        self.limit = limit
        self.parts = [
            OpenRows(open_source(source), source, columns, not is_auto)
            for source, columns in sources
        ]

    def rows(self) -> Iterator[tuple[str, Any, AnyRow]]:
        """Place, record and row, in order."""
        for part in self.parts:
            for place, record in self._placed(part, part.opened.records()):
                yield place, record, part.read(record, place)
        self._require_some()

    def lines(self) -> Iterator[Line]:
        """The same rows as lines, in the same order."""
        for part in self.parts:
            for place, text in self._placed(part, part.opened.lines()):
                yield Line(place, text, part)
        self._require_some()

    def _placed(
        self, part: OpenRows, numbered: Iterator[tuple[int, Any]]
    ) -> Iterator[tuple[str, Any]]:
        part.num_rows = 0
        for number, value in islice(numbered, self.limit):
            part.num_rows += 1
            yield part.opened.place(number), value

    def _require_some(self) -> None:
        if not self.num_rows:
            names = ", ".join(part.opened.path for part in self.parts)
            raise DataError(f"{names}: no rows; expected at least one; check the path")

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)

    def described(self) -> list[dict[str, Any]]:
        """Each source with the digest of its content and its rows, for reports."""
        return [
            {"path": part.opened.path, "digest": part.opened.digest, "rows": part.num_rows}
            for part in self.parts
        ]


def kind_of(record: Any, place: str, columns: Columns) -> Kind:
    """The kind of a row by its columns: one that SFT takes, else judged answers, else a prompt."""
    try:
        recognise(record, place, columns)
        return "sft"
    except OtherKindError as error:
        return error.kind
    except DataError as error:
        try:
            recognise(record, place, replace(columns, kind="prompt"))
            return "prompt"
        except DataError:
            raise error from None


# -- what a row says


def content(row: AnyRow) -> Content:
    """What a row says."""
    whole = answers_of(row)
    answers = tuple(_halves(each)[1] for each in whole)
    best = best_row(row)
    context: list[Any] = []
    if isinstance(best, Conversation):
        system = [text_of(m["content"]) for m in best.messages if m["role"] == "system"]
        pictures = [
            [
                image.kind,
                image.value if isinstance(image.value, str) else sha256(image.value).hexdigest(),
            ]
            for image in images_of(best.messages)
        ]
        context = [system, best.tools, pictures]
    return Content(
        json.dumps(context, ensure_ascii=False),
        _halves(best)[0],
        () if answers == ("",) else answers,
        json.dumps(_judgement(row)),
    )


def _judgement(row: AnyRow) -> Any:
    """Which answer is the better one, or how good each is."""
    if isinstance(row, Stepwise):
        return row.labels
    if not isinstance(row, Answers):
        return None
    values = next(iter(row.values.values()))
    if row.is_compared:
        return sorted(range(len(values)), key=values.__getitem__)
    return values


def _halves(row: Conversation | Completion | Document) -> tuple[str, str]:
    """The text before the last answer, and that of the answer; system messages are in neither."""
    if isinstance(row, Completion):
        return row.prompt, row.completion
    if isinstance(row, Document):
        return row.text, ""
    turns = [message for message in row.messages if message["role"] != "system"]
    at = len(turns) - 1 if turns and turns[-1]["role"] == "assistant" else len(turns)
    return "\n".join(map(_said, turns[:at])), "\n".join(map(_said, turns[at:]))


def _said(message: Message) -> str:
    """All text of a message: its content, its reasoning, and its calls of tools as JSON."""
    others = [
        message[key] for key in ("reasoning_content", "reasoning", "thinking") if key in message
    ]
    calls = [json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls", ())]
    return "\n".join([*others, text_of(message["content"]), *calls])


def normalised(text: str) -> str:
    """A text as it is compared: NFKC, without case, one space for any white space, none at the ends."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return " ".join(text.casefold().split())


def shingles(text: str, size: int) -> set[str]:
    """The runs of ``size`` words of a normalised text; a shorter text is one run, an empty one has none."""
    words = text.split(" ")
    if len(words) <= size:
        return {text} if text else set()
    return {*map(" ".join, zip(*(words[at:] for at in range(size)), strict=False))}


def chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Consecutive items, ``size`` at a time."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk
