"""The data: files as records, records as rows, rows as samples, samples as micro-batches.

Looking must not take longer than a moment, so a bounded part of each is looked at: the first records of each source,
the words of up to 200,000 rows, and samples spread evenly over a split. Findings say how many. What rows say (repeats,
leaks, labels) is in data_quality.py, which uses what is read here.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from taut.checks.chat_template import short_place
from taut.checks.registry import Finding, check, failed, passed, skipped, split_error, warned
from taut.checks.session import GENERATED, Session, Unavailable, once, owned_by
from taut.data.batching import START, Order, StepPlan, lay_out, samples_of, step_plan
from taut.data.dataset import Attempt, Dataset, attempt_rows, sources
from taut.data.messages import PICTURES, Completion, Conversation, Document, Row, images_of, text_of
from taut.data.prompts import PromptSet
from taut.data.render import Limits
from taut.data.schema import REQUIRED, Columns, Recognised, best_row, read_any, recognise, renamed
from taut.data.sources import open_source
from taut.errors import DataError, PictureError, TautError
from taut.methods.method import Offline
from taut.rl.online import Online
from taut.types import IntArray, Packed, Sample, Tree
from taut.vision.content import ImageRef, decoded_size, encoded, require_allowed
from taut.vision.placeholders import positions_of

SHOWN = 4
"""Lines of evidence."""

# -- records, as the files have them

RECORDS = 2000
"""Records of a split that are looked at, the first of each source."""


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
        named = sources(session.run.data, split, session.run.row_kind)
        for source, columns in named:
            opened = open_source(source)
            for line, value in islice(opened.attempts(), RECORDS // len(named) + 1):
                if not isinstance(value, DataError):
                    place = f"{opened.path}:{line}"
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
    named = (picture for record in records(session) for picture in _pictures_of(record))
    pictures = list(islice(named, PICTURES_OPENED))
    if not pictures:
        num_ignored = sum(map(_num_ignored_pictures, records(session)))
        if num_ignored:
            return passed("the pictures are left out: data.ignore_keys", num_ignored, "pictures")
        return skipped("no row that can be read names a picture")
    images = session.run.data.images
    try:
        image_store = session.language.renderer.image_store
    except Unavailable:
        image_store = None
    broken = []
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
    unit = f"of {len(pictures):,} pictures"
    if not broken:
        return passed("every picture can be read", len(pictures), "pictures")
    says = f"{len(broken):,} {unit} cannot be read"
    if images.bad == "drop":
        return passed(f"{says}, and their rows are left out", len(broken), unit, broken[:SHOWN])
    return failed(
        says,
        number=len(broken),
        unit=unit,
        evidence=broken[:SHOWN],
        remedy="correct the paths (from data.images.folder or the data file's directory, or from here), or leave the "
        'rows out with data.images.bad="drop"; text alone is trained with the column in data.ignore_keys',
    )


def _pictures_of(record: Record) -> Iterator[tuple[str, ImageRef | PictureError]]:
    """The pictures of a record, or what is wrong with one before it is looked for."""
    try:
        row = best_row(read_any(record.value, record.place, record.columns))
    except PictureError as error:
        yield record.place, error
        return
    except DataError:
        return
    for ref in images_of(row.messages) if isinstance(row, Conversation) else ():
        yield record.place, ref


def _num_ignored_pictures(record: Record) -> int:
    """Pictures in columns, and in keys of messages, that are not read."""
    if not isinstance(record.value, dict):
        return 0
    lists = [value for value in record.value.values() if isinstance(value, list)]
    messages = [item for column in lists for item in column if isinstance(item, dict)]
    number = 0
    for holder in (record.value, *messages):
        for key in set(PICTURES) & set(record.columns.ignore_keys):
            value = holder.get(key)
            number += len(value) if isinstance(value, list) else int(value not in (None, ""))
    return number


RARELY = 0.05
"""A column with words in a smaller share of its source's rows is not one that the run was to use."""
_ANSWER = ("answer", "response", "output", "label", "target", "solution", "completion")
ANSWERS = {*_ANSWER, *(f"{name}s" for name in _ANSWER), "summary", "reply"}
"""What is to be learned, by the names that data sets give it."""
_CONTEXT = ("context", "passage", "document", "input")
CONTEXTS = {*_CONTEXT, *(f"{name}s" for name in _CONTEXT)}
"""What a question is about, by the names that data sets give it."""
SEEN = {"alpaca": {*CONTEXTS, "tools"}, "completion": {*CONTEXTS, "system", "history", "tools"}}
"""Columns that a prompt should have, if a format does not read them."""
FOR_TESTS = {"input", "inputs"}
"""Columns that a reward may want in addition to a prompt."""
CHOICE = ("chosen", "rejected")
"""Columns of which one holds a worse answer."""
VERDICT = "label"
"""Next to an answer, true or false: whether it is a good one."""
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
    if not first:
        return skipped("there is no record to look at")
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
            number=len(errors),
            unit=f"of {len(first):,} rows",
            evidence=[says],
            remedy=remedy,
        )
    if not session.is_generated and (fault := _preferences_not_read(read)):
        return fault
    lost = _lost_columns(read, {*FOR_TESTS, *ANSWERS} if session.is_generated else set())
    if lost:
        (source, name), examples = next(iter(lost.items()))
        kind = examples[0].how.format
        return failed(
            f"the column {name} is passed over: format {kind} does not read it",
            number=len(examples),
            unit=f"of {sum(one.record.source == source for one in read):,} rows",
            evidence=[ones[0].shown(column) for (_, column), ones in lost.items()][:SHOWN],
            remedy=REMEDY_BY_FORMAT["tools" if name == "tools" else kind].format(name)
            + ", or name it in data.ignore_keys if it is not to be used",
        )
    kinds = " and ".join(Counter(one.how.format for one in read))
    if session.is_generated:
        return passed(f"{kinds}; rewards read the other columns", len(read), "rows")
    counts = Counter(name for one in read for name in one.how.unread)
    notes = [f"not read: {name}, in {times:,} rows" for name, times in counts.most_common(SHOWN)]
    left = f"{len(counts)} columns are not read" if counts else "every column is read"
    return passed(f"{kinds}; {left}", len(read), "rows", notes)


