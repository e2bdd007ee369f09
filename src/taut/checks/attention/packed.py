"""What training computes (taut's attention, packed, prefixes shared) against the library's own path, sample by sample.

Compared is the mean over a sample's targets, which rounding hardly moves.
"""

from __future__ import annotations

from taut.checks.finding import Finding, failed, passed
from taut.checks.session import Session, drift
from taut.models.prove import library_attention, library_logps


def ask(session: Session) -> Finding:
    """Does a packed sample have the log-probs it has alone, by the library's own attention?"""
    is_packed = session.loaded.one_sample is None
    ours = session.packed if is_packed else session.alone
    gaps = {}
    for one in session.pair:
        with session.quiet():
            theirs = library_logps(session.scorer.model, one, session.ranks.device)
        gaps[one.id] = drift(ours[one.id], theirs)
    name, found = max(gaps.items(), key=lambda item: item[1])
    theirs_name, limit = library_attention(session.model), session.tolerance
    if found > limit:
        return failed(
            f"the log-probs of {name} differ by {found:.3g} nats a token (at most {limit:g} is rounding) from the same "
            f"sample alone by the library's {theirs_name} attention",
            number=found,
            unit="nats a token",
            evidence=[f"{sample_id}: {value:.3g}" for sample_id, value in gaps.items()],
            remedy=f"{session.loaded.attention.name} does not compute this model; set attention=reference, and please "
            "report the model",
        )
    how = "packed" if is_packed else "one at a time"
    return passed(f"{how} as alone by the library's {theirs_name} attention", found, "nats a token")
