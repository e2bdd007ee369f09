"""Reasoning in the rows against what the template makes of it: written before the answer, and opened by the prompt."""

from __future__ import annotations

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session
from taut.checks.template.rendered import (
    CLOSE,
    NO_CHATS,
    OPEN,
    SHOWN,
    Turn,
    cut,
    reasoning_of,
    rendered,
)


def ask(session: Session) -> Finding:
    """Is reasoning written where rows have it, and opened by the prompt only there?"""
    chats = rendered(session).chats
    if not chats:
        return skipped(NO_CHATS)
    turns = [turn for chat in chats for turn in chat.turns]
    thought = [turn for turn in turns if reasoning_of(turn.message)]
    lost = [turn for turn in thought if reasoning_of(turn.message) not in turn.row.text]
    if lost:
        return _failed(
            "the template leaves out the reasoning of",
            lost,
            len(thought),
            [f"{turn.place}: {cut(reasoning_of(turn.message))}" for turn in lost],
            "give a template that writes the reasoning of the answer being trained with data.template=FILE, or take it "
            "out of the rows",
        )
    opened = [t for t in turns if _ends(t, OPEN) and not reasoning_of(t.message)]
    if opened:
        return _failed(
            f"the generation prompt opens {OPEN} for answers without reasoning:",
            opened,
            len(turns),
            [
                f"{t.place}: {cut(t.prompt.text[-40:])}, then {cut(str(t.message['content']))}"
                for t in opened
            ],
            "give rows with reasoning, or a template whose generation prompt does not open it with data.template=FILE",
        )
    closed = [t for t in thought if _ends(t, CLOSE) and not t.is_prefix]
    if closed:
        return _failed(
            f"the generation prompt closes {CLOSE} before the reasoning of",
            closed,
            len(thought),
            [f"{t.place}: {cut(t.prompt.text[-40:])}" for t in closed],
            "give a template whose generation prompt leaves reasoning open with data.template=FILE, or take it out of "
            "the rows",
        )
    said = "reasoning is written" if thought else "no row has reasoning"
    return passed(said, len(thought), f"of {len(turns)} answers", _notes(session, turns))


def _ends(turn: Turn, tag: str) -> bool:
    return turn.prompt.text.rstrip().endswith(tag)


def _failed(says: str, found: list[Turn], number: int, evidence: list[str], remedy: str) -> Finding:
    return failed(
        f"{says} {len(found)} of {number} answers",
        number=len(found),
        unit=f"of {number} answers",
        evidence=evidence[:SHOWN],
        remedy=remedy,
    )


def _notes(session: Session, turns: list[Turn]) -> list[str]:
    notes = []
    empty = sum("".join(t.written.split()).startswith(OPEN + CLOSE) for t in turns)
    if empty:
        notes.append(f"{empty} answers are taught to begin with an empty {OPEN}{CLOSE}")
    template = str(session.language.renderer.template.template)
    if "enable_thinking" in template:
        notes.append("served with enable_thinking=false the prompt is another than the one trained")
    return notes
