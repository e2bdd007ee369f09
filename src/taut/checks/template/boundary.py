"""Where prompt and answer meet: a token that reaches over the boundary is one that inference never sees."""

from __future__ import annotations

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.samples import GENERATED
from taut.checks.session import Session
from taut.checks.template.rendered import SHOWN, Turn, is_most, rendered
from taut.data.chat_template import Ids, common_length


def ask(session: Session) -> Finding:
    """Do prompt and answer meet between two tokens?"""
    if session.is_generated:
        return skipped(GENERATED)
    found = rendered(session)
    turns = [turn for turn in found.turns if turn.is_prefix]
    if not turns:
        return skipped("no row has a prompt that is its beginning")
    eos = session.tokenizer.eos_token_id
    merged = [
        turn
        for turn in turns
        if _is_merged(turn, found.ids_of[turn.prompt], found.ids_of[turn.row], eos)
    ]
    if is_most(merged, turns):
        template = session.language.renderer.template

        def shown(turn: Turn) -> str:
            prompt, row = found.ids_of[turn.prompt], found.ids_of[turn.row]
            at = common_length(prompt, row)
            return (
                f"{turn.place}: token {at} is {template.quoted(prompt[at : at + 1])} in the prompt and "
                f"{template.quoted(row[at : at + 1])} in the row"
            )

        return failed(
            f"a token reaches over the boundary of {len(merged)} of {len(turns)} answers",
            number=len(merged),
            unit=f"of {len(turns)} answers",
            evidence=[shown(turn) for turn in merged[:SHOWN]],
            remedy="take white space from where they meet: from the end of the prompt (or of the template's generation "
            "prompt) or the beginning of the answer",
        )
    return passed("no token reaches over", len(turns) - len(merged), "answers")


def _is_merged(turn: Turn, prompt: Ids, row: Ids, eos: int | None) -> bool:
    if not turn.prompt.is_rendering and prompt[-1:] == [eos]:
        prompt = prompt[:-1]  # a tokenizer that itself ends each text with eos
    return row[: len(prompt)] != prompt
