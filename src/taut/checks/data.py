"""The data: files as records, records as rows, rows as samples, samples as micro-batches.

Looking must not take longer than a moment, so a bounded part of each is looked at: the first records of each source,
the words of up to 200,000 rows, and samples spread evenly over a split. Findings say how many. What rows say (repeats,
leaks, labels) is in data_quality.py, which uses what is read here.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from taut.checks.chat_template import short_place
from taut.checks.registry import (
    Finding,
    check,
    failed,
    passed,
    skip_if,
    split_error,
    warned,
)
from taut.checks.session import GENERATED, Session, Unavailable, once, owned_by
from taut.data.batching import Budget, StepPlan, lay_out, samples_of, step_plan
from taut.data.dataset import Dataset, open_sources
from taut.data.messages import PICTURES, Completion, Conversation, Document, Row, images_of, text_of
from taut.data.order import START
from taut.data.prompts import PromptSet
from taut.data.render import Limits
from taut.data.schema import REQUIRED, Columns, Recognised, best_row, read_any, recognise, renamed
from taut.data.tokenise import attempt_rows
from taut.errors import DataError, PictureError, TautError
from taut.methods.method import Offline, Streamed
from taut.rl.online import Online
from taut.types import IntArray, Packed, Sample, Tree
from taut.vision.content import ImageRef, decoded_size, encoded, require_allowed
from taut.vision.placeholders import positions_of

SHOWN = 4
"""Lines of evidence."""

# -- records, as the files have them


class Record(NamedTuple):
    """A row as its file has it."""

    split: str
    source: str
    place: str
    value: Any
    columns: Columns


def _splits(session: Session) -> list[Any]:
    """train, and eval if there is one."""
    return ["train", "eval"] if session.run.data.eval else ["train"]


@once
@owned_by("data.rows")
def records(session: Session) -> list[Record]:
    """The first records of each source of both splits; lines that are no records are left to data.rows."""
    first = []
    for split in _splits(session):
        named = open_sources(session.run.data, split, session.run.row_kind)
        for _, columns, opened, _ in named:
            for line, value in islice(opened.attempts(), 2000 // len(named) + 1):
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


def cut_end(text: str, most: int) -> str:
    """A text in a line of evidence, quoted, its end left out if it is long."""
    return repr(text if len(text) <= most else text[: most - 3] + "...")


PICTURES_OPENED = 200


@check("data.images")
def every_picture_can_be_read(session: Session) -> Finding:
    """Can every picture be read that a row names?

    Each is read whole, by the code that reads it in training. If the model takes no pictures addresses are not fetched.
    Pictures that data.ignore_keys leaves out are counted and not opened. Rows that cannot be read are left to
    data.rows.
    """
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
    images, broken = session.run.data.images, list[str]()
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
                image_store.see(ref, place)
            else:
                require_allowed(ref, images)
                if ref.kind != "url":
                    decoded_size(encoded(ref, images), ref.name, images)
        except PictureError as error:
            broken.append(str(error) if image_store is not None else f"{place}: {error}")
    if not broken:
        return passed("every picture can be read", len(pictures), "pictures")
    unit = f"of {len(pictures):,} pictures"
    says = f"{len(broken):,} {unit} cannot be read"
    if images.bad == "drop":
        return passed(f"{says}, and their rows are left out", len(broken), unit, broken[:SHOWN])
    return failed(
        says,
        measured=(len(broken), unit),
        evidence=broken[:SHOWN],
        remedy="correct the paths (from data.images.folder or the data file's directory, or from here), or leave the "
        'rows out with data.images.bad="drop"; text alone is trained with the column in data.ignore_keys',
    )


_ANSWER = ("answer", "response", "output", "label", "target", "solution", "completion")
ANSWERS = {*_ANSWER, *(f"{name}s" for name in _ANSWER), "summary", "reply"}
"""What is to be learned, by the names that data sets give it."""
_CONTEXT = ("context", "passage", "document", "input")
CONTEXTS = {*_CONTEXT, *(f"{name}s" for name in _CONTEXT)}
"""What a question is about, by the names that data sets give it."""
SEEN = {"alpaca": {*CONTEXTS, "tools"}, "completion": {*CONTEXTS, "system", "history", "tools"}}
"""Columns that a prompt should have, if a format does not read them."""
REMEDY_BY_FORMAT = {
    "text": 'set data.columns={{prompt = "text", completion = "{0}"}}',
    "alpaca": 'set data.columns={{input = "{0}"}}, or join it to the instruction',
    "completion": "join it to the prompt",
    "tools": "give the rows as messages, which have tools",
}
"""What to do with a column that is not read."""


class ReadRecord(NamedTuple):
    """A record, and how it is read."""

    record: Record
    how: Recognised

    def shown(self, name: str) -> str:
        text = " ".join(_texts_in(self.how.unread[name]))
        return f"{self.record.place}: {name} is {cut_end(text, 40)}"

    def is_nowhere_else(self, name: str) -> bool:
        """Whether an unread column has words that no other column has. Numbers (a class, a score) are no words."""
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
            how = recognise(record.value, record.place, record.columns)
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
    unread: dict[tuple[str, str], list[ReadRecord]] = {}  # (source, column) -> rows with its words
    for row in read:
        kind, columns = row.how.format, row.record.columns
        wanted = SEEN.get(kind, set())
        if kind == "text" and row.record.split == "train" and columns.format == "auto":
            is_chosen = any(name in columns.mapping for name in REQUIRED[kind])
            wanted = set() if is_chosen else ANSWERS
        for name in row.how.unread:
            if name.lower() in wanted - unwanted and row.is_nowhere_else(name):
                unread.setdefault((row.record.source, name), []).append(row)
    num_of = Counter(row.record.source for row in read)
    # a column with words in 1 of 20 rows, or in fewer, is not one that the run was to use
    lost = {key: rows for key, rows in unread.items() if len(rows) > 0.05 * num_of[key[0]]}
    if lost:
        (source, name), examples = next(iter(lost.items()))
        kind = examples[0].how.format
        return failed(
            f"the column {name} is passed over: format {kind} does not read it",
            measured=(len(examples), f"of {num_of[source]:,} rows"),
            evidence=[rows[0].shown(column) for (_, column), rows in lost.items()][:SHOWN],
            remedy=REMEDY_BY_FORMAT["tools" if name == "tools" else kind].format(name)
            + ", or name it in data.ignore_keys if it is not to be used",
        )
    kinds = " and ".join(Counter(row.how.format for row in read))
    if session.is_generated:
        return passed(f"{kinds}; rewards read the other columns", len(read), "rows")
    counts = Counter(name for row in read for name in row.how.unread)
    notes = [f"not read: {name}, in {times:,} rows" for name, times in counts.most_common(SHOWN)]
    left = f"{len(counts)} columns are not read" if counts else "every column is read"
    return passed(f"{kinds}; {left}", len(read), "rows", notes)


def _preferences_not_read(read: Sequence[ReadRecord]) -> Finding | None:
    """Rows that compare or judge answers, of which every answer would be learned, or none."""
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
    judged = [row for row in trained if isinstance(row.how.unread.get("label"), bool)]
    bad = [row for row in judged if not row.how.unread["label"]]
    if 2 * len(judged) > len(trained) and 0 < len(bad) < len(judged):
        return failed(
            f"{len(bad):,} of {len(trained):,} answers are marked label false, and would be learned",
            measured=(len(bad), unit),
            evidence=[f"{row.record.place}: label is false" for row in bad[:SHOWN]],
            remedy="keep the rows whose label is true, or name label in data.ignore_keys if it says something else",
        )
    return None


# -- rows


@check("data.rows", after=["template.targets"])
def every_row_becomes_a_sample(session: Session) -> Finding:
    """Can every row be read, rendered and fitted to length?

    Loading ends at the first error; here all of them are counted.
    """
    try:
        data = session.data
    except Unavailable as missing:
        if missing.owner != "data.rows":
            raise
        says, remedy = split_error(missing.error)
    else:
        says = ", ".join(f"{rows.report.num_samples:,} of {name}" for name, rows in data)
        number = sum(rows.report.num_rows for _, rows in data)
        return passed(f"samples: {says}", number, "rows")
    if session.is_generated:
        return failed(says, remedy=remedy)
    config, renderer, number = session.run.data, session.renderer, 0
    longest = session.run.longest_sample(session.language.config)
    limits = Limits(longest, config.too_long, config.min_length, config.without_targets)
    first: dict[str, str] = {}  # kind of error -> the first of it
    times: Counter[str] = Counter()
    try:
        for split in _splits(session):
            for _, columns, opened, _ in open_sources(config, split, session.run.row_kind):
                attempts = attempt_rows(opened, columns, renderer, limits)
                for attempt in islice(attempts, 200_000):
                    number += 1
                    if attempt.error:
                        reason = str(attempt.error).partition("; ")[0]
                        # numbers and quoted words differ between errors of one kind
                        kind = re.sub(r"\d+|'[^']*'", "", reason.removeprefix(attempt.place))
                        first.setdefault(kind, str(attempt.error))
                        times[kind] += 1
    except TautError:  # a file that ends in the middle of a record: the error is the one known
        pass
    num_bad = times.total()
    if not num_bad:
        return failed(says, remedy=remedy)
    return failed(
        f"{num_bad:,} of {number:,} rows cannot be trained on",
        measured=(num_bad, f"of {number:,} rows"),
        evidence=[
            first[kind] + (f" ({count:,} such rows)" if count > 1 else "")
            for kind, count in times.most_common(SHOWN)
        ],
        remedy="correct these rows, or leave them out of the file",
    )


@once
def first_rows(session: Session) -> list[Row]:
    """The first records of the training data as rows; of compared answers the best. Those that cannot be read are left
    to data.rows.
    """
    rows = []
    for record in records(session):
        if record.split == "train":
            try:
                rows.append(best_row(read_any(record.value, record.place, record.columns)))
            except DataError:
                continue
    return rows


class Exchange(NamedTuple):
    """A prompt and the answer that is learned."""

    place: str
    prompt: str
    """The words before the answer, without what a template writes around them."""
    answer: str


@once
def exchanges(session: Session) -> list[Exchange]:
    """Prompts and answers of the training data: a conversation's last learned turn, or the reference of a prompt.
    Documents have none.
    """

    def words(messages: Iterable[Mapping[str, Any]]) -> str:
        return "\n".join(text_of(message["content"]) for message in messages)

    pairs = []
    if isinstance(session.train, PromptSet):
        for prompt_row in session.train.prompt_rows:
            prompt = "" if isinstance(prompt_row.prompt, str) else words(prompt_row.prompt)
            for reference in prompt_row.references[:1]:
                pairs.append(
                    Exchange(prompt_row.place, prompt or str(prompt_row.prompt), reference)
                )
        return pairs
    for row in first_rows(session):
        if isinstance(row, Completion):
            pairs.append(Exchange(row.place, row.prompt, row.completion))
        elif isinstance(row, Conversation) and row.learned:
            last = row.learned[-1]
            answer = text_of(row.messages[last]["content"])
            pairs.append(Exchange(row.place, words(row.messages[:last]), answer))
    return pairs


# -- the words of all rows, gone through once

TEXT_ROWS = 200_000
ALLOWED = bytes(sorted({*range(256)} - {*range(32)} - {127} | {*b"\t\n\r"}))
"""All bytes but the control characters that no text has."""
SPACE, PUNCTUATION = b" \t\n\r\v\f", b".,;:!?'\""
IN_NUMBER = re.compile(rb"[0-9][.,:][0-9]")
UNDECODED = "a character that could not be decoded"
MISREAD = "a wrong encoding"
CONTROLS = "a control character"
WINDOWS = bytes(range(0x80, 0xA0)).decode("cp1252", "ignore")
"""What Windows-1252 makes of the bytes that Latin-1 has no character for."""
MOJIBAKE = re.compile(
    "\u00c3[\u0080-\u00bf]|\u00c2[\u00a0-\u00bf]|\u00e2\u20ac|\u00ef\u00bb\u00bf"
    rf"|\u00c3[{WINDOWS}](?=\w)"  # a quotation mark or a dash may follow a word, and none is before a letter
    rf"|(?:[\u00d0\u00d1][{WINDOWS}\u0080-\u00bf]){{2}}"  # Cyrillic
)
"""UTF-8 that was read as Latin-1 or Windows-1252 and written again."""
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f]")


class BrokenText(NamedTuple):
    """A row with a broken character."""

    place: str
    what: str
    """UNDECODED, MISREAD or CONTROLS."""
    excerpt: str


class Texts(NamedTuple):
    """Hashes of the rows of a split, to find duplicates.

    Hashed are the columns that the run reads, numbers and pictures included; columns that it does not read (an id, a
    source) are left out. Two rows are near-duplicates if they are equal without case, white space and the punctuation
    of sentences; punctuation counts in rows that have it inside of numbers (3.5, 10:30).
    """

    places: list[str]
    """``train.jsonl:17``, as the source names it."""
    exact_S: NDArray[np.int64]
    """A hash of each row, of this process only."""
    normal_S: NDArray[np.int64]
    """The same without case, white space and punctuation."""
    broken: list[BrokenText]
    is_whole: bool
    """Whether all rows of the split were read."""

    @property
    def looked_at(self) -> str:
        """For a finding: nothing if all rows were read."""
        return "" if self.is_whole else f"; the first {len(self.places):,} rows looked at"


@once
@owned_by("data.rows")
def texts(session: Session) -> dict[str, Texts]:
    """The rows of train, and of eval if there is one, the first of each source.

    100,000 rows of 1.4 kB take about 2 s of one core.
    """
    by_split = {}
    for split in _splits(session):
        places, exact, normal, broken = list[str](), list[int](), list[int](), list[BrokenText]()
        named = open_sources(session.run.data, split, session.run.row_kind)
        room, is_whole = 400_000_000, True  # characters, beyond which no further row is read
        for _, columns, opened, _ in named:
            number, is_whole = 0, is_whole and not opened.is_part
            read_columns: dict[tuple[str, ...], list[str]] = {}
            for line, record in opened.attempts():
                try:
                    values = renamed(record, "", columns)
                    names = tuple(values)
                    if names not in read_columns:
                        unread = recognise(record, "", columns).unread
                        read_columns[names] = sorted(name for name in names if name not in unread)
                except DataError:  # a record that fits no format is left to data.columns
                    continue
                if number == TEXT_ROWS // len(named) or room < 0:
                    is_whole = False
                    break
                words = [word for name in read_columns[names] for word in _words_in(values[name])]
                place, joined = opened.place(line), "\0".join(words)
                number += 1
                room -= len(joined)
                places.append(place)
                exact.append(hash(joined))
                folded = joined.casefold().encode("utf-8", "surrogatepass")
                left_out = SPACE if IN_NUMBER.search(folded) else SPACE + PUNCTUATION
                normal.append(hash(folded.translate(None, left_out)))
                if problem := broken_in(words):
                    broken.append(BrokenText(place, *problem))
        exact_S, normal_S = np.array(exact, dtype=np.int64), np.array(normal, dtype=np.int64)
        by_split[split] = Texts(places, exact_S, normal_S, broken, is_whole)
    return by_split


def _words_in(value: Any) -> list[str]:
    """All that a value says, in its order: texts, numbers, and a hash of bytes (a picture)."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [word for inside in value for word in _words_in(inside)]
    if isinstance(value, bytes):
        return [hashlib.blake2b(value, digest_size=8).hexdigest()]
    return [] if value is None else [str(value)]


