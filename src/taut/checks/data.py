"""The data: records as rows, rows as samples, tokens and targets.

These checks must not take longer than a moment, so each examines a bounded part and says how much: the first records of
each source (records.py), the words of up to 200,000 rows, or samples spread evenly over a split. data_quality.py checks
the contents of the rows (repeats, leaks, labels) with the data read here.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from taut.checks.chat_template import quoted, short_place
from taut.checks.records import records, splits
from taut.checks.registry import Finding, check, failed, passed, skip_if, split_error, warned
from taut.checks.session import GENERATED, Session, Unavailable, once, owned_by
from taut.data.dataset import Dataset, open_sources
from taut.data.read.sources import canonical
from taut.data.render.render import Limits
from taut.data.rows.messages import Completion, Conversation, Document, Row, text_of
from taut.data.rows.prompts import PromptSet
from taut.data.rows.schema import best_row, read_any, recognize, renamed
from taut.data.tokenize import attempt_rows
from taut.errors import DataError, EmptyError, TautError
from taut.types import IntArray

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
    # loading ended at the first error: read on, and count each kind
    config, renderer, number = session.run.data, session.renderer, 0
    longest = session.run.longest_sample(session.language.config)
    limits = Limits(longest, config.too_long, config.min_length, config.without_targets)
    first: dict[str, str] = {}  # kind of error -> the first of it
    times: Counter[str] = Counter()
    try:
        for split in splits(session):
            for _, columns, opened, _ in open_sources(config, split, session.run.row_kind):
                attempts = attempt_rows(opened, columns, renderer, limits)
                for attempt in islice(attempts, 200_000):
                    number += 1
                    is_left_out = isinstance(attempt.error, EmptyError) and columns.empty == "drop"
                    if attempt.error and not is_left_out:
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
            for kind, count in times.most_common()
        ],
        remedy="correct these rows, or leave them out of the file",
    )


@once
def first_rows(session: Session) -> list[Row]:
    """The first records of the training data as rows; of compared answers the best. Unreadable records are left to
    data.rows.
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
    """Prompts and answers of the training data: a conversation's last learned turn with its calls, or the reference of
    a prompt. Documents have none.
    """

    def said(message: Mapping[str, Any]) -> str:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        called = "\n".join(json.dumps(call, ensure_ascii=False, default=str) for call in calls)
        return "\n".join(filter(None, (text_of(message["content"]), called)))

    pairs = []
    if isinstance(session.train, PromptSet):
        for prompt_row in session.train.prompt_rows:
            asked = prompt_row.prompt
            prompt = asked if isinstance(asked, str) else "\n".join(map(said, asked))
            for reference in prompt_row.references[:1]:
                pairs.append(Exchange(prompt_row.place, prompt or str(asked), reference))
        return pairs
    for row in first_rows(session):
        if isinstance(row, Completion):
            pairs.append(Exchange(row.place, row.prompt, row.completion))
        elif isinstance(row, Conversation) and row.learned:
            last = row.learned[-1]
            prompt = "\n".join(map(said, row.messages[:last]))
            pairs.append(Exchange(row.place, prompt, said(row.messages[last])))
    return [pair for pair in pairs if pair.answer.strip()]


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
"""Windows-1252's characters for bytes without a character in Latin-1."""
MOJIBAKE = re.compile(
    "\u00c3[\u0080-\u00bf]|\u00c2[\u00a0-\u00bf]|\u00e2\u20ac|\u00ef\u00bb\u00bf"
    rf"|\u00c3[{WINDOWS}](?=\w)"  # a quotation mark or a dash may follow a word, and none is before a letter
    rf"|(?:[\u00d0\u00d1][{WINDOWS}\u0080-\u00bf]){{2}}"  # Cyrillic
)
"""UTF-8 that was read as Latin-1 or Windows-1252 and written again."""
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f]")
LOST = re.compile("\ufffd")


class BrokenText(NamedTuple):
    """A row with a broken character."""

    place: str
    what: str
    """Kind of damage: UNDECODED, MISREAD or CONTROLS."""
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
    """A hash of each row, valid in this process only."""
    normal_S: NDArray[np.int64]
    """A hash of each row without case, white space and punctuation."""
    broken: list[BrokenText]
    is_whole: bool
    """Whether all rows of the split were read."""

    @property
    def looked_at(self) -> str:
        """Text for a finding about the rows examined; empty if all rows were read."""
        return "" if self.is_whole else f"; the first {len(self.places):,} rows looked at"


