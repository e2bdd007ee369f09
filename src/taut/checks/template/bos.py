"""The beginning of each row's ids. A tokenizer that puts BOS in front of plain text does not do so for a rendering."""

from __future__ import annotations

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session
from taut.checks.template.rendered import SHOWN, is_most, rendered, short
from taut.data.chat_template import Ids, Text


def ask(session: Session) -> Finding:
    """Does a row begin with one BOS at most?"""
    found, bos = rendered(session), session.tokenizer.bos_token_id
    rows = [(short(chat.place), found.ids_of[chat.whole]) for chat in found.chats]
    rows += [
        (turn.place, found.ids_of[turn.row]) for turn in found.turns if not turn.row.is_rendering
    ]
    rows += [("a text", found.ids_of[text]) for text in found.documents]
    if not rows:
        return skipped("no row could be rendered")
    if bos is None:
        return passed("the tokenizer has no BOS", 0, "a row")
    token, is_end = session.tokenizer.bos_token, bos == session.tokenizer.eos_token_id
    twice = [(place, ids) for place, ids in rows if _is_twice(ids, bos, is_only_first=bool(is_end))]
    if is_most(twice, rows):
        renderer = session.language.renderer
        return failed(
            f"{token} stands twice running in {len(twice)} of {len(rows)} rows",
            number=len(twice),
            unit=f"of {len(rows)} rows",
            evidence=[
                f"{place}: {renderer.template.quoted(ids[:8])}" for place, ids in twice[:SHOWN]
            ],
            remedy=f"write {token} once: take it out of the template (data.template=FILE) or out of the rows' text",
        )
    number = sum(ids[:1] == [bos] for _, ids in rows)
    notes = _without_bos(session, bos) if found.chats and number < len(rows) else []
    said = f"{token} once" if number else f"the rows begin without {token}"
    return passed(said, number, f"of {len(rows)} rows", notes)


def _is_twice(ids: Ids, bos: int, *, is_only_first: bool) -> bool:
    """Two in succession; at the beginning only where BOS ends turns too."""
    pairs = zip(ids, ids[1:2] if is_only_first else ids[1:], strict=False)
    return any(pair == (bos, bos) for pair in pairs)


def _without_bos(session: Session, bos: int) -> list[str]:
    """The tokenizer's own convention, where the template departs from it."""
    probe = Text("Hi", is_rendering=False)
    ids = session.language.renderer.template.encode([probe])[probe]
    token = session.tokenizer.bos_token
    if ids[:1] != [bos]:
        return []
    return [
        f"the tokenizer puts {token} before plain text, the template writes none: "
        "chats are trained and served without it"
    ]