def broken_in(words: list[str]) -> tuple[str, str] | None:
    """What is wrong with the first broken character of these texts, and the words around it; None: nothing."""

    def excerpt(text: str, start: int, stop: int) -> str:
        return text[max(0, start - 15) : stop + 15]

    for text in words:
        if "\ufffd" in text:
            at = text.index("\ufffd")
            return UNDECODED, excerpt(text, at, at + 1)
        if text.isascii():
            if text.encode().translate(None, ALLOWED) and (match := CONTROL.search(text)):
                return CONTROLS, excerpt(text, *match.span())
            continue
        for what, pattern in ((MISREAD, MOJIBAKE), (CONTROLS, CONTROL)):
            if match := pattern.search(text):
                return what, excerpt(text, *match.span())
    return None


# -- samples, in flat arrays

SAMPLES = 20_000
TOKENS = 1_000_000
"""Samples of a split, and their tokens, that are looked at."""
HASH = np.uint64(0x9E3779B97F4A7C15)
Hashes: TypeAlias = NDArray[np.uint64]


def hash_with_pictures(ids_T: NDArray[Any], shown: Iterable[tuple[int, int]]) -> Hashes:
    """A number for each token, from its id and the pictures up to it: equal words about different pictures differ.

    ``shown``: where each picture begins, and the first eight bytes of its SHA-256.
    """
    seen_T = ids_T.astype(np.uint64)
    for start, content in shown:
        seen_T[start:] *= HASH
        seen_T[start:] += np.uint64(content)
    return seen_T


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
    def num_samples(self) -> int:
        return int(self.index_S.size)

    @property
    def sample_T(self) -> IntArray:
        """The number, in here, of the sample that each token belongs to."""
        return np.repeat(np.arange(self.num_samples), np.diff(self.start_S))

    @property
    def looked_at(self) -> str:
        """For a finding: nothing if it is all of them."""
        if self.num_samples == len(self.data):
            return ""
        return f"; {self.num_samples:,} of {len(self.data):,} samples looked at"

    def name(self, number: int) -> str:
        return self.data.sample_id(int(self.index_S[number]))


