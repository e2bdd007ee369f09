"""Each message's words looked for in the rendering, in their order. White space around them may go, and is noted."""

from __future__ import annotations

import json
from collections.abc import Iterator

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session
from taut.checks.template.rendered import (
    NO_CHATS,
    SHOWN,
    Chat,
    answer_of,
    cut,
    rendered,
    short,
    texts_of,
)
from taut.data.messages import Message, text_of


def ask(session: Session) -> Finding:
    """Does the template write what users, assistants and tools say, word for word?"""
    chats = rendered(session).chats
    if not chats:
        return skipped(NO_CHATS)
    number = sum(m["role"] != "system" for chat in chats for m in chat.row.messages)
    lost = [(chat, index) for chat in chats for index in _lost(chat)]
    if lost:
        roles = sorted({_kind(chat.row.messages[index]) for chat, index in lost})
        return failed(
            f"the template leaves out or changes words of {len(lost)} of {number} messages ({', '.join(roles)})",
            number=len(lost),
            unit=f"of {number} messages",
            evidence=[
                f"{short(chat.place)}: messages[{index}]: {cut(text_of(chat.row.messages[index]['content']))}"
                for chat, index in lost[:SHOWN]
            ],
            remedy="give a template that writes every message as it is with data.template=FILE, or change the rows",
        )
    trimmed = sum(
        m["role"] == "user" and any(words not in chat.whole.text for words in texts_of(m))
        for chat in chats
        for m in chat.row.messages
    )
    notes = [f"white space around the words of {trimmed} messages is taken off"] if trimmed else []
    return passed("every message, word for word", number, "messages", notes)


def _lost(chat: Chat) -> Iterator[int]:
    """Messages whose words are not found after those of the message before."""
    text, at = chat.whole.text, 0
    for index, message in enumerate(chat.row.messages):
        if message["role"] == "system":  # may stand elsewhere: template.system
            continue
        for words in texts_of(message):
            found = [(text.find(it, at), len(it)) for it in _spellings(message, words.strip())]
            first = min((place for place in found if place[0] >= 0), default=None)
            if first is None:
                yield index
                break
            at = sum(first)


def _spellings(message: Message, words: str) -> list[str]:
    """How a message's words may be written: a tool's answer as JSON too."""
    if message["role"] == "assistant":
        return [answer_of(message)]
    if message["role"] == "tool":
        return [words, json.dumps(words)[1:-1], json.dumps(words, ensure_ascii=False)[1:-1]]
    return [words]


def _kind(message: Message) -> str:
    return f"{message['role']}{' with calls' if message.get('tool_calls') else ''}"