@once
@owned_by("data.rows")
def texts(session: Session) -> dict[str, Texts]:
    """The rows of train, and of eval if there is one, the first of each source.

    100,000 rows of 1.4 kB take about 2 s of one core.
    """
    by_split = {}
    for split in splits(session):
        places, exact, normal, broken = list[str](), list[int](), list[int](), list[BrokenText]()
        named = open_sources(session.run.data, split, session.run.row_kind)
        room, is_whole = 400_000_000, True  # characters, beyond which no further row is read
        for _, columns, opened, _ in named:
            number, is_whole = 0, is_whole and not opened.is_part
            read_columns: dict[tuple[str, ...], list[str]] = {}
            for line, record in opened.read_records(strict=False):
                try:
                    values = renamed(record, "", columns)
                    names = tuple(values)
                    if names not in read_columns:
                        unread = recognize(record, "", columns).unread
                        read_columns[names] = sorted(name for name in names if name not in unread)
                except DataError:  # a record that fits no format is left to data.columns
                    continue
                if number == TEXT_ROWS // len(named) or room < 0:
                    is_whole = False
                    break
                # equal to the letter, and equal without case, white space and punctuation
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
    """All contents of a value, in order: texts, numbers, and a hash of bytes (a picture)."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        # arguments of calls count to the letter, with their keys
        whole = (
            [hashlib.sha256(canonical(value["arguments"])).hexdigest()]
            if "arguments" in value
            else []
        )
        value = [*value.values(), *whole]
    if isinstance(value, list | tuple):
        return [word for inside in value for word in _words_in(inside)]
    if isinstance(value, bytes):
        return [hashlib.blake2b(value, digest_size=8).hexdigest()]
    return [] if value is None else [str(value)]


def broken_in(words: list[str]) -> tuple[str, str] | None:
    """The fault of the first broken character in these texts, with the words around it; None if there is none."""
    for text in words:
        if text.isascii() and not text.encode().translate(None, ALLOWED):
            continue  # nearly every text, and far faster than the patterns
        for what, pattern in ((UNDECODED, LOST), (MISREAD, MOJIBAKE), (CONTROLS, CONTROL)):
            if match := pattern.search(text):
                return what, text[max(0, match.start() - 15) : match.end() + 15]
    return None


# -- samples, in flat arrays

SAMPLES = 20_000
TOKENS = 1_000_000
"""Maximum samples of a split to examine, and maximum tokens of them."""
HASH = np.uint64(0x9E3779B97F4A7C15)
Hashes: TypeAlias = NDArray[np.uint64]


def hash_with_pictures(ids_T: NDArray[Any], shown: Iterable[tuple[int, int]]) -> Hashes:
    """A number for each token, from its id and the pictures up to it: equal words about different pictures differ.
    ``shown``: the start of each picture, and the first eight bytes of its SHA-256.
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
    """Index of each sample in its split."""
    ids_T: NDArray[np.int32]
    start_S: IntArray
    """Start of each sample, and one more entry for the end."""
    is_target_T: NDArray[np.bool_]
    seen_T: Hashes
    """Each token with the pictures before it, for telling samples apart."""

    @property
    def num_samples(self) -> int:
        return int(self.index_S.size)

    @property
    def sample_T(self) -> IntArray:
        """Number of the sample, counted here, that each token belongs to."""
        return np.repeat(np.arange(self.num_samples), np.diff(self.start_S))

    @property
    def looked_at(self) -> str:
        """Text for a finding about the samples examined; empty if they are all."""
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
    """Samples spread evenly over the available ones: at most this many, with about this many tokens."""
    # samples at even distances, as many as the bounds allow
    looked = list(data.local_shards())
    own_S = np.concatenate([np.arange(own.start, own.stop) for own, _ in looked])
    share = tokens / sum(shard.counts.num_tokens for _, shard in looked)
    most = min(own_S.size, samples, max(1, int(share * own_S.size)))
    index_S = own_S[np.unique(np.linspace(0, own_S.size - 1, most).astype(np.int64))]
    ids, seen, targets, sizes = [], [], [], []
    for own, shard in looked:
        arrays = shard.arrays
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
        # targets, moved from places in samples to places in the flat array
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
"""Share of broken rows above which the whole file is taken to be at fault."""


@check("data.tokens", after=["data.rows"])
def tokens_are_those_of_the_text(session: Session) -> Finding:
    """Are the tokens those of the text that is meant?

    Ids the model has no row for, unknown tokens, broken characters, escaped texts. Special tokens in messages are
    ``template.markup``.
    """
    look, tokenizer, size = flat_train(session), session.tokenizer, session.language.num_rows
    for _, data in session.data:
        if beyond := data.first_id_over(size):
            place, index = beyond
            token = tokenizer.convert_ids_to_tokens(index)
            return failed(
                f"token {index} of the data has no row: the model has {size:,}",
                measured=(index, f"of {size:,} rows"),
                evidence=[f"first in {place}", f"the tokenizer writes it {token!r}"],
                remedy="use the model's own tokenizer; tokens that somebody added to it are to be taken out and named "
                "in tokens.add, which gives the model rows for them",
            )
    # the unknown token
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
    # a wrong encoding damages many rows, and then the whole file is at fault
    misread = [text for text in train.broken if text.what != CONTROLS]
    is_many = len(misread) > BROKEN * len(train.places)
    broken, number = (misread, len(train.places)) if is_many else (every, num_every)
    kinds = " or ".join(dict.fromkeys(text.what for text in broken))
    if is_many or len(broken) > 0.001 * number:
        remedy = (
            "the file was written after reading it in another encoding; write it again from its source, as UTF-8"
            if is_many
            else "look at these rows; correct them, or leave them out: the model learns to write such characters"
        )
        return (failed if is_many else warned)(
            f"{len(broken):,} of {number:,} rows have {kinds}{train.looked_at if is_many else ''}",
            measured=(len(broken), f"of {number:,} rows"),
            evidence=_broken_examples(broken),
            remedy=remedy,
        )
    rows = first_rows(session)
    # texts that some program escaped
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
                measured=(places, f"of {len(rows):,} rows"),
                remedy="undo what the program that wrote the file did to its texts, or leave them if the answers are "
                "to be written so",
            )
    return None


