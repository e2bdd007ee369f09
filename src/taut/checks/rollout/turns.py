"""What is put between two turns of a path, where an environment answers, against the template's own rendering.

The rows' right answers stand for turns: prompt, answer, what comes between, and again a prompt have to be, token for
token, the conversation rendered as a whole. A template that writes turns otherwise once they are history keeps what
comes between; that is told.
"""

from __future__ import annotations

from collections.abc import Iterator

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.rollout.opened import NONE_GENERATED, roller
from taut.checks.session import Session
from taut.data.messages import Message
from taut.data.prompts import PromptSet
from taut.errors import RenderError

ROWS = 8
REPLY: Message = {"role": "user", "content": "Go on."}


def ask(session: Session) -> Finding:
    """Is what comes between two turns what the template writes there?"""
    if not session.is_generated:
        return skipped(NONE_GENERATED)
    world = session.once(roller).world
    if world is None:
        return skipped("no environment answers: a path has one turn")
    rewritten, turns = [], list(_turns(session))
    for place, text in turns:
        turn = {"role": "assistant", "content": text}
        try:
            instead = world.bridge.rewrites(turn, REPLY, world.tools)
        except RenderError as error:
            says, _, remedy = str(error).rpartition("; ")
            return failed(
                "what the template writes after a turn depends on the turn",
                evidence=[f"{place}: after {text!r:.60}", says],
                remedy=remedy,
            )
        rewritten += [] if instead is None else [f"{place}: {instead}"]
    notes = []
    if rewritten:
        notes = [f"once history, {len(rewritten)} turns are written otherwise: {rewritten[0]}"]
    return passed("as the template writes it", len(turns), "turns", notes)


def _turns(session: Session) -> Iterator[tuple[str, str]]:
    """Answers of the rows, or a stand-in: where it is from, and the text."""
    assert isinstance(session.train, PromptSet)
    found = [
        (row.place, row.references[0].strip())
        for row in session.train.asked[:ROWS]
        if row.references
    ]
    yield from found or [("a stand-in", "an answer, and more of it")]