@once
def flat_train(session: Session) -> Flat:
    """Samples of the training data."""
    return flat(session.train)


def flat(data: Dataset, tokens: int = TOKENS, samples: int = SAMPLES) -> Flat:
    """Samples spread evenly over those at hand, at most so many, and about so many tokens."""
    looked = list(data.at_hand())
    own_S = np.concatenate([np.arange(own.start, own.stop) for own, _ in looked])
    share = tokens / sum(entry.counts.num_tokens for _, entry in looked)
    most = min(own_S.size, samples, max(1, int(share * own_S.size)))
    index_S = own_S[np.unique(np.linspace(0, own_S.size - 1, most).astype(np.int64))]
    ids, seen, targets, sizes = [], [], [], []
    for own, entry in looked:
        arrays = entry.arrays
        chosen = index_S[(index_S >= own.start) & (index_S < own.stop)] - own.start
        places, lengths = _ranges(arrays["offsets"], chosen)
        sizes.append(lengths)
        ids.append(np.asarray(arrays["ids"][places]))
        stops = np.cumsum(lengths)
        if "media.offsets" in arrays:
            for index, own_T in zip(chosen.tolist(), np.split(ids[-1], stops[:-1]), strict=True):
                first_picture, last = arrays["media.offsets"][index : index + 2]
                pictures = arrays["media.picture"][first_picture:last]
                contents = arrays["picture.content"][pictures]
                numbers = [int.from_bytes(content[:8].tobytes(), "big") for content in contents]
                starts = arrays["media.at"][first_picture:last, 0].tolist()
                seen.append(hash_with_pictures(own_T, zip(starts, numbers, strict=True)))
        else:
            seen.append(ids[-1].astype(np.uint64))
        target_places, counts = _ranges(arrays["target_offsets"], chosen)
        is_target = np.zeros(places.size, dtype=bool)
        is_target[arrays["target_at"][target_places] + np.repeat(stops - lengths, counts)] = True
        targets.append(is_target)
    start_S = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
    is_target_T, seen_T = np.concatenate(targets), np.concatenate(seen)
    return Flat(data, index_S, np.concatenate(ids), start_S, is_target_T, seen_T)