def _preferences_not_read(read: Sequence[ReadRecord]) -> Finding | None:
    """Rows that compare or judge answers, of which every answer would be learned, or none."""
    trained = [one for one in read if one.record.split == "train"]
    unit = f"of {len(trained):,} rows"
    paired = [
        one
        for one in trained
        if all(name in one.how.unread for name in CHOICE) and one.is_nowhere_else(CHOICE[0])
    ]
    if 2 * len(paired) > len(trained):
        return failed(
            f"the rows are preferences: {' and '.join(CHOICE)} are passed over",
            number=len(paired),
            unit=unit,
            evidence=[paired[0].shown(name) for name in CHOICE],
            remedy=f"write the {CHOICE[0]} answer as the last message and leave {CHOICE[1]} out, or name both in "
            "data.ignore_keys if the answers to learn are in the other columns",
        )
    judged = [one for one in trained if isinstance(one.how.unread.get(VERDICT), bool)]
    bad = [one for one in judged if not one.how.unread[VERDICT]]
    if 2 * len(judged) > len(trained) and 0 < len(bad) < len(judged):
        return failed(
            f"{len(bad):,} of {len(trained):,} answers are marked {VERDICT} false, and would be learned",
            number=len(bad),
            unit=unit,
            evidence=[f"{one.record.place}: {VERDICT} is false" for one in bad[:SHOWN]],
            remedy=f"keep the rows whose {VERDICT} is true, or name {VERDICT} in data.ignore_keys if it says something "
            "else",
        )
    return None


