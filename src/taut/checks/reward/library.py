"""A score against transformers' own class, which people will load the model with: given a sample alone, it looks for
the last token that is not the pad. The pad is the one that the tokenizer is saved with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from taut.checks.attention.library import plainly
from taut.checks.differ import gap
from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.reward.scored import some
from taut.checks.session import Session
from taut.checks.stop.served import served
from taut.models import architecture
from taut.models.self_test import library_attention
from taut.types import Sample
from taut.vision import tower


def ask(session: Session) -> Finding:
    """Does transformers' own class give a sample the same score, at its last token?"""
    if not session.is_scalar:
        return skipped("the model gives no scores")
    if session.ranks.size > 1:
        return skipped("the library's own path runs on one rank")
    pad = served(session).pad_token_id
    worst, where, number = 0.0, "", 0
    for sample in some(session):
        ours, theirs = session.numbers([sample])[sample.id], _library(session, sample, pad)
        number += len(ours)
        apart = gap(ours, theirs)
        if apart > worst or not where:
            last = session.inputs.token(int(sample.ids_T[-1]))
            said = f"{float(ours[-1]):.4g}, by the library {float(theirs[-1]):.4g}"
            worst, where = apart, f"{sample.id}, which ends with {last!r}: {said}"
    name, limit = type(session.model).__name__, session.tolerance
    if not worst <= limit:
        evidence = [where, f"the pad is {session.inputs.token(pad) if pad is not None else 'none'}"]
        return failed(
            f"{name} gives another score: {worst:.3g} apart (at most {limit:g} is rounding)",
            number=worst,
            unit="points",
            evidence=evidence,
            remedy="what is served would not be what was trained: scores are read at another token; give the tokenizer "
            "a pad that ends no answer, or please report this",
        )
    return passed(f"as {name} gives {number} scores, pad {pad}", worst, "points")


def _library(session: Session, sample: Sample, pad: int | None) -> Tensor:
    """What the library's class says where the sample is read."""
    config = architecture.text_config(session.model)
    before, config.pad_token_id = config.pad_token_id, pad
    ids_T = torch.from_numpy(sample.ids_T).to(session.ranks.device)
    backbone = architecture.decoder(session.model)
    pictures = tower.library_arguments(backbone, sample.media, ids_T)
    try:
        with session.quiet(), plainly(session, library_attention(session.model)):
            logits: Tensor = session.model(
                input_ids=ids_T[None], use_cache=False, **pictures
            ).logits
            logits = logits.float().cpu()
    finally:
        config.pad_token_id = before
    if logits.ndim == 2:  # of a sequence: one number
        return logits[0]
    at = [sample.num_tokens - 1] if sample.read_at_R is None else sample.read_at_R.tolist()
    return logits[0, at, 0]