def _ranges(offsets: IntArray, chosen: IntArray) -> tuple[IntArray, IntArray]:
    """The places of the chosen ranges, one after another, and the length of each."""
    starts = np.asarray(offsets[chosen])
    lengths = np.asarray(offsets[chosen + 1]) - starts
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum())), lengths


# -- tokens and targets

BROKEN = 0.1
"""A larger share of rows is most of a file, and what is wrong with them was done to the file."""


@check("data.tokens", after=["data.rows"])
def tokens_are_those_of_the_text(session: Session) -> Finding:
    """Are the tokens those of the text that is meant?

    Ids the model has no row for, unknown tokens, broken characters, escaped texts. Special tokens in messages are
    ``template.markup``.
    """
    look, tokenizer, size = flat_train(session), session.tokenizer, session.language.num_rows
    for _, data in session.data:
        if beyond := data.first_beyond(size):
            place, index = beyond
            token = tokenizer.convert_ids_to_tokens(index)
            return failed(
                f"token {index} of the data has no row: the model has {size:,}",
                measured=(index, f"of {size:,} rows"),
                evidence=[f"first in {place}", f"the tokenizer writes it {token!r}"],
                remedy="use the model's own tokenizer; tokens that somebody added to it are to be taken out and named "
                "in tokens.add, which gives the model rows for them",
            )
    unknown_id = tokenizer.unk_token_id
    is_unknown = look.ids_T == (-1 if unknown_id is None else unknown_id)
    num_unknown = int(is_unknown.sum())
    if (share := num_unknown / look.ids_T.size) > 0.2:
        return failed(
            f"{share:.0%} of tokens are the unknown token {tokenizer.unk_token!r}",
            measured=(share, "of tokens"),
            evidence=[f"first in {look.name(int(look.sample_T[is_unknown.argmax()]))}"],
            remedy="the tokenizer was not made for this language; train a model whose tokenizer knows it",
        )
    if fault := _wrong_texts(session):
        return fault
    broken = [text for split in texts(session).values() for text in split.broken]
    notes = [f"{len(broken):,} rows have broken characters"] if broken else []
    notes += _broken_examples(broken)
    if num_unknown:
        notes.append(f"{num_unknown:,} tokens are unknown")
    id_of = tokenizer.backend_tokenizer.token_to_id
    # with these tokens a tokenizer falls back on bytes
    byte_ids = [id_of(f"<0x{byte:02X}>") for byte in range(256)]
    byte_ids = [index for index in byte_ids if index is not None]
    if byte_ids and (num_bytes := int(np.isin(look.ids_T, byte_ids).sum())):
        notes.append(f"{num_bytes:,} tokens are single bytes")
    num_used = int(np.count_nonzero(np.bincount(look.ids_T)))
    says = f"different tokens, {num_used / size:.1%} of the vocabulary{look.looked_at}"
    return passed(says, num_used, "tokens", notes)


