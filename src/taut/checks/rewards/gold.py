"""The right answers of the run's own questions, judged as the model's answers will be.

A right answer is each reference of a row and, where the row ends with an assistant's message, that message; the best of
them counts. taut's own rewards of correctness give 1, and give no answer less. What a function of the user's, a model
or a judge gives at best is not known, so it is also shown the answers of other rows, and none at all: it has to tell
them apart, and not by preferring the wrong ones. Where rewards are added up (training), the total has to.

Rewards of form (``judges``) have to be computable on these answers, and a function of the user's has to give a number
for one of them at least. Where no reward judges correctness, nothing else is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple, get_args

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.owned import owned_by
from taut.checks.rollout.opened import roller
from taut.checks.session import Session
from taut.data.prompts import PromptRow, PromptSet
from taut.evals.answers import as_answer
from taut.evals.during import Answering, build_answering
from taut.rewards import Panel, Score, Verdict
from taut.rewards.registry import Part
from taut.rewards.user import Own
from taut.rewards.verifier import Judged
from taut.run.setup import engine_of

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


class Marks(NamedTuple):
    """What a reward says of right answers, of wrong ones, and where it fails."""

    name: str
    judges: Judged
    full_marks: float | None
    """What a right answer gets; None: the scale is its own."""
    must_apply: bool
    """Whether it is a bug that it gives no number at all."""
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
    yield preflight(panel, train.asked, online.guard.max_errors, "", _counter(session))


def _in_evaluation(session: Session) -> Iterator[Finding]:
    """Those that judge held-out answers."""
    if session.run.eval.answers.rewards:
        answering = session.once(_answering)
        max_errors = session.run.eval.answers.max_errors
        assert answering.panel is not None
        count = _counter(session)
        yield preflight(answering.panel, answering.rows, max_errors, "eval.answers", count)


def _counter(session: Session) -> Callable[[str], int]:
    """Counts the tokens of an answer, with the one that ends it."""
    return lambda text: len(session.tokenizer.encode(text, add_special_tokens=False)) + 1


def preflight(
    panel: Panel,
    rows: Sequence[PromptRow],
    max_errors: float,
    key: str,
    num_tokens: Callable[[str], int],
) -> Finding:
    """What the panel says of the rows' right answers and of wrong ones.

    ``key``: the table of the configuration that has ``rewards``; "" is the run itself, where the total is what counts.
    ``num_tokens``: how many tokens an answer has.
    """
    rows = [row for row in rows if row.references][:MOST]
    if not rows:
        return skipped("no row has a reference answer")
    shown = _show(panel, rows, num_tokens)
    each = [_marks(part, panel.judges[part.label], shown) for part in panel.parts]
    names = {kind: [it.name for it in each if it.judges == kind] for kind in get_args(Judged)}
    if not key and names["correctness"]:
        # What is learned from is the total: a reward with a scale of its own is asked within it.
        each = [
            it._replace(judges="form", must_apply=False)
            if it.judges == "correctness" and it.full_marks is None
            else it
            for it in each
        ]
        total = _answers_of(shown, lambda it: Score(it.total))
        each.append(Marks(TOTAL, "correctness", None, True, *total))
    setting = f"{key}.rewards" if key else "rewards"
    for judged in each:
        trouble = _trouble(judged, len(rows), max_errors, setting)
        if trouble is not None:
            return trouble
    if not names["correctness"]:
        says = f"{', '.join(names['form'])} can be computed; no reward judges correctness"
        return passed(says, len(rows), "right answers")
    telling = [judged for judged in each if judged.judges == "correctness"]
    notes = [f"{it.name}: {it.mean:.3g} on average of {len(rows)} right answers" for it in telling]
    names_told = ", ".join(judged.name for judged in telling)
    lowest = min(judged.mean for judged in telling)
    return passed(f"right answers are known as right by {names_told}", lowest, "on average", notes)


@owned_by("rewards.gold")
def _answering(session: Session) -> Answering:
    run, renderer = session.run, session.inputs.renderer
    make_engine, kind = engine_of(session.built), run.objective.kind
    found = build_answering(run.eval.answers, run.data, renderer, make_engine, session.job, kind)
    assert found is not None
    return found


def _show(panel: Panel, rows: Sequence[PromptRow], num_tokens: Callable[[str], int]) -> list[Shown]:
    """All of it is graded at once, side by side."""
    texts = []
    for number, row in enumerate(rows):
        right, others = _right(row), _right(rows[(number + 1) % len(rows)])
        texts.append((right, [] if set(others) & set(right) else others))
    asked = [
        [
            replace(as_answer(row, text), num_tokens=num_tokens(text))
            for text in (*right, *others, "")
        ]
        for row, (right, others) in zip(rows, texts, strict=True)
    ]
    said = iter(panel.grade(list(chain.from_iterable(asked)), are_bare=True))
    return [
        Shown(row, [next(said) for _ in right], [next(said) for _ in others], next(said))
        for row, (right, others) in zip(rows, texts, strict=True)
    ]


def _marks(part: Part, judges: Judged, shown: Sequence[Shown]) -> Marks:
    """What one reward says."""
    answers = _answers_of(shown, lambda it: it.parts[part.label])
    full_marks = part.verifier.full_marks if judges == "correctness" else None
    return Marks(part.label, judges, full_marks, isinstance(part.verifier, Own), *answers)


def _answers_of(
    shown: Sequence[Shown], score: Callable[[Verdict], Score]
) -> tuple[list[tuple[PromptRow, float]], list[float], list[float], list[str]]:
    """The last four fields of ``Marks``."""
    right, others, empty, errors = [], [], [], []
    for it in shown:
        scores = [score(verdict) for verdict in it.right]
        errors += [f"{it.row.place}: {found.error}" for found in scores[:1] if found.error]
        if values := _values(scores):
            right.append((it.row, max(values)))
        if values := _values([score(verdict) for verdict in it.others]):
            others.append(max(values))
        empty += _values([score(it.empty)])
    return right, others, empty, errors


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


def _trouble(judged: Marks, num_rows: int, max_errors: float, setting: str) -> Finding | None:
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
    if judged.judges == "form" and (right or judged.others or not judged.must_apply):
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
    best = judged.full_marks or max(value for _, value in right)
    row = next((row for row, value in right if value < best), right[0][0])
    return failed(
        f"{name} gives right answers {judged.mean:.3g} on average, {said}",
        number=judged.mean,
        unit="on average",
        evidence=[f"{row.place}: right is {text!r:.60}" for text in _right(row)[:2]],
        remedy=_remedy(name, setting),
    )


def _remedy(name: str, setting: str) -> str:
    column = (
        f"{setting.removesuffix('rewards')}reference" if "." in setting else "rollout.reference"
    )
    return (
        f"mend {name}; or name the column with whole answers ({column}); or, if a reward judges form and not "
        f'correctness, say so (judges = "form" in {setting}, or as an attribute of the function)'
    )


def _mistake(judged: Marks) -> str | None:
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
    full = judged.full_marks
    if full is not None and 2 * sum(value < full for value in values) > len(values):
        return f"where it is {full:g} by its own measure"
    return None