def _lost_columns(
    read: Sequence[ReadRecord], not_wanted: set[str]
) -> dict[tuple[str, str], list[ReadRecord]]:
    """(source, column) -> the rows in which its words are lost, if those are more than a few."""
    lost: dict[tuple[str, str], list[ReadRecord]] = {}
    for one in read:
        kind, columns = one.how.format, one.record.columns
        wanted = SEEN.get(kind, set())
        if kind == "text" and one.record.split == "train" and columns.format == "auto":
            is_chosen = any(name in columns.mapping for name in REQUIRED[kind])
            wanted = set() if is_chosen else ANSWERS
        for name in one.how.unread:
            if name.lower() in wanted - not_wanted and one.is_nowhere_else(name):
                lost.setdefault((one.record.source, name), []).append(one)
    num_of = Counter(one.record.source for one in read)
    return {key: ones for key, ones in lost.items() if len(ones) > RARELY * num_of[key[0]]}


# -- rows

PARTICULAR = re.compile(r"\d+|'[^']*'")
"""What differs between errors of one kind."""
MOST_ROWS = 200_000
"""Rows of a source that are gone through once there is an error."""


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
        bad, number = _rows_with_errors(session)
        says, remedy = split_error(missing.error)
        if not bad:
            return failed(says, remedy=remedy)
        return failed(
            f"{len(bad):,} of {number:,} rows cannot be trained on",
            number=len(bad),
            unit=f"of {number:,} rows",
            evidence=_kinds_of_errors(bad),
            remedy="correct these rows, or leave them out of the file",
        )
    says = ", ".join(f"{one.report.num_samples:,} of {name}" for name, one in data)
    return passed(f"samples: {says}", sum(one.report.num_rows for _, one in data), "rows")


def _rows_with_errors(session: Session) -> tuple[list[Attempt], int]:
    """Rows with an error, and how many rows there are."""
    bad: list[Attempt] = []
    number = 0
    if session.is_generated:
        return bad, number
    config, renderer = session.run.data, session.renderer
    longest = session.run.longest_sample(session.language.config)
    limits = Limits(longest, config.too_long, config.min_length, config.without_targets)
    try:
        for split in _splits(session):
            for source, columns in sources(config, split, session.run.row_kind):
                attempts = attempt_rows(open_source(source), columns, renderer, limits)
                for attempt in islice(attempts, MOST_ROWS):
                    number += 1
                    bad += [attempt] if attempt.error else []
    except TautError:  # a file that ends in the middle of a record: the error is the one known
        return bad, number
    return bad, number


def _kinds_of_errors(bad: Sequence[Attempt]) -> list[str]:
    """The first row of each kind of error, most frequent first, and how many there are of that kind."""
    first: dict[str, str] = {}
    times: Counter[str] = Counter()
    for attempt in bad:
        reason = str(attempt.error).partition("; ")[0].removeprefix(attempt.place)
        kind = PARTICULAR.sub("", reason)
        first.setdefault(kind, str(attempt.error))
        times[kind] += 1
    return [
        first[kind] + (f" ({number:,} such rows)" if number > 1 else "")
        for kind, number in times.most_common(SHOWN)
    ]


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
        for asked in session.train.asked:
            prompt = "" if isinstance(asked.prompt, str) else words(asked.prompt)
            for reference in asked.references[:1]:
                pairs.append(Exchange(asked.place, prompt or str(asked.prompt), reference))
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


class BrokenText(NamedTuple):
    """A row with a broken character."""

    place: str
    what: str
    """UNDECODED, MISREAD or CONTROLS."""
    excerpt: str


class Texts(NamedTuple):
    """Hashes of the rows of a split, to find duplicates.

    Hashed are the columns that the run reads, numbers and pictures included; columns that it does not read (an id, a
    source) are left out. Two rows are near-duplicates if they are equal without case and white space.
    """

    places: list[str]
    """``train.jsonl:17``, as the source names it."""
    exact_S: NDArray[np.int64]
    """A hash of each row, of this process only."""
    normal_S: NDArray[np.int64]
    """The same without case and white space."""
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
    return {split: _texts_of_split(session, split) for split in _splits(session)}


