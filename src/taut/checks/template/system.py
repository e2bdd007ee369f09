"""Whether the rendering has the rows' system messages; and what the template writes of its own where there is none."""

from __future__ import annotations

import re

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session
from taut.checks.template.rendered import NO_CHATS, SHOWN, cut, rendered, shared, short, texts_of
from taut.data.messages import Message
from taut.errors import RenderError

FIRST, AGAIN = "first words", "more words"
PROBE: tuple[Message, ...] = (
    {"role": "user", "content": FIRST},
    {"role": "assistant", "content": "an answer"},
    {"role": "user", "content": AGAIN},
)


def ask(session: Session) -> Finding:
    """Are the rows' system messages written?"""
    chats = rendered(session).chats
    if not chats:
        return skipped(NO_CHATS)
    with_system, dropped = 0, []
    for chat in chats:
        systems = [m for m in chat.row.messages if m["role"] == "system"]
        words = [text.strip() for message in systems for text in texts_of(message)]
        with_system += bool(systems)
        lost = next((text for text in words if text not in chat.whole.text), None)
        if lost is not None:
            dropped.append(f"{short(chat.place)}: {cut(lost)} is not in {cut(chat.whole.text)}")
    default = _default(session)
    if dropped:
        instead = [f"the template writes {cut(default)} in every row"] if default else []
        return failed(
            f"the template leaves out the system message of {len(dropped)} of {with_system} rows",
            number=len(dropped),
            unit=f"of {with_system} rows",
            evidence=[*dropped[:SHOWN], *instead],
            remedy="give a template that writes system messages with data.template=FILE, or put their words into the "
            "first user message",
        )
    notes = []
    if default:
        without = len(chats) - with_system
        notes.append(f"where there is none ({without} rows), the template writes {cut(default)}")
    return passed("written where rows have one", with_system, f"of {len(chats)} rows", notes)


def _default(session: Session) -> str:
    """What stands before the first user message and not before a later one, without special tokens."""
    template = session.language.renderer.template
    try:
        text = template.apply(PROBE, (), "the probe").text
    except RenderError:
        return ""
    tokens = [token.content for token in session.tokenizer.added_tokens_decoder.values()]
    if tokens:
        text = re.sub("|".join(map(re.escape, tokens)), "\n", text)
    head, found, rest = text.partition(FIRST)
    if not found:  # template.content
        return ""
    again = rest.partition(AGAIN)[0]
    extra = head[: len(head) - shared(head[::-1], again[::-1])]
    return re.sub(r"^\s*(system|developer)\s*\n", "", extra).strip()
