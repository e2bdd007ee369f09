"""Labels of answers that are good or bad by themselves: both kinds are there, and how heavily each counts.

    ratio = weight of the good * number of the good / (weight of the others * number of the others)

KTO's paper (arXiv 2402.01306) advises 1 to 4/3. Another one is a warning: it may be meant.
"""

from __future__ import annotations

from typing import Any

from taut.checks.data.compared import values
from taut.checks.finding import Finding, failed, passed, skipped, warned
from taut.checks.session import Session

LOW, HIGH = 1.0, 4 / 3
SLACK = 0.005


def ask(session: Session) -> Finding:
    """Are there good answers and bad ones?"""
    if session.run.row_kind != "unpaired":
        return skipped("the rows are not labelled good or bad")
    is_good_S = values(session, "label") > 0.5
    good, number = int(is_good_S.sum()), is_good_S.size
    if good in (0, number):
        kind = "true" if good else "false"
        return failed(
            f"all {number:,} answers are labelled {kind}",
            number=good,
            unit=f"of {number:,} are good",
            evidence=[session.train.sample_id(0)],
            remedy="one kind alone teaches no difference; add rows with the other label, or name the right column in "
            "data.columns",
        )
    loss: Any = session.run.loss()
    weights = loss.desirable_weight, loss.undesirable_weight
    ratio = weights[0] * good / (weights[1] * (number - good))
    unit = f"of {number:,} are good"
    if LOW - SLACK <= ratio <= HIGH + SLACK:
        return passed("both kinds are there", good, unit)
    return warned(
        f"weight times number is {ratio:.2f} : 1, and KTO's paper advises 1 to 1.33",
        number=good,
        unit=unit,
        remedy=f"set {_advised(good, number - good)}, unless one kind is to count more",
    )


def _advised(good: int, others: int) -> str:
    """A weight that gives a ratio of 1, the other left at 1."""
    if good < others:
        return f"kto.desirable_weight={others / good:.3g}"
    return f"kto.undesirable_weight={good / others:.3g}"
