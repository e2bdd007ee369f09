"""What the checks of judged data share: the pairs of the training data as ids, and values of its samples.

Of a list of more than two answers the best and the worst are the pair. A bounded number of rows, spread evenly.
"""

from __future__ import annotations

import numpy as np

from taut.checks.session import Session
from taut.data.cache import VALUE
from taut.data.label_noise import PairIds, PairReport, examine_pairs
from taut.data.packing import ids_with_pictures
from taut.types import FloatArray, Sample

ROWS = 10_000
"""Rows that are looked at."""


def pair_report(session: Session) -> PairReport:
    """What the training data say of their own labels."""
    starts = session.train.rows
    num_rows = len(starts) - 1
    chosen = np.unique(np.linspace(0, num_rows - 1, min(num_rows, ROWS)).astype(np.int64))
    pairs = []
    for index in chosen.tolist():
        row = session.train[int(starts[index]) : int(starts[index + 1])]
        ordered = sorted(row, key=lambda one: one.values["preference"])
        pairs.append(_pair(ordered[-1], ordered[0]))
    return examine_pairs(pairs, session.run.seed)


def _pair(better: Sample, worse: Sample) -> PairIds:
    begin, other = int(better.target_at_N[0]), int(worse.target_at_N[0])
    place = better.id.partition("#")[0]
    asked_T = ids_with_pictures(better)[:begin]
    return PairIds(place, asked_T, better.ids_T[begin:], worse.ids_T[other:])


def values(session: Session, name: str) -> FloatArray:
    """A value of every training sample, in their order."""
    found = [np.asarray(part.entry.arrays[VALUE + name]) for part in session.train.parts]
    return np.concatenate(found).astype(np.float64)
