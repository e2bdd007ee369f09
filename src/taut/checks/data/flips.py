"""Labels that the other pairs contradict: a small model learns from most pairs which answers are preferred and is asked
about the others. docs/flips.md says what it can see, and how often it was right.

Exceptions to a rule look like flips, and published sets have up to 11% of them: those are a warning. A failure is a
rate that no set was seen to have by nature.
"""

from __future__ import annotations

from taut.checks.data.compared import pair_report
from taut.checks.finding import Finding, failed, passed, skipped, warned
from taut.checks.session import Session

SHOWN = 4


def ask(session: Session) -> Finding:
    """Do the labels of pairs follow one rule, without many that look flipped?"""
    if session.run.row_kind != "preference":
        return skipped("the rows are no comparisons")
    flips = session.once(pair_report).flips
    if flips.rate is None:
        return passed(f"cannot tell: {flips.reason}")
    between = f"{flips.low:.0%} to {flips.high:.0%}"
    shown = [f"{one.place}: flipped with {one.confidence:.0%}" for one in flips.suspects[:SHOWN]]
    if flips.is_alarming:
        return failed(
            f"{flips.rate:.0%} of the labels look flipped ({between})",
            number=flips.rate,
            unit=f"of {flips.num_pairs:,} pairs",
            evidence=shown,
            remedy="look at these pairs: were chosen and rejected swapped in a part of the data? Turn them round, or "
            "leave them out",
        )
    unit = f"of {flips.num_pairs:,} pairs"
    said = f"other pairs agree with {flips.accuracy:.0%} of labels; flipped: {between}"
    if flips.is_notable:
        return warned(
            f"{len(flips.suspects):,} labels look flipped; {said}",
            number=flips.rate,
            unit=unit,
            evidence=shown,
            remedy="look at these pairs; exceptions to a rule look like this too",
        )
    return passed(said, flips.rate, unit)