def _wrong_texts(session: Session) -> Finding | None:
    """Many rows of the training data with characters lost or doubled by a wrong encoding, some rows with any broken
    character, or more than a few texts that some program escaped.
    """
    train = texts(session)["train"]
    every = [text for split in texts(session).values() for text in split.broken]
    num_every = sum(len(split.places) for split in texts(session).values())
    misread = [text for text in train.broken if text.what != CONTROLS]
    is_many = len(misread) > BROKEN * len(train.places)
    broken, number = (misread, len(train.places)) if is_many else (every, num_every)
    kinds = " or ".join(dict.fromkeys(text.what for text in broken))
    says, unit = f"{len(broken):,} of {number:,} rows have {kinds}", f"of {number:,} rows"
    if is_many:
        return failed(
            f"{says}{train.looked_at}",
            measured=(len(broken), unit),
            evidence=_broken_examples(broken),
            remedy="the file was written after reading it in another encoding; write it again from its source, as "
            "UTF-8",
        )
    if len(broken) > 0.001 * number:
        return warned(
            says,
            measured=(len(broken), unit),
            evidence=_broken_examples(broken),
            remedy="look at these rows; correct them, or leave them out: the model learns to write such characters",
        )
    rows = first_rows(session)
    entities, line_breaks = [], []
    for row in rows:
        if isinstance(row, Document):
            text = row.text
        elif isinstance(row, Completion):
            text = row.prompt + row.completion
        else:
            text = "".join(text_of(message["content"]) for message in row.messages)
        if re.search("&(?:lt|gt|amp|quot|apos|nbsp|#39|#x27);", text):
            entities.append(row.place)
        if "\\n" in text and "\n" not in text:
            line_breaks.append(row.place)
    escaped = {"HTML entities, as &lt;": entities, "\\n for line breaks": line_breaks}
    for what, places in escaped.items():
        if len(places) > BROKEN * len(rows):
            return warned(
                f"{len(places):,} of {len(rows):,} rows have {what}",
                measured=(len(places), f"of {len(rows):,} rows"),
                evidence=places[:SHOWN],
                remedy="undo what the program that wrote the file did to its texts, or leave them if the answers are "
                "to be written so",
            )
    return None


