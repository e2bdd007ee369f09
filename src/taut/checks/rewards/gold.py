"""The right answers of the run's own questions, judged as the model's answers will be.

A right answer is each reference of a row and, where the row ends with an assistant's message, that message; the best of
them counts. taut's own rewards give 1. What a function of the user's gives at best is not known, so it is also shown
the answers of other rows, and none at all: it has to tell them apart, and not by preferring the wrong ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from taut.build import engine_of
from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session, owned_by
from taut.data.prompts import PromptRow
from taut.evals.during import Answering, build_answering
from taut.rewards import REWARDS, Reward, Score

MOST = 16
"""Rows looked at: a function may take its time, and is called some four times a row."""


class Judged(NamedTuple):
    """What a reward says of right answers, of wrong ones, and where it fails."""

    right: list[tuple[PromptRow, float]]
    wrong: list[float]
    errors: list[str]

    @property
    def mean(self) -> float:
        return sum(value for _, value in self.right) / len(self.right)


def ask(session: Session) -> Finding:
    """Do the run's rewards give right answers full marks?"""
    if not session.run.eval.answers.rewards:
        return skipped("eval.answers.rewards is not set")
    if not session.ranks.is_writer:
        return skipped("the first rank judges for all")
    answering = session.once(_answering)
    rows = [row for row in answering.rows[:MOST] if row.references]
    if not rows:
        return skipped("no row has a reference answer")
    notes, means = [], []
    for reward in answering.rewards:
        judged = _judge(reward, rows)
        trouble = _trouble(reward, judged, len(rows), session.run.eval.answers.max_errors)
        if trouble is not None:
            return trouble
        means.append(judged.mean)
        notes.append(f"{reward.name}: {judged.mean:.3g} on average of {len(rows)} right answers")
    names = ", ".join(reward.name for reward in answering.rewards)
    return passed(f"right answers are known as right by {names}", min(means), "on average", notes)


@owned_by("rewards.gold")
def _answering(session: Session) -> Answering:
    run, inputs = session.run, session.inputs
    make_engine = engine_of(session.built)
    found = build_answering(run.eval.answers, run.data, inputs.renderer, make_engine, session.job)
    assert found is not None
    return found


def _judge(reward: Reward, rows: Sequence[PromptRow]) -> Judged:
    right, wrong, errors = [], [], []
    for number, row in enumerate(rows):
        scores = [reward.score(text, row.references, row.columns) for text in _right(row)]
        errors += [f"{row.place}: {score.error}" for score in scores[:1] if score.error]
        if values := _values(scores):
            right.append((row, max(values)))
        other = rows[(number + 1) % len(rows)]
        if not set(_right(other)) & set(_right(row)):
            scores = [reward.score(text, row.references, row.columns) for text in _right(other)]
            wrong += [max(values)] if (values := _values(scores)) else []
        wrong += _values([reward.score("", row.references, row.columns)])
    return Judged(right, wrong, errors)


def _values(scores: Iterable[Score]) -> list[float]:
    return [score.value for score in scores if score.value is not None]


def _right(row: PromptRow) -> list[str]:
    """Texts that answer a row rightly."""
    messages: Any = row.columns.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else {}
    is_answer = isinstance(last, dict) and last.get("role") == "assistant"
    whole = [last["content"]] if is_answer and isinstance(last.get("content"), str) else []
    return list(dict.fromkeys([*row.references, *whole]))


def _trouble(reward: Reward, judged: Judged, num_rows: int, max_errors: float) -> Finding | None:
    """What is wrong with a reward, if anything is."""
    name, right, wrong = reward.name, judged.right, judged.wrong
    if len(judged.errors) > max_errors * num_rows:
        return failed(
            f"{name} fails on {len(judged.errors)} of {num_rows} right answers",
            number=len(judged.errors),
            unit=f"of {num_rows} are errors",
            evidence=judged.errors[:3],
            remedy=f"mend {name}, or leave it out of eval.answers.rewards",
        )
    if not right:
        return failed(
            f"{name} applies to none of {num_rows} rows",
            number=0,
            unit=f"of {num_rows} rows",
            remedy=f"leave {name} out of eval.answers.rewards, or ask it of other rows (eval.answers.data)",
        )
    best = 1.0 if reward.verifier is REWARDS.get(name) else max([v for _, v in right] + wrong)
    low = [(row, value) for row, value in right if value < best]
    is_blind = best <= 0 and len({*wrong, *(value for _, value in right)}) == 1
    prefers_wrong = bool(wrong) and judged.mean < sum(wrong) / len(wrong)
    is_own_and_low = reward.verifier is REWARDS.get(name) and 2 * len(low) > len(right)
    if not (is_blind or prefers_wrong or is_own_and_low):
        return None
    row, value = (low or right)[0]
    said = "the same as any other answer" if is_blind else "less than other rows' answers"
    return failed(
        f"{name} gives right answers {judged.mean:.3g} on average, {said}",
        number=judged.mean,
        unit="on average",
        evidence=[f"{row.place}: {text!r:.60} is given {value:g}" for text in _right(row)[:2]],
        remedy=f"mend {name}, or name the column with whole answers (eval.answers.reference)",
    )
