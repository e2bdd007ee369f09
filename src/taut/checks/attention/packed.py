"""What training computes (taut's attention, packed) against the library's own path, of a sample that follows another.

Compared is the mean over a sample's targets, which rounding hardly moves.
"""

from __future__ import annotations

import torch

from taut.checks.differ import drift
from taut.checks.finding import Finding, failed, passed
from taut.checks.session import Session
from taut.models.self_test import library_attention, library_logps, library_scalars


def ask(session: Session) -> Finding:
    """Does a packed sample have the log-probs it has alone, by the library's own attention?"""
    is_packed = session.loaded.one_sample is None
    one = session.pair[1 if is_packed else 0]
    ours = (session.packed if is_packed else session.alone)[one.id]
    with session.quiet():
        say = library_scalars if session.is_scalar else library_logps
        theirs = say(session.scorer.model, one, session.ranks.device)
    found = drift(ours, theirs)
    unit = f"{session.says.unit} a token"
    theirs_name, limit = library_attention(session.model), session.tolerance
    if not found <= limit:
        at = int((ours - theirs).abs().nan_to_num(nan=torch.inf).argmax())
        token = session.inputs.token(int(one.ids_T[one.target_at_N[at]]))
        return failed(
            f"the {session.says.many} of {one.id} differ by {found:.3g} {unit} (at most {limit:g} is rounding) from "
            f"the same sample alone by the library's {theirs_name} attention",
            number=found,
            unit=unit,
            evidence=[
                f"{one.id}, target {token!r}: {float(ours[at]):.4g}, by the library {float(theirs[at]):.4g}"
            ],
            remedy=f"{session.loaded.attention.name} does not compute this model; set attention=reference, and please "
            "report the model",
        )
    how = "packed" if is_packed else "one at a time"
    return passed(f"{how} as alone by the library's {theirs_name} attention", found, unit)
