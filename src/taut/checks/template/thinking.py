"""Reasoning in the rows against what the template makes of it: written before the answer, and opened by the prompt."""

from __future__ import annotations

from collections.abc import Mapping

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.samples import GENERATED
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
    shared,
)
from taut.data.chat_template import PROBE, Ids, Text

SWITCH = "enable_thinking"


def ask(session: Session) -> Finding:
    """Is reasoning written where rows have it, and opened by the prompt only there?"""
    if session.is_generated:
        return skipped(GENERATED)
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
    ids_of = rendered(session).ids_of
    opened = [
        t
        for t in turns
        if _ends(t, OPEN) and not reasoning_of(t.message) and not _is_closed_at_once(t, ids_of)
    ]
    if opened:
        return _failed(
            f"the generation prompt opens {OPEN} for answers without reasoning:",
            opened,
            len(turns),
            [_opening(turn) for turn in opened],
            f"give rows with reasoning, or a template whose generation prompt does not open it with data.template=FILE"
            f"{_switched_off(session)}",
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


def _is_closed_at_once(turn: Turn, ids_of: Mapping[Text, Ids]) -> bool:
    """Whether the row goes on from the prompt by closing what it opened: the answer is taught to be without thought."""
    prompt, row = ids_of[turn.prompt], ids_of[turn.row]
    return row[: len(prompt)] == prompt and turn.written.lstrip().startswith(CLOSE)


def _opening(turn: Turn) -> str:
    """How the prompt ends, and what the row has from there on."""
    at = shared(turn.prompt.text, turn.row.text)
    return f"{turn.place}: {cut(turn.prompt.text[-40:])}, the row then {cut(turn.row.text[at : at + 60])}"


def _switched_off(session: Session) -> str:
    """The shortest way to such a template, where the model's own has a switch."""
    template = session.language.renderer.template.template
    if not isinstance(template, str) or SWITCH not in template:
        return ""
    return f": the model's own after a first line {{%- set {SWITCH} = false %}}"


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
    empty = sum(
        "".join(t.written.split()).startswith((OPEN + CLOSE, CLOSE))
        for t in turns
        if not reasoning_of(t.message)
    )
    if empty:
        notes.append(f"{empty} answers are taught to begin with an empty {OPEN}{CLOSE}")
    notes.extend(_switched(session))
    return notes


def _switched(session: Session) -> list[str]:
    """How prompts end where a server switches thinking off or on, and the template takes that."""
    template = session.language.renderer.template
    if not isinstance(template.template, str) or SWITCH not in template.template:
        return []
    switches: list[dict[str, bool]] = [{}, {SWITCH: False}, {SWITCH: True}]
    prompts = [
        template.write(PROBE[:1], (), is_prompt=True, place=f"a prompt with {switch}", **switch)
        for switch in switches
    ]
    return [
        f"served with {SWITCH}={str(switch[SWITCH]).lower()}, prompts are not those trained on: {cut(prompt[-40:])}"
        for switch, prompt in zip(switches[1:], prompts[1:], strict=True)
        if prompt != prompts[0]
    ]
