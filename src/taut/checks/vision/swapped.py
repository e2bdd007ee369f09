"""A sample's pictures are taken for others of the same size; what comes after them has to be told otherwise.

Equal log-probs, to the last bit, mean that the model answers without having seen the picture. How much they move says
nothing yet: that is what training is for.
"""

from __future__ import annotations

from taut.checks.differ import gap
from taut.checks.finding import Finding, failed, passed
from taut.checks.session import Session
from taut.checks.vision.shown import obstacle, swapped


def ask(session: Session) -> Finding:
    """Does another picture change what the model says after it?"""
    why_not = obstacle(session)
    if why_not is not None:
        return why_not
    says, moves = session.says, {it.sample.id: gap(*it.own) for it in session.once(swapped)}
    blind = [name for name, moved in moves.items() if not moved > 0.0]
    if blind:
        return failed(
            f"another picture changes no {says.one.removeprefix('a ')} of {blind[0]}",
            number=0.0,
            unit=says.unit,
            evidence=[f"{name}: noise in place of its pictures" for name in blind],
            remedy="the picture does not reach the language model: a projector of zeros, or features that are lost; "
            "take the checkpoint that the model came with, and please report the model",
        )
    return passed(f"another picture changes {says.many}", min(moves.values()), says.unit)
