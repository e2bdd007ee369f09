"""Files as records: can the pictures be read that the first records of each source name, and is every column read?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from taut.checks.chat_template import quoted
from taut.checks.registry import Finding, check, failed, passed, skip_if, split_error, warned
from taut.checks.session import Session, Unavailable, once, owned_by
from taut.data.dataset import open_sources
from taut.data.rows.messages import PICTURES, Conversation, images_of
from taut.data.rows.schema import REQUIRED, Columns, Recognized, best_row, read_any, recognize
from taut.errors import DataError, PictureError
from taut.vision.content import ImageRef, decoded_size, encoded, require_allowed
from taut.vision.image_store import ImageStore, Seen


class Record(NamedTuple):
    """A row as its file holds it."""

    split: str
    source: str
    place: str
    value: Any
    columns: Columns


def splits(session: Session) -> list[Any]:
    """train, and eval if there is one."""
    return ["train", "eval"] if session.run.data.eval else ["train"]


@once
@owned_by("data.rows")
def records(session: Session) -> list[Record]:
    """The first records of each source of both splits; lines that are not records are left to data.rows."""
    first = []
    for split in splits(session):
        named = open_sources(session.run.data, split, session.run.row_kind)
        for _, columns, opened, _ in named:
            for line, value in islice(opened.read_records(strict=False), 2000 // len(named) + 1):
                if not isinstance(value, DataError):
                    place = opened.place(line)
                    first.append(Record(split, opened.path, place, value, columns))
    return first


def _texts_in(value: Any) -> list[str]:
    """All texts in a value, however deep."""
    if isinstance(value, str):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in inside for text in _texts_in(item)]


PICTURES_OPENED = 200


@check("data.images")
def every_picture_can_be_read(session: Session) -> Finding:
    """Can every picture be read that a row names?

    Each is read whole, by the code that reads it in training. If the model takes no pictures addresses are not fetched.
    Pictures that data.ignore_keys leaves out are counted and not opened. Rows that cannot be read are left to
    data.rows.
    """
    # the pictures that rows name
    pictures: list[tuple[str, ImageRef | PictureError]] = []
    for record in records(session):
        try:
            row = best_row(read_any(record.value, record.place, record.columns))
        except PictureError as error:
            pictures.append((record.place, error))
        except DataError:
            continue
        else:
            named = images_of(row.messages) if isinstance(row, Conversation) else ()
            pictures += [(record.place, ref) for ref in named]
        if len(pictures) >= PICTURES_OPENED:
            break
    if not pictures:
        num_ignored = 0
        for record in records(session):
            columns = record.value.values() if isinstance(record.value, dict) else ()
            lists = [value for value in columns if isinstance(value, list)]
            messages = [item for column in lists for item in column if isinstance(item, dict)]
            for holder in (record.value, *messages) if columns else ():
                for key in set(PICTURES) & set(record.columns.ignore_keys):
                    value = holder.get(key)
                    is_list = isinstance(value, list)
                    num_ignored += len(value) if is_list else int(value not in (None, ""))
        skip_if(not num_ignored, "no row that can be read names a picture")
        return passed("the pictures are left out: data.ignore_keys", num_ignored, "pictures")
    # each opened as training opens it
    images, broken, contents = session.run.data.images, list[str](), Counter[str]()
    pictures = pictures[:PICTURES_OPENED]
    try:
        image_store = session.language.renderer.image_store
    except Unavailable:
        image_store = None
    for place, ref in pictures:
        try:
            if isinstance(ref, PictureError):
                broken.append(str(ref))
            elif image_store is not None:
                contents[_content(image_store, image_store.see(ref, place), place)] += 1
            else:
                require_allowed(ref, images)
                if ref.kind != "url":
                    decoded_size(encoded(ref, images), ref.name, images)
        except PictureError as error:
            broken.append(str(error) if image_store is not None else f"{place}: {error}")
    if 8 <= max(contents.values(), default=0) > 0.9 * len(pictures):
        evidence = [place for place, _ in pictures]
        remedy = "see what the rows name: with one picture for all nothing is learned of pictures"
        says = "nearly all pictures are one and the same, or of one color each"
        return warned(says, evidence=evidence, remedy=remedy)
    if not broken:
        return passed("every picture can be read", len(pictures), "pictures")
    unit = f"of {len(pictures):,} pictures"
    says = f"{len(broken):,} {unit} cannot be read"
    if images.bad == "drop":
        return passed(f"{says}, and their rows are left out", len(broken), unit, broken[:4])
    return failed(
        says,
        measured=(broken, unit),
        remedy="correct the paths (from data.images.folder, the data file's directory, or here), leave the rows out "
        'with data.images.bad="drop", or name the column in data.ignore_keys',
    )


def _content(store: ImageStore, seen: Seen, place: str) -> str:
    """A picture's digest, or "" for a picture of one color, of which a file of few bytes is suspected."""
    if Path(seen.source).stat().st_size > 1000 + 0.02 * seen.width * seen.height:
        return seen.digest
    tensors = store.picture(seen.source, seen.digest, 1, place).tensors().values()
    num_values = [np.unique(it.numpy()).size for it in tensors if it.is_floating_point()]
    return "" if max(num_values, default=9) <= 4 else seen.digest  # one for each channel, and a pad