def _broken_examples(broken: Sequence[BrokenText]) -> list[str]:
    """The first row of each different excerpt: one broken document may be in many rows."""
    first = {text.excerpt: text for text in reversed(broken)}
    different = [text for text in broken if first[text.excerpt] is text]
    return [
        f"{short_place(text.place)}: {text.excerpt!r} ({text.what})" for text in different[:SHOWN]
    ]


MISSING = {"nan", "null", "undefined", "<na>", "[object object]"}
"""What programs write for a value that is not there."""
WITHOUT = "no targets"  # why data.without_targets=drop left a row out


@check("data.targets", after=["data.rows"])
def most_rows_have_something_to_learn(session: Session) -> Finding:
    """Is there something to learn in most rows?

    Measures which part of each sample is a target, and whether that is more than the end token.
    """
    skip_if(session.is_generated, GENERATED)
    report, look, pairs = session.train.report, flat_train(session), exchanges(session)
    without = [row for row in report.dropped if row.reason == WITHOUT]
    if 2 * len(without) > report.num_rows:
        return failed(
            f"{len(without):,} of {report.num_rows:,} rows have nothing to learn and were dropped",
            measured=(len(without), f"of {report.num_rows:,} rows"),
            evidence=[row.place for row in without[:SHOWN]],
            remedy="see that rows have assistant turns that are learned (roles, train: false, data.targets); what "
            "data.without_targets=drop leaves out is most of the data",
        )
    is_word_T = look.is_target_T & ~np.isin(look.ids_T, session.stops.ids)
    num_words_S = np.add.reduceat(is_word_T, look.start_S[:-1], dtype=np.int64)
    empty = np.flatnonzero(num_words_S == 0)
    answers = [pair.answer.strip() for pair in pairs]
    missing = [pair for pair in pairs if pair.answer.strip().lower() in MISSING]
    fewest = 4  # one answer for fewer rows says nothing
    # the last five are answers if others are there too
    placeholders = {*MISSING, "none", "n/a", "-", "?", "..."}
    if len(pairs) >= fewest and all(answer.lower() in placeholders for answer in answers):
        missing = pairs

    def about(same: Sequence[Exchange]) -> dict[str, Any]:
        """The finding about rows with one answer."""
        answer = cut_end(same[0].answer.strip(), 20)
        return {
            "says": f"{len(same):,} of {len(pairs):,} answers are {answer}",
            "measured": (len(same), f"of {len(pairs):,} rows"),
            "evidence": [pair.place for pair in same[:SHOWN]],
        }

    about_empty: dict[str, Any] = {
        "says": f"{empty.size:,} of {look.num_samples:,} samples have no answer but its end",
        "measured": (int(empty.size), f"of {look.num_samples:,} samples"),
        "evidence": [look.name(int(number)) for number in empty[:SHOWN]],
    }
    if 2 * empty.size > look.num_samples:
        remedy = (
            "the model would learn to say nothing; see what the answers are, and what the template writes of them "
            "(taut show)"
        )
        return failed(**about_empty, remedy=remedy)
    by_program = "a program wrote it where there was no value; remove these rows"
    if 2 * len(missing) > len(pairs):
        remedy = f"{by_program}, or name the right column in data.columns"
        return failed(**about(missing), remedy=remedy)
    if missing:
        return warned(**about(missing), remedy=by_program)
    if empty.size:
        remedy = "remove these rows, or the model learns to say nothing to some prompts"
        return warned(**about_empty, remedy=remedy)
    common, times = Counter(answers).most_common(1)[0] if answers else ("", 0)
    if common and times >= fewest and times > 0.9 * len(pairs):
        remedy = (
            "see that the answer's column is the right one (data.columns); a model that says the same to everything "
            "has the lowest loss on these rows"
        )
        return warned(**about([p for p in pairs if p.answer.strip() == common]), remedy=remedy)
    share = int(look.is_target_T.sum()) / look.ids_T.size
    notes = [f"{len(without):,} rows without targets were dropped"] if without else []
    says = f"{share:.0%} of tokens are targets{look.looked_at}"
    return passed(says, share, "of tokens", notes)


