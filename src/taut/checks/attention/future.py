"""A token is changed; what was predicted before it must not move. One forward beside that of the sample itself."""

from __future__ import annotations

from taut.checks.attention.trace import first_that_moves
from taut.checks.differ import changed, first_word, gap
from taut.checks.finding import Finding, failed, passed
from taut.checks.session import Session
from taut.data.packing import ALONE, pack


def ask(session: Session) -> Finding:
    """Does a later token leave everything before it as it is?"""
    sample = session.pair[0]
    at = first_word(sample, sample.num_tokens // 2)
    other = changed(session, sample, [at])
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
