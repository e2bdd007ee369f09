"""The targets of the first rows' samples, as text, against the messages they should be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.samples import GENERATED
from taut.checks.session import Session
from taut.checks.template.rendered import (
    SHOWN,
    answer_of,
    cut,
    normal,
    reasoning_of,
    short,
    texts_of,
)
from taut.data.messages import Completion, Conversation, Message, Row
from taut.errors import RenderError
from taut.types import Sample

ROWS = 16
LONG = 8
"""Characters that words must have to be recognised as somebody's."""


def ask(session: Session) -> Finding:
    """Are the targets, as text, the answers and nothing of what was asked?"""
    if session.is_generated:
        return skipped(GENERATED)
    renderer = session.renderer
    looked_at: list[tuple[Row, str]] = []
    texts: list[str] = []
    for row in session.rows[:ROWS]:
        if not isinstance(row, Conversation | Completion):
            continue
        try:
            samples = renderer.render(row)
        except RenderError:
            continue  # data.rows
        looked_at.append((row, _targets(session, samples)))
        texts.extend(f"{short(one.id)}: {cut(_targets(session, [one]))}" for one in samples)
    if not looked_at:
        return skipped("no row could be rendered as question and answer")
    wrong = [(row, what) for row, text in looked_at if (what := _wrong(session, row, text))]
    if wrong:
        return failed(
            f"the targets of {len(wrong)} of {len(looked_at)} rows are not the answers",
            number=len(wrong),
            unit=f"of {len(looked_at)} rows",
            evidence=[f"{short(row.place)}: {what}" for row, what in wrong[:SHOWN]],
            remedy="look at `taut show`, which marks targets; give a template that writes the answer, and it alone, "
            "after its generation prompt with data.template=FILE",
        )
    return passed("targets are the answers", len(looked_at), "rows", texts[:SHOWN])


def _targets(session: Session, samples: Sequence[Sample]) -> str:
    """Runs of targets as text, one after the other."""
    runs = []
    for sample in samples:
        at_N = sample.target_at_N
        for run in np.split(at_N, np.flatnonzero(np.diff(at_N) > 1) + 1):
            ids = sample.ids_T[run].tolist()
            runs.append(session.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    return normal("\n".join(map(str, runs)))


def _wrong(session: Session, row: Row, text: str) -> str:
    """What is missing among the targets, or is there and should not be; empty: nothing."""
    answers, others = _words(session, row)
    for words in answers:
        before, found, after = text.partition(words)
        if not found:
            return f"{cut(words)} is no target: {cut(text)}"
        text = before + "\n" + after
    if session.run.data.targets == "all":
        return ""
    said = next((words for words in others if len(words) >= LONG and words in text), None)
    return "" if said is None else f"{cut(said)} is a target: {cut(text)}"


def _words(session: Session, row: Row) -> tuple[list[str], list[str]]:
    """What should be among the targets, and what should not."""
    if isinstance(row, Completion):
        return [normal(row.completion.strip())], [normal(row.prompt.strip())]
    assert isinstance(row, Conversation)
    targets = session.run.data.targets
    learned = row.learned[-1:] if targets == "last" else row.learned
    answers = [words for index in learned for words in _parts(row.messages[index])]
    others = [w for m in row.messages if m["role"] != "assistant" for w in texts_of(m)]
    return [normal(words) for words in answers if words], [normal(w.strip()) for w in others]


def _parts(message: Message) -> list[str]:
    calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
    return [reasoning_of(message), answer_of(message), *calls]
