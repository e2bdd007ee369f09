"""What data.too_long and data.min_length did: how many samples lost their end or were left out, and what with them.

A document that was cut has lost text and nothing else; an answer that was cut has lost the place where it ends.
"""

from __future__ import annotations

import re

from taut.checks.data.records import rows
from taut.checks.data.targets import WITHOUT
from taut.checks.finding import Finding, failed, passed
from taut.checks.session import Session
from taut.data.messages import Document

SHOWN = 4


def ask(session: Session) -> Finding:
    """Were most samples kept, and kept whole?"""
    report, config = session.train.report, session.run.data
    dropped = [one for one in report.dropped if one.reason != WITHOUT]
    cut = [one for one in report.cut if one.targets_lost]
    is_text = all(isinstance(row, Document) for row in session.once(rows))
    num_samples = (
        report.num_samples + len(dropped) if config.too_long != "split" else report.num_rows
    )
    lost = [*dropped, *([] if is_text else cut)]
    num_lost, unit = len(lost), "samples"
    if session.run.objective.are_compared:
        num_lost = len({re.sub(r"#\d+$", "", one.place) for one in lost})
        num_samples, unit = report.num_rows, "rows"
    targets_lost = sum(one.targets_lost for one in (*dropped, *cut))
    share = targets_lost / (report.num_targets + targets_lost)
    if 2 * num_lost > num_samples:
        what = "were dropped for their length" if len(dropped) >= len(cut) else "lost their end"
        return failed(
            f"{num_lost:,} of {num_samples:,} {unit} {what}",
            number=num_lost,
            unit=f"of {num_samples:,} {unit}",
            evidence=[f"{one.place}: {one.reason}" for one in lost[:SHOWN]],
            remedy=f"{share:.1%} of what is to be learned is gone; raise data.max_length, or lower data.min_length",
        )
    if not report.dropped and not report.cut:
        return passed("nothing cut, nothing dropped", 0.0, "of targets lost")
    rest = len(report.cut) - len(cut)
    how = "split into windows" if config.too_long == "split" else "cut after their last target"
    notes = [f"{rest:,} {how}"] if rest else []
    said = f"{len(cut):,} cut, {len(dropped):,} dropped for their length"
    return passed(said, share, "of targets lost", notes)
