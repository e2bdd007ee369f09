"""The rows of a data set, as ``taut data`` compares them and, unchanged, as it writes them.

Sources are read as in training (``taut.data``): the first row of each tells the kind of all. ``Line`` is a row's text
in its file; ``Content`` is its meaning:

    context     system messages, tools and pictures: rows that differ in it are different rows
    prompt      the turns before the answer
    answers     the last answer, or all answers of a row that compares answers
    judgment    the better answer, or how good each is; and the exact tool calls

Texts are compared as ``normalized``: NFKC, without case, and with one space for any white space.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import islice
from typing import Any, NamedTuple

from taut.data.read.json_io import read_json
from taut.data.read.sources import OpenSource, open_source
from taut.data.render.render import answers_of
from taut.data.rows.messages import Completion, Conversation, Document, Message, images_of, text_of
from taut.data.rows.schema import (
    Answers,
    AnyRow,
    Columns,
    OtherKindError,
    Stepwise,
    best_row,
    read_any,
    recognize,
)
from taut.data.settings import Kind, Source
from taut.errors import DataError


class Content(NamedTuple):
    """The comparable parts of a row."""

    context: str
    prompt: str
    answers: tuple[str, ...]
    judgment: str

    @property
    def text(self) -> str:
        """Prompt and answers."""
        return "\n".join(text for text in (self.prompt, *self.answers) if text)


@dataclass
class OpenRows:
    """An open source, with the columns of its rows."""

    opened: OpenSource
    source: Source
    columns: Columns
    is_known: bool = False
    """Whether ``columns`` has the kind of the rows already."""
    num_rows: int = field(default=0)

    def read(self, record: Any, place: str) -> AnyRow:
        """Read the row of a record. Raises DataError where training would."""
        if not self.is_known:
            self.columns = replace(self.columns, kind=kind_of(record, place, self.columns))
            self.is_known = True
        return read_any(record, place, self.columns)


class Line(NamedTuple):
    """A row as its file has it."""

    place: str
    text: bytes
    """Line of JSON, without the line break."""
    part: OpenRows

    def read(self) -> tuple[Any, AnyRow]:
        """Read the record, and the row from it."""
        try:
            record = read_json(self.text.decode())
        except ValueError:  # the other readings of the file name the fault and its column
            raise DataError(f"{self.place}: the line is not JSON; expected an object") from None
        return record, self.part.read(record, self.place)

    @property
    def content(self) -> Content:
        return content(self.read()[1])


class Verdict(NamedTuple):
    """The decision to keep or to remove a row."""

    line: Line
    reason: str = ""
    """One word for the reason to remove the row; empty for a row that is kept."""
    details: Mapping[str, Any] = {}
    """Details of the reason, for the file of removed rows."""


class RowSet:
    """The rows of all sources, which can be read more than once.

    A file that changes in between is a DataError (``taut.data.read.sources``).
    """

    def __init__(
        self, sources: Sequence[tuple[Source, Columns]], limit: int | None = None, *, is_auto: bool
    ) -> None:
        """Open sources, of each at most ``limit`` rows. ``is_auto`` recognizes the kind of rows."""
        self.limit = limit
        self.parts = [
            OpenRows(open_source(source), source, columns, not is_auto)
            for source, columns in sources
        ]

    def rows(self) -> Iterator[tuple[str, Any, AnyRow]]:
        """Read place, record and row of all rows, in order."""
        for part in self.parts:
            for place, record in self._placed(part, part.opened.read_records()):
                yield place, record, part.read(record, place)
        self._require_some()

    def lines(self) -> Iterator[Line]:
        """Read all rows as lines, in the order of ``rows``."""
        for part in self.parts:
            for place, text in self._placed(part, part.opened.read_records(as_lines=True)):
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
        """Path, digest and number of rows of each source, for reports."""
        return [
            {"path": part.opened.path, "digest": part.opened.digest, "rows": part.num_rows}
            for part in self.parts
        ]


def kind_of(record: Any, place: str, columns: Columns) -> Kind:
    """Recognize the kind of a row by its columns: a row of SFT, else judged answers, else a prompt."""
    try:
        recognize(record, place, columns)
        return "sft"
    except OtherKindError as error:
        return error.kind
    except DataError as error:
        try:
            recognize(record, place, replace(columns, kind="prompt"))
            return "prompt"
        except DataError:
            raise error from None


# -- the content of a row


def content(row: AnyRow) -> Content:
    """The comparable parts of a row."""
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
        json.dumps(_judgment(row)),
    )


def _judgment(row: AnyRow) -> Any:
    """The order or the values of compared answers, the labels of steps, or the tool calls of a conversation."""
    if isinstance(row, Stepwise):
        return row.labels
    if isinstance(row, Conversation):
        calls = [call for message in row.messages for call in message.get("tool_calls", ())]
        return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    if not isinstance(row, Answers):
        return None
    values = next(iter(row.values.values()))
    if row.is_compared:
        return sorted(range(len(values)), key=values.__getitem__)
    return values


def _halves(row: Conversation | Completion | Document) -> tuple[str, str]:
    """The texts before the last answer and of it, both without system messages."""
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


def normalized(text: str) -> str:
    """Normalize a text for comparison: NFKC, without case, one space for any white space, none at the ends."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return " ".join(text.casefold().split())


def shingles(text: str, size: int) -> set[str]:
    """Runs of ``size`` words of a normalized text; a shorter text is one run, an empty text has none."""
    words = text.split(" ")
    if len(words) <= size:
        return {text} if text else set()
    return {*map(" ".join, zip(*(words[at:] for at in range(size)), strict=False))}


def chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Split items into lists of ``size``."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk
