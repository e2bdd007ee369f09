"""Attention is made deaf: what then still passes from one token to the next goes through a layer with state."""

from __future__ import annotations

from taut.attention.select import observe
from taut.checks.attention.trace import first_that_moves
from taut.checks.differ import changed, gap
from taut.checks.finding import Finding, failed, passed
from taut.checks.session import Session
from taut.data.packing import ALONE, pack
from taut.models import architecture
from taut.types import Packed


def ask(session: Session) -> Finding:
    """Are all layers with state across tokens known, so that nothing is packed beside them?"""
    sample = session.short
    other = changed(session, sample, [0])
    left, right = pack([sample], ALONE), pack([other], ALONE)
    with session.quiet(), observe(is_deaf=True):
        moved = gap(*(session.said(packed)[1:] for packed in (left, right)))
    unit = session.says.unit
    known = architecture.stateful_layers(session.scorer.model)
    if moved > session.exact and not known:
        return failed(
            f"a token changes what follows it by {moved:.3g} {unit} with attention taken out",
            number=moved,
            unit=unit,
            evidence=[_where(session, left, right)],
            remedy="the model has layers with state across tokens that taut does not know, so packed samples would "
            "leak; train another model, and please report this one",
        )
    if known:
        said = (
            f"{len(known)} layers carry state ({', '.join(known[:3])}); samples run one at a time"
        )
        return passed(said, moved, unit)
    return passed("tokens know of each other through attention alone", moved, unit)


def _where(session: Session, left: Packed, right: Packed) -> str:
    with observe(is_deaf=True):
        return first_that_moves(session, left, right, range(1, left.num_tokens))
