"""Answers as they are first written against the same answers once they are history."""

from __future__ import annotations

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.samples import GENERATED
from taut.checks.session import Session
from taut.checks.template.rendered import NO_CHATS, SHOWN, Chat, rendered, short


def ask(session: Session) -> Finding:
    """Is every answer trained as the model writes it, whatever the template makes of it once it is history?"""
    if session.is_generated:
        return skipped(GENERATED)
    chats = rendered(session).chats
    if not chats:
        return skipped(NO_CHATS)
    rewritten = [chat for chat in chats if _first_rewritten(chat) is not None]
    if session.run.data.targets == "all" and rewritten:
        return failed(
            f"with targets=all, {len(rewritten)} of {len(chats)} rows are trained on answers rewritten as history",
            number=len(rewritten),
            unit=f"of {len(chats)} rows",
            evidence=[
                f"{short(chat.place)}: messages[{_first_rewritten(chat)}] is written differently once history"
                for chat in rewritten[:SHOWN]
            ],
            remedy="set data.targets=assistant, which trains each answer as it is written when it is given",
        )
    if not rewritten:
        return passed("once rendered is rendered in parts", len(chats), "rows")
    notes = ["the template rewrites answers once they are history, so each is a sample of its own"]
    said = "rows rewritten as history become several samples"
    return passed(said, len(rewritten), f"of {len(chats)} rows", notes)


def _first_rewritten(chat: Chat) -> int | None:
    whole = chat.whole.text
    rewritten = (t.index for t in chat.turns if not whole.startswith(t.row.text.rstrip()))
    return next(rewritten, None)
