"""Adapters, freezing, added tokens, optimizer: what was asked to train can, and nothing else does."""

from __future__ import annotations

from taut.checks.finding import Finding, passed
from taut.checks.session import Session


def ask(session: Session) -> Finding:
    """Can what was asked be trained: adapters, freezing, added tokens?"""
    trained = sum(parameter.numel() for parameter in session.job.trained)
    every = sum(parameter.numel() for parameter in session.scorer.parameters())
    notes = [f"{name} {value}: {reason}" for name, value, reason in session.adapted_decisions]
    return passed(f"{trained:,} of {every:,} parameters train", trained / every, "of all", notes)
