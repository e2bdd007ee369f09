"""Real answers as they are scored: at the end, or at the end of each step. Shared by the checks of scores."""

from __future__ import annotations

from taut.checks.samples import num_tokens
from taut.checks.session import Session
from taut.types import Sample

MOST = 4
TOKENS = 192


def some(session: Session) -> list[Sample]:
    """A few samples of the batch, without targets, each with reads of its own."""
    chosen: list[Sample] = []
    for sample in (sample for tree in session.trees for sample in tree.samples):
        fits = num_tokens([*chosen, sample]) <= TOKENS and len(chosen) < MOST
        if fits or len(chosen) < 2:
            chosen.append(sample)
    return chosen
