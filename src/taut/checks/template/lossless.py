"""Each rendering to ids and back. Unicode normalisation and a space in front are no loss."""

from __future__ import annotations

import difflib
import re

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session
from taut.checks.template.rendered import SHOWN, cut, is_most, normal, rendered
from taut.data.chat_template import Ids

ROWS = 16
MARK = re.compile(r"<\|\w+\|>|<(?:start|end)_of_turn>|\[/?INST\]")
"""How templates write who speaks and where turns end."""
MOST = 4000
"""Characters of a row among which the first that differs is looked for."""


def ask(session: Session) -> Finding:
    """Does the tokenizer keep the text: ids read back as what was rendered?"""
    found = rendered(session)
    texts = [chat.whole for chat in found.chats]
    texts += [turn.row for turn in found.turns if not turn.row.is_rendering]
    texts = [*texts, *found.documents][:ROWS]
    if not texts:
        return skipped("no row could be rendered")
    lost = []
    for text in texts:
        back = _decoded(session, found.ids_of[text])
        if normal(text.text).strip() not in normal(back):
            lost.append((normal(text.text).strip(), normal(back).strip()))
    if is_most(lost, texts):
        return failed(
            f"the ids of {len(lost)} of {len(texts)} rows read back as another text",
            number=len(lost),
            unit=f"of {len(texts)} rows",
            evidence=[_difference(*pair) for pair in lost[:SHOWN]],
            remedy="the tokenizer loses what the rows say (its normalizer, or characters it has no token for); use one "
            "that keeps text, or prepare the rows as the model expects them",
        )
    notes = [f"lost in {len(lost)} rows: {_difference(*lost[0])}"] if lost else []
    notes += _in_pieces(session, [text.text for text in texts])
    return passed("ids read back as the text", len(texts) - len(lost), "rows", notes)


def _in_pieces(session: Session, texts: list[str]) -> list[str]:
    """Marks of a template, or of rows, that are made for another tokenizer."""
    marks = dict.fromkeys(mark for text in texts for mark in MARK.findall(text))
    number_of = session.tokenizer.backend_tokenizer.token_to_id
    pieces = [mark for mark in marks if number_of(mark) is None]
    return [f"written in pieces, being no tokens: {' '.join(pieces[:SHOWN])}"] if pieces else []


def _decoded(session: Session, ids: Ids) -> str:
    return str(
        session.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )


def _difference(text: str, back: str) -> str:
    matcher = difflib.SequenceMatcher(None, text[:MOST], back[:MOST], autojunk=False)
    for kind, i, j, k, m in matcher.get_opcodes():
        if kind == "delete" or kind == "replace":
            return f"{cut(text[max(0, i - 8) : max(j, i + 12)])} becomes {cut(back[max(0, k - 8) : max(m, k + 12)])}"
    return f"{cut(text)} becomes {cut(back)}"
