"""The columns of the first records, and which of them the recognised format does not read.

A column that is passed over is a loss where it holds what a run should learn or see, by the name it has, and its words
are nowhere else in the row (a prompt that was made of it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from taut.checks.data.records import Record, records, words_in
from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session
from taut.data.schema import REQUIRED, Recognised, recognise
from taut.errors import DataError

SHOWN = 4
RARELY = 0.05
"""A column with words in fewer rows of its source is not one that the run was to use."""
_ANSWER = ("answer", "response", "output", "label", "target", "solution", "completion")
ANSWERS = {*_ANSWER, *(f"{name}s" for name in _ANSWER), "summary", "reply"}
"""What is to be learned, by the names that data sets give it."""
_CONTEXT = ("context", "passage", "document", "input")
CONTEXTS = {*_CONTEXT, *(f"{name}s" for name in _CONTEXT)}
"""What a question is about, by the names that data sets give it."""
SEEN = {"alpaca": {*CONTEXTS, "tools"}, "completion": {*CONTEXTS, "system", "history", "tools"}}
"""Columns that a prompt should have, where a format does not read them."""
FOR_TESTS = {"input", "inputs"}
"""Columns that a reward may want, beside a prompt."""
CHOICE = ("chosen", "rejected")
"""Columns of which one holds a worse answer."""
VERDICT = "label"
"""Beside an answer, true or false: whether it is a good one."""
REMEDY = {
    "text": 'set data.columns={{prompt = "text", completion = "{0}"}}',
    "alpaca": 'set data.columns={{input = "{0}"}}, or join it to the instruction',
    "completion": "join it to the prompt",
    "tools": "give the rows as messages, which have tools",
}
"""What to do with a column that is passed over."""


class Read(NamedTuple):
    """A record, and how it is read."""

    record: Record
    how: Recognised


def ask(session: Session) -> Finding:
    """Is every column read that the model should see or learn?"""
    found = session.once(records)
    if not found:
        return skipped("there is no record to look at")
    read, errors = _recognised(found)
    if not read:
        says, _, remedy = str(errors[0]).rpartition("; ")
        unit = f"of {len(found):,} rows"
        return failed(
            "the columns are not understood",
            number=len(errors),
            unit=unit,
            evidence=[says],
            remedy=remedy,
        )
    problem = None if session.is_generated else _preferences(read)
    if problem:
        return problem
    lost = _lost(read, {*FOR_TESTS, *ANSWERS} if session.is_generated else set())
    if lost:
        (source, name), examples = next(iter(lost.items()))
        kind = examples[0].how.format
        return failed(
            f"the column {name} is passed over: format {kind} does not read it",
            number=len(examples),
            unit=f"of {_num_rows(read, source):,} rows",
            evidence=[_shown(name, it[0]) for (_, name), it in list(lost.items())[:SHOWN]],
            remedy=REMEDY["tools" if name == "tools" else kind].format(name)
            + ", or name it in data.ignore_keys if it is not to be used",
        )
    kinds = " and ".join(Counter(one.how.format for one in read))
    counts = Counter(name for one in read for name in one.how.unread)
    if session.is_generated:
        return passed(f"{kinds}; rewards read the other columns", len(read), "rows")
    notes = [f"not read: {name}, in {times:,} rows" for name, times in counts.most_common(SHOWN)]
    left = f"{len(counts)} columns are not read" if counts else "every column is read"
    return passed(f"{kinds}; {left}", len(read), "rows", notes)


def _recognised(found: Sequence[Record]) -> tuple[list[Read], list[DataError]]:
    """Records with how they are read, and the errors of those that no format fits."""
    read, errors = [], []
    for record in found:
        try:
            read.append(Read(record, recognise(record.value, record.place, record.columns)))
        except DataError as error:
            errors.append(error)
    return read, errors


def _preferences(read: Sequence[Read]) -> Finding | None:
    """Rows that compare or judge answers, where every answer would be learned, or none."""
    trained = [one for one in read if one.record.split == "train"]
    paired = [
        one
        for one in trained
        if all(name in one.how.unread for name in CHOICE) and _is_nowhere_else(one, CHOICE[0])
    ]
    judged = [one for one in trained if isinstance(one.how.unread.get(VERDICT), bool)]
    bad = [one for one in judged if not one.how.unread[VERDICT]]
    if 2 * len(paired) > len(trained):
        names = " and ".join(CHOICE)
        return failed(
            f"the rows are preferences: {names} are passed over",
            number=len(paired),
            unit=f"of {len(trained):,} rows",
            evidence=[_shown(name, paired[0]) for name in CHOICE],
            remedy=f"write the {CHOICE[0]} answer as the last message and leave {CHOICE[1]} out, or name both in "
            "data.ignore_keys if the answers to learn are in the other columns",
        )
    if 2 * len(judged) > len(trained) and 0 < len(bad) < len(judged):
        return failed(
            f"{len(bad):,} of {len(trained):,} answers are marked {VERDICT} false, and would be learned",
            number=len(bad),
            unit=f"of {len(trained):,} rows",
            evidence=[f"{one.record.place}: {VERDICT} is false" for one in bad[:SHOWN]],
            remedy=f"keep the rows whose {VERDICT} is true, or name {VERDICT} in data.ignore_keys if it says something "
            "else",
        )
    return None


def _lost(read: Sequence[Read], left: Collection[str]) -> dict[tuple[str, str], list[Read]]:
    """(source, column) -> the rows in which what it says is lost, where those are more than a few. ``left``: columns
    that need not be read.
    """
    found: dict[tuple[str, str], list[Read]] = {}
    for one in read:
        for name in one.how.unread:
            if name.lower() in _wanted(one) - {*left} and _is_nowhere_else(one, name):
                found.setdefault((one.record.source, name), []).append(one)
    return {key: it for key, it in found.items() if len(it) > RARELY * _num_rows(read, key[0])}


def _wanted(one: Read) -> set[str]:
    """Columns that this row should not go without."""
    kind, columns = one.how.format, one.record.columns
    if kind != "text":
        return SEEN.get(kind, set())
    is_chosen = columns.format != "auto" or any(name in columns.mapping for name in REQUIRED[kind])
    return set() if is_chosen or one.record.split != "train" else ANSWERS


def _is_nowhere_else(one: Read, name: str) -> bool:
    """Whether the column has words that no other column has. Numbers (a class, a score) are no words."""
    value = one.how.unread[name]
    words = [text.strip() for text in words_in(value) if text.strip()]
    others = [
        text for item in one.record.value.values() if item is not value for text in words_in(item)
    ]
    return any(not any(text in other for other in others) for text in words)


def _num_rows(read: Sequence[Read], source: str) -> int:
    return sum(one.record.source == source for one in read)


def _shown(name: str, one: Read) -> str:
    text = " ".join(words_in(one.how.unread[name]))
    return f"{one.record.place}: {name} is {text if len(text) <= 40 else text[:37] + '...'!r}"
