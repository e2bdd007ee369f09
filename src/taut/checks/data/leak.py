"""Whether a prompt has the very answer that is to be learned, at its end or after the same words in every row, as where
the answer's column was made part of it. An answer somewhere in the prompt is what extractive tasks are made of, and a
prompt that is nothing but an instruction and the answer is a task of copying: both pass.
"""

from __future__ import annotations

from collections import Counter

from taut.checks.data.records import Exchange, exchanges
from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session

MOST = 0.8
FEWEST = 4
"""Rows without which nothing can be said."""
LONG, BEFORE = 20, 10
"""Characters of an answer that nobody extracts by accident as a whole line, and before it."""
SHOWN = 4


def ask(session: Session) -> Finding:
    """Do prompts not give the answer away?"""
    found = session.once(exchanges)
    if not found:
        said = "no row has a right answer" if session.is_generated else "documents have no prompts"
        return skipped(said)
    given = [one for one in found if gives_away(one)]
    num_rows, unit = len(found), f"of {len(found):,} rows"
    if len(given) >= max(FEWEST, MOST * num_rows) and not is_copying(given):
        return failed(
            f"in {len(given):,} of {num_rows:,} rows the prompt ends with the whole answer",
            number=len(given),
            unit=unit,
            evidence=[
                f"{one.place}: ...{one.prompt[-60:]!r} -> {one.answer[:40]!r}"
                for one in given[:SHOWN]
            ],
            remedy="the model would learn to repeat what it is never shown again; take the answer out of the prompt "
            "(data.columns)",
        )
    words, named = _named(found)
    if len(named) >= max(FEWEST, MOST * num_rows) and not is_copying(named):
        return failed(
            f"in {len(named):,} of {num_rows:,} rows the prompt has the whole answer after {words!r}",
            number=len(named),
            unit=unit,
            evidence=[f"{one.place}: {one.answer[:40]!r}" for one in named[:SHOWN]],
            remedy="the model would learn to repeat what it is never shown again; take the answer out of the prompt "
            "(its system message, data.columns)",
        )
    somewhere = sum(one.answer.strip() in one.prompt for one in found)
    said = f"{somewhere / num_rows:.0%} of answers occur somewhere in their prompt"
    return passed(said, len(given), unit.replace("rows", "prompts end with it"))


def gives_away(one: Exchange) -> bool:
    """Whether the prompt ends with the answer, as words of its own."""
    prompt, answer = one.prompt.rstrip(), one.answer.strip()
    before = prompt[: -len(answer)][-1:] if answer else ""
    return bool(answer) and prompt.endswith(answer) and not before.isalnum()


def _named(found: list[Exchange]) -> tuple[str, list[Exchange]]:
    """The words after which most rows have their answer as the rest of a line, and those rows."""
    rows_of: dict[str, list[Exchange]] = {}
    for one in found:
        before, there, after = one.prompt.partition(one.answer.strip())
        if there and len(there) >= LONG and (not after or after.startswith("\n")):
            rows_of.setdefault(before[-BEFORE:], []).append(one)
    return max(rows_of.items(), key=lambda item: len(item[1]), default=("", []))


def is_copying(given: list[Exchange]) -> bool:
    """One answer for all, or one instruction for all around the answers."""
    answers = {one.answer.strip() for one in given}
    rest = Counter("".join(one.prompt.rpartition(one.answer.strip())[::2]).strip() for one in given)
    return len(answers) == 1 or 2 * rest.most_common(1)[0][1] > len(given)
