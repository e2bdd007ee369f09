"""The inference prompt against the training row, as text; whether their tokens meet is ``template.boundary``."""

from __future__ import annotations

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session
from taut.checks.template.rendered import (
    NO_CHATS,
    SHOWN,
    Chat,
    Turn,
    answer_of,
    cut,
    is_most,
    reasoning_of,
    rendered,
    shared,
    with_answer,
)

HEADERS = 4
"""Conversations in which the header of an answer is looked at."""


def ask(session: Session) -> Finding:
    """Is what a server feeds the model the beginning of what was trained, header included?"""
    chats = rendered(session).chats
    if session.is_generated:  # nothing is taught but what the model writes after its prompt
        chats = tuple(with_answer(session, chat) for chat in chats[:HEADERS])
    turns = [turn for chat in chats for turn in chat.turns]
    if not turns:
        return skipped(NO_CHATS)
    wrong = [turn for turn in turns if not turn.is_prefix and not session.is_generated]
    if is_most(wrong, turns):
        return failed(
            f"the prompt is not the beginning of the row before {len(wrong)} of {len(turns)} answers",
            number=len(wrong),
            unit=f"of {len(turns)} answers",
            evidence=[_difference(turn) for turn in wrong[:SHOWN]],
            remedy="the model would be asked with other words than it is taught after; give a template whose "
            "generation prompt is what it writes before answers with data.template=FILE",
        )
    taught = [
        (turn, header)
        for chat in chats[:HEADERS]
        for turn in chat.turns[:1]
        if (header := _taught_header(session, chat, turn))
    ]
    if taught:
        return failed(
            "the template has no generation prompt: the header would be part of each answer",
            number=len(taught),
            unit=f"of {len(chats[:HEADERS])} rows",
            evidence=[
                f"{turn.place}: the answer begins with {cut(header)}" for turn, header in taught
            ],
            remedy="write the answer's header where add_generation_prompt is true, in a template given with "
            "data.template=FILE",
        )
    said = (
        "the header is the prompt's"
        if session.is_generated
        else "the prompt is the row's beginning"
    )
    return passed(said, len(turns) - len(wrong), "answers")


def _difference(turn: Turn) -> str:
    prompt, row = turn.prompt.text, turn.row.text
    at = shared(prompt, row)
    return (
        f"{turn.place}: after {cut(prompt[max(0, at - 20) : at])} the prompt has {cut(prompt[at : at + 30])}, the row "
        f"{cut(row[at : at + 30])}"
    )


def _taught_header(session: Session, chat: Chat, turn: Turn) -> str:
    """What stands between the prompt and the answer's words, where it is a header like those of earlier messages."""
    words = answer_of(turn.message)
    if not turn.is_prefix or not words or reasoning_of(turn.message):
        return ""
    header = turn.written.partition(words)[0]
    if not header.strip():
        return ""
    template = session.language.renderer.template
    row = chat.row
    before, placed = row.messages[: turn.index], chat.whole.pictures
    plain = template.apply(before, row.tools, turn.place, placed=placed)
    first = header.split(maxsplit=1)[0]
    return header if plain.text == turn.prompt.text and first.split(">")[0] in plain.text else ""