@check("data.truncation", after=["data.rows"])
def most_samples_are_kept_whole(session: Session) -> Finding:
    """Were most samples kept, and kept whole?

    What data.too_long and data.min_length did. A document that was cut has lost text and nothing else; an answer that
    was cut has lost the place where it ends.
    """
    report, config = session.train.report, session.run.data
    dropped = [row for row in report.dropped if row.reason != WITHOUT]
    cut = [row for row in report.cut if row.targets_lost]
    is_split = config.too_long == "split"
    are_documents = all(isinstance(row, Document) for row in first_rows(session))
    lost = [*dropped, *([] if are_documents else cut)]
    number, unit = report.num_rows if is_split else report.num_samples + len(dropped), "samples"
    num_lost = len(lost)
    if session.run.compares_answers:
        number, unit = report.num_rows, "rows"
        num_lost = len({re.sub(r"#\d+$", "", row.place) for row in lost})
    targets_lost = sum(row.targets_lost for row in (*dropped, *cut))
    share = targets_lost / (report.num_targets + targets_lost)
    if 2 * num_lost > number:
        what = "were dropped for their length" if len(dropped) >= len(cut) else "lost their end"
        return failed(
            f"{num_lost:,} of {number:,} {unit} {what}",
            measured=(num_lost, f"of {number:,} {unit}"),
            evidence=[f"{row.place}: {row.reason}" for row in lost[:SHOWN]],
            remedy=f"{share:.1%} of what is to be learned is gone; raise data.max_length, or lower data.min_length",
        )
    if not report.dropped and not report.cut:
        return passed("nothing cut, nothing dropped", 0.0, "of targets lost")
    num_other = len(report.cut) - len(cut)
    how = "split into windows" if is_split else "cut after their last target"
    notes = [f"{num_other:,} {how}"] if num_other else []
    says = f"{len(cut):,} cut, {len(dropped):,} dropped for their length"
    return passed(says, share, "of targets lost", notes)


# -- micro-batches


@check("data.packing", after=["model.trains"])
def every_sample_is_seen_once_and_whole(session: Session) -> Finding:
    """Is every sample seen once an epoch, and all of it, with nothing else?

    The plan of the first epoch and of the first steps, made as training makes it. If the run generates, prompts are
    counted and a dry run is laid out.

    An epoch has each sample as often as its weight says, the first window of a stream once; of data too large for an
    array over their samples, this is asked of the first steps. A step's micro-batches have exactly its samples: ids,
    positions, targets, weights and values, read back along what each token sees. Compared answers are in one
    micro-batch. None has more tokens than the budget, except for one sample, or one row of compared answers, alone.
    """
    source, last = session.trainer.source, session.trainer.num_steps
    assert isinstance(source, Offline | Online | Streamed)
    wrong: list[str] = []
    counts, weights, seen = _first_epoch(source)
    ends = np.cumsum(counts)
    for indices, is_all in seen:
        index_S, times_S = _counted(indices, sum(counts) if is_all else None)
        weight_S = np.array(weights)[np.searchsorted(ends, index_S, side="right")]
        is_wrong_S = (times_S > np.ceil(weight_S)) | (is_all & (times_S < np.floor(weight_S)))
        for at in np.flatnonzero(is_wrong_S)[:SHOWN].tolist():
            index = int(index_S[at])
            first = session.train.row(index).start if session.run.compares_answers else index
            name = session.train.sample_id(first)
            wrong.append(
                f"{name} is seen {times_S[at]} times an epoch, its weight is {weight_S[at]:g}"
            )
    begin = source.order.origin.step + 1 if isinstance(source, Offline) else 1
    plans: list[StepPlan] = []
    for step in range(begin, min(begin + 4, last) + 1):
        if isinstance(source, Streamed) and not source.is_known(step):
            break
        trees = session.trees if isinstance(source, Online) else source.prepare(step)
        packs = lay_out(trees, session.trainer.budget, session.trainer.policy)
        wrong += _wrong_in_step(trees, packs, session.trainer.budget)
        plans.append(step_plan(step, trees, packs))
        num_planned = sum(plan.unshared for plan in plans)
        if wrong or isinstance(source, Online) or num_planned > 100_000:
            break
    if wrong:
        return failed(
            f"the plan is wrong: {wrong[0]}",
            measured=(len(wrong), "differences"),
            evidence=wrong[:SHOWN],
            remedy="please report this, with the data if they may be shown; batch.share_prefixes=false and "
            "batch.group_prefixes=false may avoid it",
        )
    padded, unshared, computed, num_microbatches = (
        sum(getattr(plan, name) for plan in plans)
        for name in ("padded", "unshared", "computed", "num_microbatches")
    )
    notes = []
    if plans:
        notes.append(
            f"{padded:,} tokens if padded, {unshared:,} packed, {computed:,} with prefixes shared: "
            f"{1 - computed / padded:.0%} saved"
        )
    says = f"computed in {num_microbatches:,} micro-batches of the first {len(plans)} steps"
    return passed(says, computed, "tokens", notes)


def _first_epoch(
    source: Offline | Online | Streamed,
) -> tuple[Sequence[int], Sequence[float], list[tuple[IntArray, bool]]]:
    """The samples of each source, how often an epoch has each, and the indices of the first epoch or its first steps,
    with whether they are all. The first window of a stream has each sample once.
    """
    if isinstance(source, Streamed):
        size = source.stream.windows[0]["size"]
        _, indices = source.stream.at(0, size, source.seed)
        return (size,), (1.0,), [(np.asarray(indices), True)]
    order = replace(source.order, origin=START)
    most_counted = 2_000
    num_steps = min(most_counted, order.num_steps(1.0))
    stepped = [index for step in range(1, num_steps + 1) for index in order.step(step, 1.0)]
    is_whole = len(stepped) >= order.epoch_size or num_steps < most_counted
    seen = [(np.asarray(stepped), is_whole)]
    if not order.is_large:
        seen.append((order.epoch(0), True))
    return order.counts, order.weights, seen


