"""Samples with a token of the stop set among their targets. A document that is split ends in its last part only."""

from __future__ import annotations

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.samples import GENERATED
from taut.checks.session import Session
from taut.data.stop_tokens import described

SHOWN = 3


def ask(session: Session) -> Finding:
    """Is the end of the answer a target, so that the model learns to stop?"""
    if session.is_generated:
        return skipped(GENERATED)
    if session.is_scalar:
        return skipped("a reward model is not taught to stop")
    train, stops = session.train, session.stops
    report, number, total = train.report, train.num_with_target(stops.ids), len(train)
    num_whole = report.num_rows - len(report.dropped) - len(report.cut)
    if session.run.objective.kind != "sft":  # each answer of a row is a sample of its own
        num_whole = total - len(report.cut)
    if not number or 2 * number < num_whole:
        names = described(stops, session.renderer.template)[0]
        return failed(
            f"{total - number:,} of {total:,} samples do not teach the model to stop",
            number=number,
            unit=f"of {total:,} samples",
            evidence=[f"{one.place}: cut, {one.reason}" for one in report.cut[:SHOWN]]
            or [f"{train.sample_id(0)}: {names} is not among its targets"],
            remedy="raise data.max_length, or set data.too_long to drop or split"
            if report.cut
            else "see which tokens are targets with `taut show`, and please report this",
        )
    said = "every sample teaches the model to stop"
    notes = []
    if number < total and session.run.data.too_long == "split":
        said = "the last part of each document does"
        notes = [f"{len(report.cut):,} rows are split"]
    elif number < total:
        said = "every whole sample does" if number >= num_whole else "most samples do"
        notes = [f"{len(report.cut):,} were cut before their end"]
    return passed(said, number, f"of {total:,} samples", notes)
