"""Two samples packed and each alone, where its first token is the first of all: a sample does not know its place.

Neighbours are known not to matter when this is asked.
"""

from __future__ import annotations

from taut.checks.differ import drift
from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session


def ask(session: Session) -> Finding:
    """Do positions begin anew with each packed sample?"""
    if session.loaded.one_sample is not None:
        return skipped(f"nothing is packed: {session.loaded.one_sample}")
    first, second = session.pair
    gaps = {one.id: drift(session.packed[one.id], session.alone[one.id]) for one in session.pair}
    name, moved = max(gaps.items(), key=lambda item: item[1])
    unit = f"{session.says.unit} a token"
    if moved > session.tolerance:
        return failed(
            f"the {session.says.many} of {name} change by {moved:.3g} {unit} with its place in the pack",
            number=moved,
            unit=unit,
            evidence=[f"packed as ({first.id}, {second.id}), and alone"],
            remedy="the model counts positions through the pack instead of from each sample's beginning; train "
            "another model, and please report this one",
        )
    return passed("a sample's place in the pack changes nothing", moved, unit)
