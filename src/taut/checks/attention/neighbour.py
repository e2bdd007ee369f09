"""A neighbour in the pack is replaced by another of the same length; a sample's log-probs must not move."""

from __future__ import annotations

from taut.checks.attention.trace import first_that_moves
from taut.checks.differ import changed, gap
from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session
from taut.data.packing import ALONE, pack


def ask(session: Session) -> Finding:
    """Do packed samples not see each other?"""
    if session.loaded.one_sample is not None:
        return skipped(f"nothing is packed: {session.loaded.one_sample}")
    first, second = session.pair
    other = changed(session, first, range(first.num_tokens))
    left, right = session.packed[second.id], session.numbers([other, second])[second.id]
    moved = gap(left, right)
    if moved > session.exact:
        packs = [pack([one, second], ALONE) for one in (first, other)]
        inside = range(first.num_tokens, first.num_tokens + second.num_tokens)
        return failed(
            f"other words in {first.id} change {session.says.one} of {second.id} by {moved:.3g} "
            f"{session.says.unit}",
            number=moved,
            unit=session.says.unit,
            evidence=[first_that_moves(session, packs[0], packs[1], inside)],
            remedy=f"{session.loaded.attention.name} does not keep samples apart in this model; set "
            "attention=reference, and please report the model",
        )
    return passed("other words in a neighbour change nothing", moved, session.says.unit)
