"""The real tower on some of the user's own pictures, of as many sizes as there are among the first.

That placeholders follow from a picture's size was proven when the data were read; here the model is asked. With
another number the library stops, or shifts every picture after it.
"""

from __future__ import annotations

from taut.checks.finding import Finding, failed, passed
from taut.checks.session import Session
from taut.checks.vision.shown import obstacle, several
from taut.errors import ModelError


def ask(session: Session) -> Finding:
    """Has each picture as many features as placeholders?"""
    why_not = obstacle(session)
    if why_not is not None:
        return why_not
    samples = session.once(several)
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