def _broken_examples(broken: Sequence[BrokenText]) -> list[str]:
    """The first row of each different excerpt: one broken document may be in many rows."""
    first = {text.excerpt: text for text in reversed(broken)}
    different = [text for text in broken if first[text.excerpt] is text]
    return [f"{short_place(text.place)}: {text.excerpt!r} ({text.what})" for text in different[:4]]


MISSING = {"nan", "null", "undefined", "<na>", "[object object]"}
"""Texts that programs write for a missing value."""
WITHOUT = ("no targets", " is empty")
"""Reasons of data.without_targets=drop and data.empty=drop for leaving out a row."""


@check("data.targets", after=["data.rows"])
def most_rows_have_something_to_learn(session: Session) -> Finding:
    """Is there something to learn in most rows?

    Measures which part of each sample is a target, and whether that is more than the end token.
    """
    skip_if(session.is_generated, GENERATED)
    report, look, pairs = session.train.report, flat_train(session), exchanges(session)
    # rows that were dropped for having nothing to learn
    without = [row for row in report.dropped if row.reason.endswith(WITHOUT)]
    if 2 * len(without) > report.num_rows:
        return failed(
            f"{len(without):,} of {report.num_rows:,} rows have nothing to learn and were dropped",
            measured=([row.place for row in without], f"of {report.num_rows:,} rows"),
            remedy="see that rows have assistant turns that are learned (roles, train: false, data.targets); "
            "data.without_targets=drop or data.empty=drop leaves most rows out",
        )
    # samples whose targets are their end alone
    is_word_T = look.is_target_T & ~np.isin(look.ids_T, session.stops.ids)
    num_words_S = np.add.reduceat(is_word_T, look.start_S[:-1], dtype=np.int64)
    empty = np.flatnonzero(num_words_S == 0)
    answers = [pair.answer.strip() for pair in pairs]
    # answers that a program wrote for a missing value
    missing = [pair for pair in pairs if pair.answer.strip().lower() in MISSING]
    fewest = 4  # one answer for fewer rows says nothing
    # the last five are answers if others are there too
    placeholders = {*MISSING, "none", "n/a", "-", "?", "..."}
    if len(pairs) >= fewest and all(answer.lower() in placeholders for answer in answers):
        missing = pairs

    def about(same: Sequence[Exchange]) -> dict[str, Any]:
        """The finding about rows with one answer."""
        answer = quoted(same[0].answer.strip(), 20)
        return {
            "says": f"{len(same):,} of {len(pairs):,} answers are {answer}",
            "measured": ([pair.place for pair in same], f"of {len(pairs):,} rows"),
        }

    about_empty: dict[str, Any] = {
        "says": f"{empty.size:,} of {look.num_samples:,} samples have no answer but its end",
        "measured": (list(map(look.name, empty.tolist())), f"of {look.num_samples:,} samples"),
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
    # one answer to nearly everything
    common, times = Counter(answers).most_common(1)[0] if answers else ("", 0)
    # a sentence has to be there less often than a label
    share = 0.9 if len(common) < 40 and len(common.split()) < 6 else 0.2
    if common and times >= fewest and times > share * len(pairs):
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
    # what was lost by length: whole rows, and ends of answers
    dropped = [row for row in report.dropped if not row.reason.endswith(WITHOUT)]
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
            evidence=[f"{row.place}: {row.reason}" for row in lost],
            remedy=f"{share:.1%} of what is to be learned is gone; raise data.max_length, or lower data.min_length",
        )
    if not report.dropped and not report.cut:
        return passed("nothing cut, nothing dropped", 0.0, "of targets lost")
    num_other = len(report.cut) - len(cut)
    how = "split into windows" if is_split else "cut after their last target"
    notes = [f"{num_other:,} {how}"] if num_other else []
    says = f"{len(cut):,} cut, {len(dropped):,} dropped for their length"
    return passed(says, share, "of targets lost", notes)