def _texts_of_split(session: Session, split: Any) -> Texts:
    places: list[str] = []
    exact: list[int] = []
    normal: list[int] = []
    broken: list[BrokenText] = []
    named = sources(session.run.data, split, session.run.row_kind)
    most, room, is_whole = TEXT_ROWS // len(named), CHARACTERS, True
    for source, columns in named:
        opened = open_source(source)
        for number, (line, words) in enumerate(_words_of_rows(opened.attempts(), columns)):
            if number == most or room < 0:
                is_whole = False
                break
            place, joined = f"{opened.path}:{line}", "\0".join(words)
            room -= len(joined)
            places.append(place)
            exact.append(hash(joined))
            folded = joined.casefold().encode("utf-8", "surrogatepass")
            normal.append(hash(folded.translate(None, WHITE_SPACE)))
            if problem := broken_in(words):
                broken.append(BrokenText(place, *problem))
    hashes = np.array(exact, dtype=np.int64), np.array(normal, dtype=np.int64)
    return Texts(places, *hashes, broken, is_whole)


def _words_of_rows(
    attempts: Iterator[tuple[int, Any]], columns: Columns
) -> Iterator[tuple[int, list[str]]]:
    """The line of each record and the words read from it; records that fit no format are left to data.columns."""
    read_columns: dict[tuple[str, ...], list[str]] = {}
    for line, record in attempts:
        try:
            named = renamed(record, "", columns)
            names = tuple(named)
            if names not in read_columns:
                unread = recognise(record, "", columns).unread
                read_columns[names] = sorted(name for name in names if name not in unread)
        except DataError:
            continue
        yield line, [word for name in read_columns[names] for word in _words_in(named[name])]


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
        return text[max(0, start - AROUND) : stop + AROUND]

    for text in words:
        if REPLACED in text:
            at = text.index(REPLACED)
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


def _hash_with_pictures(ids_T: NDArray[Any], shown: Iterable[tuple[int, int]]) -> Hashes:
    """A number for each token, from its id and the pictures up to it: equal words about different pictures differ.

    ``shown``: where each picture begins, and the first eight bytes of its SHA-256.
    """
    seen_T = ids_T.astype(np.uint64)
    for start, content in shown:
        seen_T[start:] *= HASH
        seen_T[start:] += np.uint64(content)
    return seen_T


def seen_of(sample: Sample) -> Hashes:
    shown = [(media.start, int(media.picture.content[:16], 16)) for media in sample.media]
    return _hash_with_pictures(sample.ids_T, shown)


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
        places, lengths = _ranges(arrays["offsets"], chosen)
        ids.append(np.asarray(arrays["ids"][places]))
        stops = np.cumsum(lengths)
        seen.append(_seen_in(arrays, chosen, ids[-1], stops))
        target_places, counts = _ranges(arrays["target_offsets"], chosen)
        is_target = np.zeros(places.size, dtype=bool)
        is_target[arrays["target_at"][target_places] + np.repeat(stops - lengths, counts)] = True
        targets.append(is_target)
    start_S = np.concatenate([[0], np.cumsum(data.lengths[index_S])])
    is_target_T, seen_T = np.concatenate(targets), np.concatenate(seen)
    return Flat(data, index_S, np.concatenate(ids), start_S, is_target_T, seen_T)


def _ranges(offsets: IntArray, chosen: IntArray) -> tuple[IntArray, IntArray]:
    """The places of the chosen ranges, one after another, and the length of each."""
    starts = np.asarray(offsets[chosen])
    lengths = np.asarray(offsets[chosen + 1]) - starts
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum())), lengths


