"""The real tower on some of the user's own pictures, of as many sizes as there are among the first.

That placeholders follow from a picture's size was proven when the data were read; here the model is asked. With
another number the library stops, or shifts every picture after it.
"""

from __future__ import annotations

from typing import Any

from taut.checks.finding import Finding, failed, passed
from taut.checks.samples import num_tokens, whole
from taut.checks.session import PROBE_TOKENS, Session
from taut.checks.vision.shown import obstacle
from taut.errors import ModelError
from taut.types import Sample

SAMPLES = 4
TOKENS = 768
"""Of all samples that are looked at, but for the first."""


def ask(session: Session) -> Finding:
    """Has each picture as many features as placeholders?"""
    why_not = obstacle(session)
    if why_not is not None:
        return why_not
    samples = _some(session)
    for sample in samples:
        try:
            session.numbers([sample])
        except ModelError as error:
            says, _, remedy = str(error).rpartition("; ")
            return failed(
                "the vision tower gives another number of features than there are placeholders",
                evidence=[f"{sample.id}: {says}"],
                remedy=remedy,
            )
    media = [one for sample in samples for one in sample.media]
    return passed("as many features as placeholders", len(media), "pictures")


def _some(session: Session) -> list[Sample]:
    """Samples with pictures of different sizes, the smallest first."""
    chosen: list[Sample] = []
    sizes: set[tuple[int, Any]] = set()
    for index in session.pictured:
        sample = whole(session.train[index], PROBE_TOKENS)
        own = {(one.stop - one.start, one.grid) for one in sample.media}
        if own <= sizes:
            continue
        if chosen and (len(chosen) == SAMPLES or num_tokens([*chosen, sample]) > TOKENS):
            break
        sizes |= own
        chosen.append(sample)
    return chosen
