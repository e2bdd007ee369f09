"""How many steps there are, and that each has the samples it should: asked again, and after a resume.

The order is a pure function of the seed and the step; so a second object of it must say the same, whatever was asked of
the first before, and so must the one that a resumed run makes of a cursor. That an epoch has each sample as often as it
should is ``data.packing``.
"""

from __future__ import annotations

from dataclasses import replace

from taut.checks.finding import Finding, failed, passed, skipped, warned
from taut.checks.session import Session
from taut.data.batching import Order
from taut.io.console import counted
from taut.methods.offline import Offline
from taut.types import Tree

ORDER = (
    "the run could not be gone on with as it began; train without shuffle, and please report this"
)


def ask(session: Session) -> Finding:
    """Does each step have the samples it should, in this run and in one that goes on from it?"""
    method = session.job.method
    if not isinstance(method, Offline):
        return skipped("the method prepares its steps itself")
    return _count(session) or _repeats(method, session) or _said(method, session)


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


def _repeats(method: Offline, session: Session) -> Finding | None:
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


def _said(method: Offline, session: Session) -> Finding:
    """How often round the data, and what the last step has."""
    order, last = method.order, session.job.num_steps
    size, full = len(order.step(last, method.epochs)), order.samples_per_step
    notes = [f"the last step has {size} of {full} samples"] if size != full else []
    times = round(method.cursor(last).samples / order.epoch_size, 2)
    what = "rows" if session.run.objective.are_compared else "samples"
    said = f"{counted(last, 'steps')} of {counted(full, what)}, the same when run again"
    if order.epoch_size < full:
        often = -(-full // order.epoch_size)
        return warned(
            f"a step has {full} {what} and an epoch {order.epoch_size}, so one {what[:-1]} is up to {often} times in a "
            "step",
            number=times,
            unit="times round",
            remedy=f"set batch.samples_per_step={order.epoch_size} or less, or add data",
            notes=[said, *notes],
        )
    return passed(said, times, "times round", notes)


def _order(session: Session) -> Order:
    method = session.job.method
    assert isinstance(method, Offline)
    return method.order


def _ids(trees: list[Tree]) -> list[str]:
    return [sample.id for tree in trees for sample in tree.samples]