def _seen_in(
    arrays: Mapping[str, NDArray[Any]], chosen: IntArray, ids_T: NDArray[Any], stops: IntArray
) -> Hashes:
    """The chosen samples' tokens with the pictures before them."""
    if "media.offsets" not in arrays:
        return ids_T.astype(np.uint64)
    seen = []
    for index, own_T in zip(chosen.tolist(), np.split(ids_T, stops[:-1]), strict=True):
        first, last = arrays["media.offsets"][index : index + 2]
        contents = arrays["picture.content"][arrays["media.picture"][first:last]]
        numbers = [int.from_bytes(content[:8].tobytes(), "big") for content in contents]
        starts = arrays["media.at"][first:last, 0].tolist()
        seen.append(_hash_with_pictures(own_T, zip(starts, numbers, strict=True)))
    return np.concatenate(seen)


# -- tokens and targets

UNKNOWN = 0.2
BROKEN = 0.1
"""Shares of tokens and of rows from which on the data are not what they should be."""
SOME = 0.001
"""A larger share of rows with a broken character is a warning."""
ENTITY = re.compile("&(?:lt|gt|amp|quot|apos|nbsp|#39|#x27);")
"""How HTML writes a character."""
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
"""Tokens with which a tokenizer falls back on bytes."""


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
                number=index,
                unit=f"of {size:,} rows",
                evidence=[f"first in {place}", f"the tokenizer writes it {token!r}"],
                remedy="use the model's own tokenizer; tokens that somebody added to it are to be taken out and named "
                "in tokens.add, which gives the model rows for them",
            )
    unknown_id = tokenizer.unk_token_id
    is_unknown = look.ids_T == (-1 if unknown_id is None else unknown_id)
    num_unknown = int(is_unknown.sum())
    if num_unknown > UNKNOWN * look.ids_T.size:
        share = num_unknown / look.ids_T.size
        return failed(
            f"{share:.0%} of tokens are the unknown token {tokenizer.unk_token!r}",
            number=share,
            unit="of tokens",
            evidence=[f"first in {look.name(int(look.sample_T[is_unknown.argmax()]))}"],
            remedy="the tokenizer was not made for this language; train a model whose tokenizer knows it",
        )
    if fault := _broken_characters(session) or _escaped_texts(first_rows(session)):
        return fault
    broken = [one for split in texts(session).values() for one in split.broken]
    notes = [f"{len(broken):,} rows have broken characters"] if broken else []
    notes += _broken_examples(broken)
    if num_unknown:
        notes.append(f"{num_unknown:,} tokens are unknown")
    id_of = tokenizer.backend_tokenizer.token_to_id
    byte_ids = [index for byte in BYTES if (index := id_of(byte)) is not None]
    if byte_ids and (num_bytes := int(np.isin(look.ids_T, byte_ids).sum())):
        notes.append(f"{num_bytes:,} tokens are single bytes")
    num_used = int(np.count_nonzero(np.bincount(look.ids_T)))
    says = f"different tokens, {num_used / size:.1%} of the vocabulary{look.looked_at}"
    return passed(says, num_used, "tokens", notes)


def _broken_characters(session: Session) -> Finding | None:
    """Characters lost or doubled by a wrong encoding in many rows of the training data; or any in some rows."""
    train = texts(session)["train"]
    every = [one for split in texts(session).values() for one in split.broken]
    num_every = sum(len(split.places) for split in texts(session).values())
    misread = [one for one in train.broken if one.what != CONTROLS]
    is_many = len(misread) > BROKEN * len(train.places)
    broken, number = (misread, len(train.places)) if is_many else (every, num_every)
    if not is_many and len(broken) <= SOME * number:
        return None
    kinds = " or ".join(dict.fromkeys(one.what for one in broken))
    says, unit = f"{len(broken):,} of {number:,} rows have {kinds}", f"of {number:,} rows"
    if is_many:
        return failed(
            f"{says}{train.looked_at}",
            number=len(broken),
            unit=unit,
            evidence=_broken_examples(broken),
            remedy="the file was written after reading it in another encoding; write it again from its source, as "
            "UTF-8",
        )
    return warned(
        says,
        number=len(broken),
        unit=unit,
        evidence=_broken_examples(broken),
        remedy="look at these rows; correct them, or leave them out: the model learns to write such characters",
    )


