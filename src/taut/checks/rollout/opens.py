"""The engine, the rewards and the environment of a run that generates, each made ready as training makes it."""

from __future__ import annotations

from taut.checks.finding import Finding, passed, skipped
from taut.checks.rollout.opened import NONE_GENERATED, roller
from taut.checks.session import Session


def ask(session: Session) -> Finding:
    """Can engine, rewards and environment be had as the run names them?"""
    if not session.is_generated:
        return skipped(NONE_GENERATED)
    found = session.once(roller)
    names = [] if found.panel is None else found.panel.names
    world = found.config.environment.name if found.world is not None else None
    parts = [found.config.engine, *names, *([world] if world else [])]
    notes = [f"{name} is {value}: {reason}" for name, value, reason in found.settled]
    return passed(", ".join(parts), len(names), "rewards", notes)
