"""Rows that are there more than once, equal or but for case and white space (``texts.py``).

A few are in most data sets and pass, with examples. A warning is what changes the run: more than one row in a hundred,
or one row ten times.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from taut.checks.data.texts import Texts, texts
from taut.checks.finding import Finding, passed, warned
from taut.checks.session import Session
from taut.checks.template.rendered import short

MOST = 0.01
"""A larger share of rows that repeat another is a warning."""
OFTEN = 10
"""So many times the same row are one too."""
SHOWN = 4


class Repeats(NamedTuple):
    """What is there more than once in a split."""

    num_rows: int
    num_repeats: int
    """Rows with an earlier one that is the same but for case and white space."""
    num_near: int
    """Of these, rows that are not equal to an earlier one."""
    most: int
    """How many times the most frequent row is there."""
    examples: list[str]

    @property
    def is_much(self) -> bool:
        return self.num_repeats > MOST * self.num_rows or self.most >= OFTEN


def ask(session: Session) -> Finding:
    """Are rows different from one another, in more than case and white space?"""
    found = {split: repeats_of(one) for split, one in session.once(texts).items()}
    num_rows = sum(one.num_rows for one in found.values())
    number, unit = sum(one.num_repeats for one in found.values()), f"of {num_rows:,} rows"
    parts = [f"{split}: {told(one)}" for split, one in found.items() if one.num_repeats]
    looked_at = "".join(dict.fromkeys(one.looked_at for one in session.once(texts).values()))
    said = (", ".join(parts) or "no row repeats another") + looked_at
    much = [one for one in found.values() if one.is_much]
    examples = [line for one in much or found.values() for line in one.examples]
    if not much:
        return passed(said, number, unit, examples)
    return warned(
        said,
        number=number,
        unit=unit,
        evidence=examples,
        remedy="take the repeated rows out: each counts as often as it is there; to weigh rows on purpose, give their "
        "file a weight",
    )


def repeats_of(looked: Texts) -> Repeats:
    """Rows of one split against each other."""
    _, first_G, group_S, count_G = np.unique(
        looked.normal_S, return_index=True, return_inverse=True, return_counts=True
    )
    num_repeats = looked.normal_S.size - first_G.size
    num_exact = looked.exact_S.size - np.unique(looked.exact_S).size
    examples = []
    for group in np.lexsort((first_G, -count_G))[:SHOWN]:
        if count_G[group] < 2:
            break
        first, second = np.flatnonzero(group_S == group)[:2]
        times = "twice" if count_G[group] == 2 else f"{count_G[group]:,} times"
        examples.append(
            f"{short(looked.places[first])} is there {times}, again in {_line(looked, second)}"
        )
    most = int(count_G.max(initial=0))
    return Repeats(len(looked.places), num_repeats, num_repeats - num_exact, most, examples)


def told(found: Repeats) -> str:
    """``27 of 300 rows repeat another, 12 of them but for case and white space, one is there 25 times``."""
    said = f"{found.num_repeats:,} of {found.num_rows:,} rows repeat another"
    if found.num_near:
        said += f", {found.num_near:,} of them with other case or white space"
    return said + (f", one is there {found.most:,} times" if found.most >= OFTEN else "")


def _line(looked: Texts, number: int) -> str:
    return looked.places[number].rpartition("/")[2]