def _broken_examples(broken: Sequence[BrokenText]) -> list[str]:
    """The first row of each different excerpt: one broken document may be in many rows."""
    first = {one.excerpt: one for one in reversed(broken)}
    different = [one for one in broken if first[one.excerpt] is one]
    return [f"{short_place(one.place)}: {one.excerpt!r} ({one.what})" for one in different[:SHOWN]]


def _escaped_texts(rows: Sequence[Row]) -> Finding | None:
    """Texts that some program escaped, if they are more than a few."""
    entities, line_breaks = [], []
    for row in rows:
        if isinstance(row, Document):
            text = row.text
        elif isinstance(row, Completion):
            text = row.prompt + row.completion
        else:
            text = "".join(text_of(message["content"]) for message in row.messages)
        if ENTITY.search(text):
            entities.append(row.place)
        if "\\n" in text and "\n" not in text:
            line_breaks.append(row.place)
    for what, places in (
        ("HTML entities, as &lt;", entities),
        ("\\n for line breaks", line_breaks),
    ):
        if len(places) > BROKEN * len(rows):
            return warned(
                f"{len(places):,} of {len(rows):,} rows have {what}",
                number=len(places),
                unit=f"of {len(rows):,} rows",
                evidence=places[:SHOWN],
                remedy="undo what the program that wrote the file did to its texts, or leave them if the answers are "
                "to be written so",
            )
    return None


MISSING = {"nan", "null", "undefined", "<na>", "[object object]"}
"""What programs write for a value that is not there."""
PLACEHOLDERS = {*MISSING, "none", "n/a", "-", "?", "..."}
"""The same, and words that are an answer if others are there too."""
MOSTLY = 0.9
"""An answer in a larger share of rows is a warning."""
FEWEST = 4
"""Rows without which one answer for all says nothing."""
WITHOUT = "no targets"
"""The reason of a row that data.without_targets=drop left out."""


@check("data.targets", after=["data.rows"])
def most_rows_have_something_to_learn(session: Session) -> Finding:
    """Is there something to learn in most rows?

    How much of each sample is learned, and whether it is more than where to end.
    """
    if session.is_generated:
        return skipped(GENERATED)
    report, look, pairs = session.train.report, flat_train(session), exchanges(session)
    without = [one for one in report.dropped if one.reason == WITHOUT]
    if 2 * len(without) > report.num_rows:
        return failed(
            f"{len(without):,} of {report.num_rows:,} rows have nothing to learn and were dropped",
            number=len(without),
            unit=f"of {report.num_rows:,} rows",
            evidence=[one.place for one in without[:SHOWN]],
            remedy="see that rows have assistant turns that are learned (roles, train: false, data.targets); what "
            "data.without_targets=drop leaves out is most of the data",
        )
    empty = only_ends(look, np.asarray(session.stops.ids))
    answers = [pair.answer.strip() for pair in pairs]
    missing = [pair for pair in pairs if pair.answer.strip().lower() in MISSING]
    if len(pairs) >= FEWEST and all(answer.lower() in PLACEHOLDERS for answer in answers):
        missing = pairs

    def no_answer(tell: Callable[..., Finding], remedy: str) -> Finding:
        return tell(
            f"{empty.size:,} of {look.num_samples:,} samples have no answer but its end",
            number=int(empty.size),
            unit=f"of {look.num_samples:,} samples",
            evidence=[look.name(int(number)) for number in empty[:SHOWN]],
            remedy=remedy,
        )

    def one_answer(tell: Callable[..., Finding], same: list[Exchange], remedy: str) -> Finding:
        return tell(
            f"{len(same):,} of {len(pairs):,} answers are {cut_end(same[0].answer.strip(), 20)}",
            number=len(same),
            unit=f"of {len(pairs):,} rows",
            evidence=[one.place for one in same[:SHOWN]],
            remedy=remedy,
        )

    if 2 * empty.size > look.num_samples:
        return no_answer(
            failed,
            "the model would learn to say nothing; see what the answers are, and what the template writes of them "
            "(taut show)",
        )
    by_program = "a program wrote it where there was no value; remove these rows"
    if 2 * len(missing) > len(pairs):
        remedy = f"{by_program}, or name the right column in data.columns"
        return one_answer(failed, missing, remedy)
    if missing:
        return one_answer(warned, missing, by_program)
    if empty.size:
        return no_answer(
            warned, "remove these rows, or the model learns to say nothing to some prompts"
        )
    common, times = Counter(answers).most_common(1)[0] if answers else ("", 0)
    if common and times >= FEWEST and times > MOSTLY * len(pairs):
        return one_answer(
            warned,
            [pair for pair in pairs if pair.answer.strip() == common],
            "see that the answer's column is the right one (data.columns); a model that says the same to "
            "everything has the lowest loss on these rows",
        )
    share = int(look.is_target_T.sum()) / look.ids_T.size
    notes = [f"{len(without):,} rows without targets were dropped"] if without else []
    says = f"{share:.0%} of tokens are targets{look.looked_at}"
    return passed(says, share, "of tokens", notes)


