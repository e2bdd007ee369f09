"""Special tokens looked for in the messages' own words: a conversation that was rendered before is there twice."""

from __future__ import annotations

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session
from taut.checks.template.rendered import NO_CHATS, SHOWN, cut, is_most, rendered
from taut.data.messages import text_of


def ask(session: Session) -> Finding:
    """Are the messages free of the special tokens that the template itself writes?"""
    chats = rendered(session).chats
    if not chats:
        return skipped(NO_CHATS)
    wanted = set(session.run.tokens.add)  # made for the messages
    added = session.tokenizer.added_tokens_decoder.values()
    special = [
        *session.tokenizer.all_special_tokens,
        *(token.content for token in added if token.special),
    ]
    tokens = [token for token in dict.fromkeys(special) if token and token not in wanted]
    hits = []
    for chat in chats:
        for index, message in enumerate(chat.row.messages):
            words = text_of(message["content"])
            token = next((token for token in tokens if token in words), None)
            if token is not None:
                at = words.index(token)
                hits.append(
                    (chat, f"messages[{index}]: {cut(words[max(0, at - 20) : at + 40])}", token)
                )
                break
    if is_most(hits, chats):
        return failed(
            f"{hits[0][2]} is written in the messages of {len(hits)} of {len(chats)} rows",
            number=len(hits),
            unit=f"of {len(chats)} rows",
            evidence=[f"{chat.place}: {where}" for chat, where, _ in hits[:SHOWN]],
            remedy="the rows seem to be rendered already, and the template would be there twice; give plain messages, "
            "or the rendered text in a column text",
        )
    notes = [f"{hits[0][2]} in {chat.place}, {where}" for chat, where, _ in hits[:1]]
    return passed("no special token in the messages' words", len(hits), "rows", notes)
