"""Margins that a loss is told to take from the data, where the data have none: every pair would have a margin of 0."""

from __future__ import annotations

from typing import Any

import numpy as np

from taut.checks.data.compared import values
from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session


def ask(session: Session) -> Finding:
    """Have the data the margins that the loss is to read?"""
    loss: Any = session.run.loss()
    if "margin" not in loss.needs_values:
        return skipped("the loss reads no margins")
    margins_S = values(session, "margin")
    number = int(np.count_nonzero(margins_S))
    key = f"{session.run.method}.margin"
    if not number:
        return failed(
            f"{key}={loss.margin:g}, and no row has a margin",
            number=0,
            unit=f"of {margins_S.size:,} answers",
            evidence=[f"first: {session.train.sample_id(0)}"],
            remedy=f"name the column with data.columns (margin, or scores of both answers), or take {key} out",
        )
    return passed(
        "rows have margins", float(np.abs(margins_S[margins_S != 0]).mean()), "on average"
    )
