"""Lengths of samples, against the positions that the model has and the tokens that a micro-batch may have."""

from __future__ import annotations

import numpy as np

from taut.checks.finding import Finding, failed, passed
from taut.checks.session import Session
from taut.models.load import context_length
from taut.types import IntArray

SHOWN = 4


def ask(session: Session) -> Finding:
    """Has the model positions for the longest sample?"""
    context = context_length(session.language.config)
    longest = {name: int(data.lengths.max()) for name, data in session.data}
    for name, data in session.data:
        over = np.flatnonzero(data.lengths > (context or np.inf))
        if over.size:
            first = [data.sample_id(int(i)) for i in over[:SHOWN]]
            lengths = [
                f"{one}: {data.lengths[i]:,} tokens" for one, i in zip(first, over, strict=False)
            ]
            return failed(
                f"{over.size:,} samples of {name} are longer than the model's {context:,} positions",
                number=longest[name],
                unit=f"tokens of {context:,}",
                evidence=lengths,
                remedy=f"set data.max_length={context}, or write max_position_embeddings (and rope scaling) into the "
                "model's config.json if it was made for more",
            )
    lengths_S = session.train.lengths
    budget = session.run.batch.tokens_per_microbatch
    num_over = int((lengths_S > budget).sum())
    notes = [histogram(lengths_S)]
    if num_over:
        notes.append(
            f"{num_over:,} longer than batch.tokens_per_microbatch={budget}: computed alone"
        )
    most = f"the model has {context:,} positions" if context else "the model names no context"
    return passed(f"tokens of the longest sample; {most}", max(longest.values()), "tokens", notes)


def histogram(lengths_S: IntArray) -> str:
    """How many samples have up to 32, 64, ... tokens, on one line."""
    bins = np.maximum(4, np.ceil(np.log2(lengths_S))).astype(int)
    shares = [(2**at, int((bins == at).sum()) / bins.size) for at in np.unique(bins)]
    return "samples by tokens: " + ", ".join(
        f"to {top:,} {_percent(share)}" for top, share in shares
    )


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "<1%"
