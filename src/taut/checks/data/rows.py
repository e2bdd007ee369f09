"""Each row through reading, rendering and fitting. Loading ends at the first error; here all of them are counted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import islice

from taut.checks.data.records import splits
from taut.checks.finding import Finding, failed, passed
from taut.checks.owned import Unavailable
from taut.checks.session import Session
from taut.data.dataset import Attempt, attempt_rows, sources
from taut.data.render import Limits
from taut.data.sources import open_source
from taut.errors import TautError
from taut.run.config import longest_sample

SHOWN = 4
PARTICULAR = re.compile(r"\d+|'[^']*'")
"""What differs between errors of one kind."""
MOST_ROWS = 200_000
"""Rows of a source that are gone through once there is an error."""


def ask(session: Session) -> Finding:
    """Can every row be read, rendered and fitted to length?"""
    try:
        data = session.data
    except Unavailable as missing:
        if missing.owner != "data.rows":
            raise
        return _failed(session, missing.error)
    num_rows = sum(one.report.num_rows for _, one in data)
    said = ", ".join(f"{one.report.num_samples:,} of {name}" for name, one in data)
    return passed(f"samples: {said}", num_rows, "rows")


def _failed(session: Session, error: TautError) -> Finding:
    """All errors, where rows have them; else the one that was raised."""
    bad, num_rows = _bad_rows(session)
    says, _, remedy = str(error).rpartition("; ")
    if not bad:
        return failed(says or remedy, remedy=remedy)
    return failed(
        f"{len(bad):,} of {num_rows:,} rows cannot be trained on",
        number=len(bad),
        unit=f"of {num_rows:,} rows",
        evidence=_kinds(bad),
        remedy="correct these rows, or leave them out of the file",
    )


def _bad_rows(session: Session) -> tuple[list[Attempt], int]:
    """Rows with an error, and how many rows there are."""
    if session.is_generated:
        return [], 0
    run, renderer = session.run.data, session.renderer
    longest = longest_sample(session.run, session.language.config)
    limits = Limits(longest, run.too_long, run.min_length, run.without_targets)
    bad: list[Attempt] = []
    num_rows = 0
    try:
        for split in splits(session):
            for source, columns in sources(run, split, session.run.objective.kind):
                found = attempt_rows(open_source(source), columns, renderer, limits)
                for attempt in islice(found, MOST_ROWS):
                    num_rows += 1
                    bad += [attempt] if attempt.error else []
    except TautError:  # a file that ends in the middle of a record: the error is the one known
        return bad, num_rows
    return bad, num_rows


def _kinds(bad: Sequence[Attempt]) -> list[str]:
    """The first row of each kind of error, most frequent first, and how many there are of that kind."""
    first: dict[str, str] = {}
    times: Counter[str] = Counter()
    for one in bad:
        kind = PARTICULAR.sub("", str(one.error).partition("; ")[0].removeprefix(one.place))
        first.setdefault(kind, str(one.error))
        times[kind] += 1
    return [
        first[kind] + (f" ({number:,} such rows)" if number > 1 else "")
        for kind, number in times.most_common(SHOWN)
    ]