def _counted(indices: IntArray, num_samples: int | None) -> tuple[IntArray, IntArray]:
    """The samples among ``indices``, or with ``num_samples`` all of them, and how often each is there."""
    if num_samples is None:
        return np.unique(indices, return_counts=True)
    return np.arange(num_samples), np.bincount(indices, minlength=num_samples)


def _wrong_in_step(trees: Sequence[Tree], packs: Sequence[Packed], budget: Budget) -> Iterator[str]:
    """How a step's micro-batches differ from its samples."""
    samples = samples_of(trees)
    by_id = {sample.id: sample for sample in samples}
    expected = Counter(sample.id for sample in samples)
    actual = Counter(name for packed in packs for name in packed.sample_ids)
    for name in sorted((expected - actual) | (actual - expected)):
        yield f"{name} is {actual[name]} times in a step that has it {expected[name]} times"
    for packed in packs:
        for row, name in enumerate(packed.sample_ids):
            if name in by_id:
                yield from _wrong_in_pack(by_id[name], packed, row)
    num_pairs, atoms = 0, list[list[str]]()
    for tree in trees:
        names = {sample.id for sample in tree.samples}
        holders = [packed for packed in packs if names & set(packed.sample_ids)]
        if tree.is_atom and any(not names <= set(packed.sample_ids) for packed in holders):
            yield f"{tree.samples[0].id} is not in one micro-batch with what it is compared with"
        ranks = [s.values.get("preference", 0.0) for s in tree.samples if s.group >= 0]
        num_pairs += sum(left != right for left, right in combinations(ranks, 2))
        atoms += [sorted(sample.id for sample in tree.samples)] if tree.is_atom else []
    num_compared = sum(packed.num_pairs for packed in packs)
    if num_compared != num_pairs:
        yield f"{num_compared} pairs are compared in a step that has {num_pairs}"
    for packed in packs:
        if packed.num_samples == 1 or sorted(packed.sample_ids) in atoms:
            continue
        if packed.num_tokens > budget.tokens_per_microbatch or budget.one_sample:
            most = f"{budget.tokens_per_microbatch:,} tokens"
            allowed = "one sample" if budget.one_sample else most
            yield f"a micro-batch of {packed.num_samples} samples has {packed.num_tokens:,} tokens, of {allowed}"


def _wrong_in_pack(sample: Sample, packed: Packed, row: int) -> Iterator[str]:
    """One sample, read back from a micro-batch."""
    reads = packed.read_R[packed.row_R == row]
    last_read = reads[-1]
    path = (packed.reach_T[: last_read + 1] > last_read).nonzero()[:, 0]
    is_own = packed.row_N == row
    at_R = [sample.num_tokens - 1] if sample.read_at_R is None else sample.read_at_R
    size = int(at_R[-1]) + 1  # nothing depends on tokens after the last read
    numbered = positions_of(sample.num_tokens, sample.media)
    positions = packed.position_ids[..., path]
    expected_positions = np.arange(size) if numbered is None else numbered[:, :size]
    parts = {
        "tokens": (packed.ids_T[path], sample.ids_T[:size]),
        "positions": (positions, np.broadcast_to(expected_positions, positions.shape)),
        "targets": (packed.target_N[is_own], sample.ids_T[sample.target_at_N]),
        "weights": (packed.weight_N[is_own], sample.weight_N),
    }
    for part, (actual, expected) in parts.items():
        if not np.array_equal(actual.numpy(), expected):
            yield f"{sample.id} has other {part} in its micro-batch"
            return
    digests = {media.start: media.picture.digest for media in packed.media}
    for media in sample.media:
        if media.start < size and digests.get(int(path[media.start])) != media.picture.digest:
            yield f"{sample.id} has another picture in its micro-batch"
            break
    predictors = path.numpy()[sample.target_at_N - 1]
    if not np.array_equal(packed.predictor_N[is_own].numpy(), predictors):
        yield f"{sample.id}: a target is not predicted by the token before it"
    if not np.array_equal(reads.numpy(), path.numpy()[at_R]):
        where = "last token" if sample.read_at_R is None else "steps"
        yield f"{sample.id} is not read at its {where}"
    for name, value in sample.values.items():
        packed_value = float(packed.values[name][row])
        if packed_value != value:
            yield f"{sample.id}: its {name} is {packed_value:g} in its micro-batch, {value:g} in the data"
    for name, value_R in sample.read_values.items():
        if not np.array_equal(packed.read_values[name][packed.row_R == row].numpy(), value_R):
            yield f"{sample.id}: its steps have another {name} in its micro-batch"
