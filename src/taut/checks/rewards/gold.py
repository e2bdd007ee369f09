"""The right answers of the run's own questions, judged as the model's answers will be.

A right answer is each reference of a row and, where the row ends with an assistant's message, that message; the best of
them counts. taut's own rewards that say what is right give 1, and give no answer less. What a function of the user's, a
model or a judge gives at best is not known, so it is also shown the answers of other rows, and none at all: it has to
tell them apart, and not by preferring the wrong ones. Where rewards are added up (training), the total has to.
Rewards of form are asked only whether they can be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from taut.build import engine_of
from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.owned import owned_by
from taut.checks.rollout.opened import roller
from taut.checks.session import Session
from taut.data.prompt_set import PromptSet
from taut.data.prompts import PromptRow
from taut.evals.answers import as_answer
from taut.evals.during import Answering, build_answering
from taut.rewards import Panel, Score, Verdict
from taut.rewards.verifier import Question

MOST = 16
"""Rows looked at: a reward may take its time, and is asked some four times a row."""
TOTAL = "the total"


class Shown(NamedTuple):
    """What is shown of a row, and what the rewards said of each."""

    row: PromptRow
    right: list[Verdict]
    others: list[Verdict]
    """Answers to another row."""
    empty: Verdict


class Judged(NamedTuple):
    """What a reward says of right answers, of wrong ones, and where it fails."""

    name: str
    asks: Question
    right: list[tuple[PromptRow, float]]
    others: list[float]
    empty: list[float]
    errors: list[str]

    @property
    def mean(self) -> float:
        return _mean([value for _, value in self.right])


def ask(session: Session) -> Finding:
    """Do the run's rewards give right answers full marks?"""
    if not session.ranks.is_writer:
        return skipped("the first rank judges for all")
    found = [*_in_training(session), *_in_evaluation(session)]
    if not found:
        return skipped("no rewards are set")
    order = ("failed", "passed", "skipped")
    return min(found, key=lambda one: order.index(one.outcome))


def _in_training(session: Session) -> Iterator[Finding]:
    """The rewards that are learned from."""
    online = session.run.objective.online
    if online is None or not online.rewards:
        return
    panel, train = session.once(roller).panel, session.train
    assert panel is not None and isinstance(train, PromptSet)
    yield preflight(panel, train.asked, online.guard.max_errors, "")


def _in_evaluation(session: Session) -> Iterator[Finding]:
    """Those that judge held-out answers."""
    if session.run.eval.answers.rewards:
        answering = session.once(_answering)
        max_errors = session.run.eval.answers.max_errors
        assert answering.panel is not None
        yield preflight(answering.panel, answering.rows, max_errors, "eval.answers")


def preflight(panel: Panel, rows: Sequence[PromptRow], max_errors: float, key: str) -> Finding:
    """What the panel says of the rows' right answers and of wrong ones.

    ``key``: the table of the configuration that has ``rewards``; "" is the run itself, where the total is what counts.
    """
    rows = [row for row in rows if row.references][:MOST]
    if not rows:
        return skipped("no row has a reference answer")
    shown = _show(panel, rows)
    each = [
        _judge(part.label, part.verifier.asks, shown, lambda it, name=part.label: it.parts[name])  # type: ignore[misc]
        for part in panel.parts
    ]
    if not key and any(judged.asks != "form" for judged in each):
        each = [it._replace(asks="form") if it.asks == "worth" else it for it in each]
        each.append(_judge(TOTAL, "worth", shown, lambda it: Score(it.total)))
    setting = f"{key}.rewards" if key else "rewards"
    for judged in each:
        trouble = _trouble(judged, len(rows), max_errors, setting)
        if trouble is not None:
            return trouble
    telling = [judged for judged in each if judged.asks != "form"]
    if not telling:
        return skipped("no reward says what is right")
    notes = [f"{it.name}: {it.mean:.3g} on average of {len(rows)} right answers" for it in telling]
    names = ", ".join(judged.name for judged in telling)
    lowest = min(judged.mean for judged in telling)
    return passed(f"right answers are known as right by {names}", lowest, "on average", notes)