_ANSWER = ("answer", "response", "output", "label", "target", "solution", "completion")
ANSWERS = {*_ANSWER, *(f"{name}s" for name in _ANSWER), "summary", "reply"}
"""Names that data sets give to columns with the answer to learn."""
_CONTEXT = ("context", "passage", "document", "input")
CONTEXTS = {*_CONTEXT, *(f"{name}s" for name in _CONTEXT)}
"""Names that data sets give to columns with the subject of a question."""
_SEEN = {*CONTEXTS, "system", "history", "tools"}
SEEN = {
    "alpaca": {*CONTEXTS, "tools"},
    **dict.fromkeys(("completion", "preference", "unpaired", "stepwise"), _SEEN),
}
"""Columns that belong in a prompt, although a format, or a kind of judged rows, does not read them."""
_TOOLS = {"tool_defs", "functions", "available_tools", "tool_schemas", "function_definitions"}
_INSTRUCTIONS = {"system_prompt", "system_message", "sys_prompt", "developer", "instructions"}
BESIDE = {*_TOOLS, *_INSTRUCTIONS, *CONTEXTS, "history", "instruction", "knowledge"} - {"input"}
"""Names that data sets give to columns that look like a part of the prompt beside messages."""
REMEDY_BY_FORMAT = {
    "text": 'set data.columns={{prompt = "text", completion = "{0}"}}',
    "alpaca": 'set data.columns={{input = "{0}"}}, or join it to the instruction',
    "beside": "name it, as in data.columns.system={0} or data.columns.tools={0}, or put it into the messages",
    "tools": "give the rows as messages, which have tools",
}
"""Remedy for an unread column, by format; in other formats it is joined to the prompt."""


class ReadRecord(NamedTuple):
    """A record, and the format in which it is read."""

    record: Record
    how: Recognized

    def shown(self, name: str) -> str:
        text = " ".join(_texts_in(self.how.unread[name]))
        return f"{self.record.place}: {name} is {quoted(text, 40)}"

    def is_nowhere_else(self, name: str) -> bool:
        """Whether an unread column has words that no other column has. Numbers (a class, a score) do not count as
        words.
        """
        value = self.how.unread[name]
        words = [text.strip() for text in _texts_in(value) if text.strip()]
        columns = self.record.value.values()
        others = [text for item in columns if item is not value for text in _texts_in(item)]
        return any(not any(text in other for other in others) for text in words)


