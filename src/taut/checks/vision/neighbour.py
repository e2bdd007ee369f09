"""The pictures of one sample are taken for others of the same size; a sample beside it must not move. Asked packed, and
with prefixes shared, where two pictures of one size are two prefixes.

What pictures are told apart by is looked at on the user's own: two that differ have different digests.
"""

from __future__ import annotations

from collections.abc import Iterator

from taut.checks.differ import drift, gap
from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session
from taut.checks.vision.shown import Swapped, obstacle, swapped, with_others
from taut.data.packing import PackPolicy

REMEDY = "pictures are mixed up between samples; set batch.share_prefixes=false, and please report the model"


def ask(session: Session) -> Finding:
    """Does a neighbour's picture change nothing?"""
    why_not = obstacle(session)
    if why_not is not None:
        return why_not
    taken = _taken_for_one(session)
    if taken:
        return failed(
            "two different pictures are taken for one",
            number=len(taken),
            unit="pictures",
            evidence=taken[:3],
            remedy=REMEDY,
        )
    if session.loaded.one_sample is not None:
        return skipped(f"nothing is packed: {session.loaded.one_sample}")
    worst, unit = 0.0, session.says.unit
    for how, moved, limit in _moves(session):
        if moved > limit:
            says = f"a neighbour's picture changes {session.says.one} by {moved:.3g} {unit}"
            return failed(says, number=moved, unit=unit, evidence=[how], remedy=REMEDY)
        worst = max(worst, moved)
    return passed("a neighbour's picture changes nothing", worst, unit)


def _taken_for_one(session: Session) -> list[str]:
    """Pictures whose digest is that of another one."""
    content_of: dict[str, tuple[str, str]] = {}
    found = []
    for index in session.pictured:
        sample = session.train[index]
        for one in sample.media:
            said = one.picture.content, one.picture.source
            content, source = content_of.setdefault(one.picture.digest, said)
            if content != said[0]:
                found.append(f"{sample.id}: {said[1]} is taken for {source}")
    return found


def _moves(session: Session) -> Iterator[tuple[str, float, float]]:
    """Where it is asked, how far the sample moves, and how far it may."""
    swaps = session.once(swapped)
    for it in swaps:
        assert it.beside is not None
        yield f"{it.beside.id}, packed with {it.sample.id}", gap(*it.others), session.exact
    if session.job.policy.share_prefixes:
        yield from _shared(session, swaps[0])


def _shared(session: Session, one: Swapped) -> Iterator[tuple[str, float, float]]:
    """A sample, the same with other pictures, and its neighbour, all of whose common beginnings are computed once."""
    assert one.beside is not None
    sample, beside, other = one.sample, one.beside, with_others(one.sample)
    with session.quiet():  # once around all: autocast keeps its casts
        shared = session.numbers([sample, other, beside], PackPolicy(min_saved_tokens=1))
        packed = {**session.numbers(session.pair), other.id: one.whole}
    for name, numbers in shared.items():
        yield f"{name}, with prefixes shared", drift(numbers, packed[name]), session.tolerance
