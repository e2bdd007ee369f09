"""What the checks of roll-outs share: engine, rewards and environment as the run opens them, and a small roll-out.

The engine in this process is asked for a few tokens. A server is not, but by checks of the full part: it would have to
be sent the weights first.
"""

from __future__ import annotations

from dataclasses import replace

from taut.checks.finding import Finding, skipped
from taut.checks.owned import owned_by
from taut.checks.session import Session
from taut.rl.online import Online
from taut.rl.rollout import Group, Roller

PROMPTS, COMPLETIONS, TOKENS = 2, 3, 8
"""Of the small roll-out."""
NONE_GENERATED = "the run generates nothing to learn from"


def online(session: Session) -> Online:
    """The method of a run that generates."""
    method = session.job.method
    assert isinstance(method, Online)
    return method


@owned_by("rollout.opens")
def roller(session: Session) -> Roller:
    """Engine, rewards and environment of a run that generates."""
    return online(session).roller


def close(session: Session) -> None:
    """End what was opened for checks, where the session does not go on to train."""
    if "built" in vars(session) and session.is_generated:
        online(session).close()


def obstacle(session: Session) -> Finding | None:
    """Why there is no small roll-out; None: there is one."""
    if not session.is_generated:
        return skipped(NONE_GENERATED)
    if session.once(roller).config.engine == "server":
        return skipped("a server is asked by engine.logps, in the full part")
    return None


def groups(session: Session) -> list[Group]:
    """The first prompts, rolled out as in training but for their number and length; nobody judges them."""
    own = session.once(roller)
    config = replace(
        own.config,
        n=max(2, min(own.config.n, COMPLETIONS)),
        max_new_tokens=min(own.config.max_new_tokens, TOKENS),
        refills=0,
    )
    small = replace(own, config=config, panel=None, is_judged=False, needs_one=False)
    return list(small.roll(0, range(min(PROMPTS, len(own.prompts)))).groups)
