"""What is learned of each sample: how much, and whether there is anything to learn in it but where to end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from taut.checks.data.records import Exchange, Flat, exchanges, flat_train
from taut.checks.finding import Finding, failed, passed, skipped, warned
from taut.checks.samples import GENERATED
from taut.checks.session import Session
from taut.types import IntArray

SHOWN = 4
MISSING = {"nan", "null", "undefined", "<na>", "[object object]"}
"""What programs write for a value that is not there."""
PLACEHOLDERS = {*MISSING, "none", "n/a", "-", "?", "..."}
"""The same, and words that are an answer where others are there too."""
MOSTLY = 0.9
"""An answer in a larger share of rows is a warning."""
FEWEST = 4
"""Rows without which one answer for all says nothing."""
WITHOUT = "no targets"
"""The reason of a row that data.without_targets=drop left out."""


def ask(session: Session) -> Finding:
    """Is there something to learn in most rows?"""
    if session.is_generated:
        return skipped(GENERATED)
    report, look = session.train.report, session.once(flat_train)
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
    found = session.once(exchanges)
    missing = _missing(found)
    if 2 * empty.size > look.index_S.size:
        return _empty(
            failed,
            look,
            empty,
            "the model would learn to say nothing; see what the answers are, and what the template writes of them "
            "(taut show)",
        )
    if 2 * len(missing) > len(found):
        return _one_answer(
            failed,
            missing,
            found,
            "a program wrote it where there was no value; remove these rows, or name the right column in data.columns",
        )
    share = int(look.is_target_T.sum()) / look.ids_T.size
    notes = [f"{len(without):,} rows without targets were dropped"] if without else []
    said = f"{share:.0%} of tokens are targets{look.looked_at}"
    warning = _some(look, empty, missing, found)
    return warning or passed(said, share, "of tokens", notes)


def _some(
    look: Flat, empty: IntArray, missing: list[Exchange], found: list[Exchange]
) -> Finding | None:
    """Answers that are likely not meant, and are not most of them; or one answer for nearly all rows."""
    if missing:
        remedy = "a program wrote it where there was no value; remove these rows"
        return _one_answer(warned, missing, found, remedy)
    if empty.size:
        remedy = "remove these rows, or the model learns to say nothing to some prompts"
        return _empty(warned, look, empty, remedy)
    if same := _same(found):
        return _one_answer(
            warned,
            same,
            found,
            "see that the answer's column is the right one (data.columns); a model that says the same to "
            "everything has the lowest loss on these rows",
        )
    return None


def _empty(tell: Callable[..., Finding], look: Flat, empty: IntArray, remedy: str) -> Finding:
    """Samples whose answer is nothing but its end."""
    return tell(
        f"{empty.size:,} of {look.index_S.size:,} samples have no answer but its end",
        number=int(empty.size),
        unit=f"of {look.index_S.size:,} samples",
        evidence=[look.name(int(number)) for number in empty[:SHOWN]],
        remedy=remedy,
    )


def _one_answer(
    tell: Callable[..., Finding], some: list[Exchange], found: list[Exchange], remedy: str
) -> Finding:
    """Rows that have one and the same answer."""
    answer = some[0].answer.strip()
    return tell(
        f"{len(some):,} of {len(found):,} answers are {answer if len(answer) <= 20 else answer[:17] + '...'!r}",
        number=len(some),
        unit=f"of {len(found):,} rows",
        evidence=[one.place for one in some[:SHOWN]],
        remedy=remedy,
    )


def _missing(found: list[Exchange]) -> list[Exchange]:
    """Rows with no answer but what a program wrote in its place."""
    if len(found) >= FEWEST and all(one.answer.strip().lower() in PLACEHOLDERS for one in found):
        return found
    return [one for one in found if one.answer.strip().lower() in MISSING]


def _same(found: list[Exchange]) -> list[Exchange]:
    """The rows that have the answer of nearly all rows."""
    counts = Counter(one.answer.strip() for one in found)
    answer, times = counts.most_common(1)[0] if counts else ("", 0)
    if times < FEWEST or times <= MOSTLY * len(found) or not answer:
        return []
    return [one for one in found if one.answer.strip() == answer]


def only_ends(look: Flat, ends: IntArray) -> IntArray:
    """Samples all of whose targets end an answer."""
    is_word_T = look.is_target_T & ~np.isin(look.ids_T, ends)
    return np.flatnonzero(np.add.reduceat(is_word_T, look.start_S[:-1], dtype=np.int64) == 0)