@check("data.columns", after=["data.images"])
def every_column_that_matters_is_read(session: Session) -> Finding:
    """Is every column read that the model should see or learn?

    A column that is not read is a loss if its name says that the model should learn or see it, and its words are
    nowhere else in the row (a prompt that was made of it).
    """
    first = records(session)
    skip_if(not first, "there is no record to look at")
    read, errors = list[ReadRecord](), []
    for record in first:
        try:
            how = recognize(record.value, record.place, record.columns)
            read.append(ReadRecord(record, how))
        except DataError as error:
            errors.append(error)
    if not read:
        says, remedy = split_error(errors[0])
        return failed(
            "the columns are not understood",
            measured=(len(errors), f"of {len(first):,} rows"),
            evidence=[says],
            remedy=remedy,
        )
    if not session.is_generated and (fault := _preferences_not_read(read)):
        return fault
    # of a run that generates, rewards may want answers, and the input of a test
    unwanted = {"input", "inputs", *ANSWERS} if session.is_generated else set()
    # unread columns whose names say that the model should learn or see them
    unread: dict[tuple[str, str], list[ReadRecord]] = {}  # (source, column) -> rows with its words
    for row in read:
        kind, columns = row.how.format, row.record.columns
        wanted = SEEN.get(kind, set())
        if kind == "text" and row.record.split == "train" and columns.format == "auto":
            is_chosen = any(name in columns.mapping for name in REQUIRED[kind])
            wanted = set() if is_chosen else ANSWERS
        if kind != "text":
            wanted = wanted | BESIDE - (CONTEXTS if session.is_generated else set())
        for name in row.how.unread:
            if name.lower() in wanted - unwanted and row.is_nowhere_else(name):
                unread.setdefault((row.record.source, name), []).append(row)
    num_of = Counter(row.record.source for row in read)
    # a column with words in 1 of 20 rows, or in fewer, is not one that the run was to use
    lost = {key: rows for key, rows in unread.items() if len(rows) > 0.05 * num_of[key[0]]}
    if lost:
        (source, name), examples = next(iter(lost.items()))
        kind = examples[0].how.format
        is_beside = name.lower() not in SEEN.get(kind, ANSWERS)
        kind_of_remedy = "beside" if is_beside else "tools" if name == "tools" else kind
        remedy = REMEDY_BY_FORMAT.get(kind_of_remedy, "join it to the prompt")
        return (warned if is_beside else failed)(
            f"the column {name} is passed over: format {kind} does not read it",
            measured=(len(examples), f"of {num_of[source]:,} rows"),
            evidence=[rows[0].shown(column) for (_, column), rows in lost.items()],
            remedy=remedy.format(name) + ", or name it in data.ignore_keys if it is not to be used",
        )
    kinds = " and ".join(Counter(row.how.format for row in read))
    if session.is_generated:
        return passed(f"{kinds}; rewards read the other columns", len(read), "rows")
    counts = Counter(name for row in read for name in row.how.unread)
    notes = [f"not read: {name}, in {times:,} rows" for name, times in counts.most_common(4)]
    left = f"{len(counts)} columns are not read" if counts else "every column is read"
    return passed(f"{kinds}; {left}", len(read), "rows", notes)


def _preferences_not_read(read: Sequence[ReadRecord]) -> Finding | None:
    """Rows that compare or judge answers, although every answer would be learned, or none."""
    # chosen and rejected, of which every answer would be learned, or none
    trained = [row for row in read if row.record.split == "train"]
    unit = f"of {len(trained):,} rows"
    paired = [
        row
        for row in trained
        if {"chosen", "rejected"} <= row.how.unread.keys() and row.is_nowhere_else("chosen")
    ]
    if 2 * len(paired) > len(trained):
        return failed(
            "the rows are preferences: chosen and rejected are passed over",
            measured=(len(paired), unit),
            evidence=[paired[0].shown(name) for name in ("chosen", "rejected")],
            remedy="write the chosen answer as the last message and leave rejected out, or name both in "
            "data.ignore_keys if the answers to learn are in the other columns",
        )
    # labels that say which answers are good
    judged = [row for row in trained if isinstance(row.how.unread.get("label"), bool)]
    bad = [row for row in judged if not row.how.unread["label"]]
    if 2 * len(judged) > len(trained) and 0 < len(bad) < len(judged):
        return failed(
            f"{len(bad):,} of {len(trained):,} answers are marked label false, and would be learned",
            measured=([f"{row.record.place}: label is false" for row in bad], unit),
            remedy="keep the rows whose label is true, or name label in data.ignore_keys if it says something else",
        )
    return None
