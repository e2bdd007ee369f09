"""The longest prompt and what may follow it, against the tokens that model and engine take in all."""

from __future__ import annotations

import numpy as np

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.rollout.opened import NONE_GENERATED, roller
from taut.checks.session import Session
from taut.inference.vllm import ServerEngine

SHOWN = 3
FEW = 0.05
"""Room for so small a part of what an answer may have is none."""


def ask(session: Session) -> Finding:
    """Is there room for answers after the prompts?"""
    if not session.is_generated:
        return skipped(NONE_GENERATED)
    found = session.once(roller)
    context: int | None = getattr(found.engine, "context", None)
    longest, most = int(session.train.lengths.max()), found.config.grows
    said = f"tokens of the longest prompt, and {most:,} of an answer"
    if context is None:
        return passed(f"{said}; the model names no context", longest, "tokens")
    if isinstance(found.engine, ServerEngine) and found.world is None:
        refused = _refused(session, found.engine, most)
        if refused is not None:
            return refused
    left_S = context - session.train.lengths
    full = np.flatnonzero(left_S < max(1, FEW * most))
    if full.size:
        return failed(
            f"{full.size:,} of {len(session.train):,} prompts leave no room for an answer",
            number=int(full.size),
            unit=f"of {len(session.train):,} prompts",
            evidence=[
                f"{session.train.sample_id(int(at))}: {session.train.lengths[at]:,} tokens of {context:,}"
                for at in full[:SHOWN]
            ],
            remedy=f"set data.max_length={max(1, context - most)} with data.too_long=drop, or use a model, or a "
            "server, with a longer context",
        )
    cut = int((left_S < most).sum())
    notes = (
        [f"after {cut:,} prompts the context of {context:,} cuts answers earlier"] if cut else []
    )
    return passed(f"{said}, of {context:,}", longest, "tokens", notes)


def _refused(session: Session, engine: ServerEngine, most: int) -> Finding | None:
    """Prompts whose answers may be longer than the server takes: it cuts none, it refuses them."""
    served, own = engine.served_context, engine.model_context
    if served is None:
        return None
    length_S = session.train.lengths
    needed_S = length_S + (most if own is None else np.minimum(most, own - length_S))
    long = np.flatnonzero(needed_S > served)
    if not long.size:
        return None
    return failed(
        f"{long.size:,} of {len(session.train):,} prompts and their answers may be longer than the server takes, "
        f"{served:,} tokens",
        number=int(long.size),
        unit=f"of {len(session.train):,} prompts",
        evidence=[
            f"{session.train.sample_id(int(at))}: {length_S[at]:,} tokens, with an answer up to {needed_S[at]:,}"
            for at in long[:SHOWN]
        ],
        remedy=f"start the server with --max-model-len {int(needed_S.max())}, or set rollout.max_new_tokens",
    )