@owned_by("rewards.gold")
def _answering(session: Session) -> Answering:
    run, renderer = session.run, session.inputs.renderer
    make_engine, kind = engine_of(session.built), run.objective.kind
    found = build_answering(run.eval.answers, run.data, renderer, make_engine, session.job, kind)
    assert found is not None
    return found


def _show(panel: Panel, rows: Sequence[PromptRow]) -> list[Shown]:
    """All of it is graded at once, side by side."""
    texts = []
    for number, row in enumerate(rows):
        right, others = _right(row), _right(rows[(number + 1) % len(rows)])
        texts.append((right, [] if set(others) & set(right) else others))
    asked = [
        [as_answer(row, text) for text in (*right, *others, "")]
        for row, (right, others) in zip(rows, texts, strict=True)
    ]
    said = iter(panel.grade(list(chain.from_iterable(asked)), are_bare=True))
    return [
        Shown(row, [next(said) for _ in right], [next(said) for _ in others], next(said))
        for row, (right, others) in zip(rows, texts, strict=True)
    ]


def _judge(
    name: str, asks: Question, shown: Sequence[Shown], score: Callable[[Verdict], Score]
) -> Judged:
    right, others, empty, errors = [], [], [], []
    for it in shown:
        scores = [score(verdict) for verdict in it.right]
        errors += [f"{it.row.place}: {found.error}" for found in scores[:1] if found.error]
        if values := _values(scores):
            right.append((it.row, max(values)))
        if values := _values([score(verdict) for verdict in it.others]):
            others.append(max(values))
        empty += _values([score(it.empty)])
    return Judged(name, asks, right, others, empty, errors)


def _values(scores: Iterable[Score]) -> list[float]:
    return [score.value for score in scores if score.value is not None]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _right(row: PromptRow) -> list[str]:
    """Texts that answer a row rightly."""
    messages: Any = row.columns.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else {}
    is_answer = isinstance(last, dict) and last.get("role") == "assistant"
    whole = [last["content"]] if is_answer and isinstance(last.get("content"), str) else []
    return list(dict.fromkeys([*row.references, *whole]))


def _trouble(judged: Judged, num_rows: int, max_errors: float, setting: str) -> Finding | None:
    """What is wrong with a reward, if anything is."""
    name, right = judged.name, judged.right
    if len(judged.errors) > max_errors * num_rows:
        return failed(
            f"{name} fails on {len(judged.errors)} of {num_rows} right answers",
            number=len(judged.errors),
            unit=f"of {num_rows} are errors",
            evidence=judged.errors[:3],
            remedy=f"mend {name}, or leave it out of {setting}",
        )
    if judged.asks == "form":
        return None
    if not right:
        return failed(
            f"{name} applies to none of {num_rows} rows",
            number=0,
            unit=f"of {num_rows} rows",
            remedy=f"leave {name} out of {setting}, or ask it of other rows",
        )
    said = _mistake(judged)
    if said is None:
        return None
    best = max(value for _, value in right) if judged.asks == "worth" else 1.0
    row = next((row for row, value in right if value < best), right[0][0])
    return failed(
        f"{name} gives right answers {judged.mean:.3g} on average, {said}",
        number=judged.mean,
        unit="on average",
        evidence=[f"{row.place}: right is {text!r:.60}" for text in _right(row)[:2]],
        remedy=f"mend {name}, or name the column with whole answers ({setting.removesuffix('rewards')}reference)",
    )


def _mistake(judged: Judged) -> str | None:
    """What shows that a reward does not know a right answer."""
    values = [value for _, value in judged.right]
    wrong = judged.others + judged.empty
    if wrong and len({*wrong, *values}) == 1:
        is_blind = values[0] <= 0 or judged.name == TOTAL
        return "the same as any other answer" if is_blind else None
    if wrong and judged.mean < _mean(wrong):
        return "less than other rows' answers"
    if judged.empty and judged.mean <= _mean(judged.empty):
        return "no more than no answer at all"
    if judged.asks == "right" and 2 * sum(value < 1 for value in values) > len(values):
        return "where it is 1 by its own measure"
    return None
