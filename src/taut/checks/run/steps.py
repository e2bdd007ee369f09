"""Which samples each step has, looked at as the method gives them: again, after a resume, and summed over an epoch.

The order is a pure function of the seed and the step; so a second object of it must say the same, whatever was asked of
the first before, and so must the one that a resumed run makes of a cursor.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session
from taut.data.plan import Order
from taut.methods.sft import Sft
from taut.types import IntArray, Tree

MOST = 200_000
"""Samples looked at of a long run."""
ORDER = (
    "the run could not be gone on with as it began; train without shuffle, and please report this"
)


def ask(session: Session) -> Finding:
    """Does each step have the samples it should, in this run and in one that goes on from it?"""
    method = session.job.method
    if not isinstance(method, Sft):
        return skipped("the method prepares its steps itself")
    return _count(session) or _repeats(method, session) or _coverage(method, session)


def _count(session: Session) -> Finding | None:
    """The number of steps, from the configuration and the data alone."""
    run, order = session.run, _order(session)
    if run.steps is not None:
        wanted = run.steps
    else:
        samples = max(1, round((1.0 if run.epochs is None else run.epochs) * order.epoch_size))
        wanted = -(-samples // run.batch.samples_per_step)
    if session.job.num_steps == wanted or order.origin.step:
        return None
    asked = f"steps={run.steps}" if run.steps is not None else f"epochs={run.epochs or 1}"
    return failed(
        f"the run has {session.job.num_steps} steps where {asked} makes {wanted}",
        number=session.job.num_steps,
        unit="steps",
        evidence=[f"{order.epoch_size} samples an epoch, {run.batch.samples_per_step} a step"],
        remedy="set steps to the number that is wanted, and please report this",
    )


def _repeats(method: Sft, session: Session) -> Finding | None:
    """The same step twice, and the next step after a resume."""
    first, last = method.order.origin.step + 1, session.job.num_steps
    for step in sorted({first, first + 1, (first + last) // 2, last} & {*range(first, last + 1)}):
        before = _ids(method.prepare(step))
        again = _ids(replace(method, order=replace(method.order)).prepare(step))
        if before != again:
            return failed(
                f"step {step} has other samples when it is prepared again",
                number=step,
                unit="is the step",
                evidence=[f"first {before[:4]}", f"then {again[:4]}"],
                remedy=ORDER,
            )
        cursor = method.cursor(step - 1)
        order = replace(method.order).going_on_from(cursor, method.epochs)
        resumed = _ids(replace(method, order=order).prepare(step))
        if before != resumed:
            return failed(
                f"after a resume step {step} has other samples",
                number=step,
                unit="is the step",
                evidence=[f"uninterrupted {before[:4]}", f"resumed {resumed[:4]}"],
                remedy=ORDER,
            )
    return None


def _coverage(method: Sft, session: Session) -> Finding:
    """How often each sample is seen."""
    order, last = method.order, session.job.num_steps
    sizes, seen = [], []
    for step in range(order.origin.step + 1, last + 1):
        chosen = order.step(step, method.epochs)
        sizes.append(len(chosen))
        seen.extend(chosen)
        if len(seen) >= MOST:
            break
    counts = np.bincount(seen[: order.epoch_size], minlength=order.weights.size)
    if order.origin.samples == 0:
        most, least = np.ceil(order.weights), np.floor(order.weights)
        is_whole = len(seen) >= order.epoch_size
        wrong = (counts > most) | ((counts < least) & is_whole)
        if wrong.any():
            return _uneven(session, counts, int(np.flatnonzero(wrong)[0]), int(wrong.sum()))
    full = session.run.batch.samples_per_step
    short = [size for size in sizes[:-1] if size != full]
    if short:
        return failed(
            f"a step has {short[0]} samples in place of {full}",
            number=len(short),
            unit=f"of {len(sizes)} steps",
            evidence=[f"sizes of steps: {dict(Counter(sizes))}"],
            remedy=ORDER,
        )
    notes = [f"the last step has {sizes[-1]} of {full} samples"] if sizes[-1] != full else []
    if order.epoch_size < full:
        notes.append(f"a step has more samples than the data ({order.epoch_size})")
    times = len(seen) / order.epoch_size if len(seen) < MOST else last * full / order.epoch_size
    return passed(
        f"{last:,} steps of {full} samples, the same when run again",
        round(times, 2),
        "times round the data",
        notes,
    )


def _uneven(session: Session, counts: IntArray, index: int, number: int) -> Finding:
    name = session.train.sample_id(index)
    return failed(
        f"{number} samples are seen more or less often than an epoch has them",
        number=number,
        unit=f"of {counts.size} samples",
        evidence=[f"{name}: {counts[index]} times in the first epoch"],
        remedy="parts of the data would be left out or learned twice; please report this",
    )


def _order(session: Session) -> Order:
    method = session.job.method
    assert isinstance(method, Sft)
    return method.order


def _ids(trees: list[Tree]) -> list[str]:
    return [sample.id for tree in trees for sample in tree.samples]
