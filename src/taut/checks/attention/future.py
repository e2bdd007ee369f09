"""A token is changed; what was predicted before it must not move. One forward beside that of the sample itself."""

from __future__ import annotations

from dataclasses import replace

from taut.checks.attention.trace import first_that_moves
from taut.checks.finding import Finding, failed, passed
from taut.checks.session import Session, changed, gap
from taut.data.pack import ALONE, pack


def ask(session: Session) -> Finding:
    """Does a later token leave everything before it as it is?"""
    sample = session.pair[0]
    at = sample.num_tokens // 2
    other = replace(sample, ids_T=changed(session, sample.ids_T, range(at, at + 1)))
    before = (
        sample.target_at_N < at
    )  # predicted (or read) at a token before it, and not the changed token itself
    left, right = session.alone[sample.id], session.numbers([other])[sample.id]
    moved = gap(left[before], right[before])
    says = session.says
    if moved > session.exact:
        where = first_that_moves(session, pack([sample], ALONE), pack([other], ALONE), range(at))
        return failed(
            f"changing token {at} of {sample.id} changes {says.one} before it by {moved:.3g} {says.unit}",
            number=moved,
            unit=says.unit,
            evidence=[where],
            remedy="the model looks ahead, and taut trains causal language models; train another model",
        )
    return passed("nothing before a changed token moves", moved, says.unit)