def only_ends(look: Flat, ends: IntArray) -> IntArray:
    """Samples all of whose targets end an answer."""
    is_word_T = look.is_target_T & ~np.isin(look.ids_T, ends)
    return np.flatnonzero(np.add.reduceat(is_word_T, look.start_S[:-1], dtype=np.int64) == 0)


@check("data.truncation", after=["data.rows"])
def most_samples_are_kept_whole(session: Session) -> Finding:
    """Were most samples kept, and kept whole?

    What data.too_long and data.min_length did. A document that was cut has lost text and nothing else; an answer that
    was cut has lost the place where it ends.
    """
    report, config = session.train.report, session.run.data
    dropped = [one for one in report.dropped if one.reason != WITHOUT]
    cut = [one for one in report.cut if one.targets_lost]
    is_split = config.too_long == "split"
    are_documents = all(isinstance(row, Document) for row in first_rows(session))
    lost = [*dropped, *([] if are_documents else cut)]
    number, unit = report.num_rows if is_split else report.num_samples + len(dropped), "samples"
    num_lost = len(lost)
    if session.run.compares_answers:
        number, unit = report.num_rows, "rows"
        num_lost = len({re.sub(r"#\d+$", "", one.place) for one in lost})
    targets_lost = sum(one.targets_lost for one in (*dropped, *cut))
    share = targets_lost / (report.num_targets + targets_lost)
    if 2 * num_lost > number:
        what = "were dropped for their length" if len(dropped) >= len(cut) else "lost their end"
        return failed(
            f"{num_lost:,} of {number:,} {unit} {what}",
            number=num_lost,
            unit=f"of {number:,} {unit}",
            evidence=[f"{one.place}: {one.reason}" for one in lost[:SHOWN]],
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

PLANNED_STEPS = 5
"""Steps that are laid out."""
PLANNED_TOKENS = 100_000
"""Tokens of steps that are laid out, the first whole."""
COUNTED_STEPS = 2_000
"""Steps whose samples are counted."""


@check("data.packing", after=["model.trains"])
def every_sample_is_seen_once_and_whole(session: Session) -> Finding:
    """Is every sample seen once an epoch, and all of it, with nothing else?

    The plan of the first epoch and of the first steps, made as training makes it. If the run generates, prompts are
    counted and a dry run is laid out.

    An epoch has each sample as often as its weight says. A step's micro-batches have exactly its samples: ids,
    positions, targets, weights and values, read back along what each token sees. Compared answers are in one
    micro-batch. None has more tokens than the budget, except for one sample, or one row of compared answers, alone.
    """
    source, last = session.trainer.source, session.trainer.num_steps
    assert isinstance(source, Offline | Online)
    wrong = list(_wrong_epoch(session, source.order))
    first = source.order.origin.step + 1 if isinstance(source, Offline) else 1
    plans: list[StepPlan] = []
    for step in range(first, min(first + PLANNED_STEPS - 1, last) + 1):
        trees = source.prepare(step) if isinstance(source, Offline) else session.trees
        packs = lay_out(trees, session.trainer.budget, session.trainer.policy)
        wrong += _wrong_samples(samples_of(trees), packs)
        wrong += _wrong_groups(trees, packs)
        wrong += _over_budget(session, trees, packs)
        plans.append(step_plan(step, trees, packs))
        num_planned = sum(plan.unshared for plan in plans)
        if wrong or not isinstance(source, Offline) or num_planned > PLANNED_TOKENS:
            break
    if wrong:
        return failed(
            f"the plan is wrong: {wrong[0]}",
            number=len(wrong),
            unit="differences",
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


def _wrong_epoch(session: Session, order: Order) -> Iterator[str]:
    """Samples that the first epoch has too often or too rarely."""
    order = replace(order, origin=START)
    num_steps = min(COUNTED_STEPS, order.num_steps(1.0))
    stepped = [i for step in range(1, num_steps + 1) for i in order.step(step, 1.0)]
    is_whole = len(stepped) >= order.epoch_size or num_steps < COUNTED_STEPS
    for indices, least in ((order.epoch(0), 1), (np.asarray(stepped), int(is_whole))):
        times = np.bincount(indices, minlength=order.weights.size)
        is_wrong = (times > np.ceil(order.weights)) | (times < least * np.floor(order.weights))
        for index in np.flatnonzero(is_wrong)[:SHOWN]:
            first = session.train.rows[index] if session.run.compares_answers else index
            name = session.train.sample_id(int(first))
            yield f"{name} is seen {times[index]} times an epoch, its weight is {order.weights[index]:g}"


def _wrong_samples(samples: Sequence[Sample], packs: Sequence[Packed]) -> Iterator[str]:
    """What is not in a step's micro-batches as it should be."""
    by_id = {sample.id: sample for sample in samples}
    expected = Counter(sample.id for sample in samples)
    actual = Counter(name for packed in packs for name in packed.sample_ids)
    for name in sorted((expected - actual) | (actual - expected)):
        yield f"{name} is {actual[name]} times in a step that has it {expected[name]} times"
    for packed in packs:
        for row, name in enumerate(packed.sample_ids):
            if name in by_id:
                yield from _wrong_in_pack(by_id[name], packed, row)


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


def _wrong_groups(trees: Sequence[Tree], packs: Sequence[Packed]) -> Iterator[str]:
    """Compared answers that are not together, and pairs that are not compared as often as they should be."""
    num_pairs = 0
    for tree in trees:
        names = {sample.id for sample in tree.samples}
        holders = [packed for packed in packs if names & set(packed.sample_ids)]
        if tree.is_atom and any(not names <= set(packed.sample_ids) for packed in holders):
            yield f"{tree.samples[0].id} is not in one micro-batch with what it is compared with"
        ranks = [one.values.get("preference", 0.0) for one in tree.samples if one.group >= 0]
        num_pairs += sum(left != right for left, right in combinations(ranks, 2))
    num_compared = sum(packed.num_pairs for packed in packs)
    if num_compared != num_pairs:
        yield f"{num_compared} pairs are compared in a step that has {num_pairs}"


def _over_budget(session: Session, trees: Sequence[Tree], packs: Sequence[Packed]) -> Iterator[str]:
    """Micro-batches with more tokens than allowed."""
    atoms = [sorted(sample.id for sample in tree.samples) for tree in trees if tree.is_atom]
    most, one_sample = (
        session.trainer.budget.tokens_per_microbatch,
        session.trainer.budget.one_sample,
    )
    for packed in packs:
        if packed.num_samples == 1 or sorted(packed.sample_ids) in atoms:
            continue
        if packed.num_tokens > most or one_sample:
            allowed = "one sample" if one_sample else f"{most:,} tokens"
            yield f"a micro-batch of {packed.num_samples} samples has {packed.num_tokens:,} tokens, of {allowed}"
