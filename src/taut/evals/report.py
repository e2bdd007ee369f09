"""Answers -> numbers (each metric's mean with an interval, pass@k, how answers end and how long they are), and these as
tables for people.

A prompt counts once, however many completions it has: a metric's mean is the mean over prompts of the mean over their
scored completions. Where every value is 0 or 1 the interval is Wilson's with prompts as trials, else a bootstrap over
prompts. Scores that do not apply and scores that are errors are left out of the mean and counted; completions that an
engine could not finish (finish_reason error) are counted separately and not scored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import dropwhile
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from taut.data.rows.messages import text_of
from taut.data.rows.prompts import PromptRow
from taut.evals.statistics import bootstrap_interval, mean, pass_at_k, wilson_interval
from taut.io.console import counted
from taut.rewards.verifier import Score
from taut.types import Completion

STOPPED = "stopped"
"""The metric every report has: the share of completions that ended by themselves."""


@dataclass(frozen=True, eq=False, slots=True)
class Answer:
    """A completion and its scores."""

    row: PromptRow
    completion: Completion
    scores: Mapping[str, Score]
    """By metric; empty where the engine could not finish the completion."""

    @property
    def has_failed(self) -> bool:
        return self.completion.finish_reason == "error"

    @property
    def place(self) -> str:
        """The row, and which of its completions where it is not the first."""
        index = self.completion.index
        return f"{self.row.place}#{index}" if index else self.row.place


@dataclass(frozen=True)
class Metric:
    """One reward's scores of all answers."""

    name: str
    mean: float | None
    """None without a score."""
    low: float | None
    high: float | None
    """The 95% interval; None where there are too few values."""
    interval: Literal["wilson", "bootstrap"] | None
    num_scored: int
    num_not_applicable: int
    errors: tuple[str, ...]
    """``place: reason`` of each score that is an error."""
    pass_at: Mapping[int, float]
    """k -> the chance that one of k completions is right; where values are 0 or 1 and prompts have several."""

    @property
    def error_share(self) -> float:
        total = self.num_scored + self.num_not_applicable + len(self.errors)
        return len(self.errors) / total if total else 0.0


@dataclass(frozen=True)
class Lengths:
    """Tokens of the completions, including the token that ended them."""

    mean: float
    median: float
    longest: int
    histogram: tuple[tuple[int, int, int], ...]
    """(from, to, how many), both ends included: 1, 2, 3-4, 5-8, 9-16, ..."""


@dataclass(frozen=True)
class Report:
    """The metrics of a model's answers to a set of prompts."""

    num_prompts: int
    num_completions: int
    failures: tuple[str, ...]
    """``place: reason`` of each completion that the engine could not finish."""
    stopped: Metric
    metrics: tuple[Metric, ...]
    lengths: Lengths | None
    """None where no completion was finished."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, for ``report.json``."""
        return asdict(self)

    def values(self) -> dict[str, float]:
        """name -> value, for those with one: each metric, its pass@k as ``NAME_pass_K``, and ``stopped``."""
        values: dict[str, float] = {}
        for metric in (*self.metrics, self.stopped):
            if metric.mean is not None:
                values[metric.name] = metric.mean
            values |= {f"{metric.name}_pass_{k}": value for k, value in metric.pass_at.items()}
        return values


def build_report(answers: Sequence[Answer], names: Sequence[str]) -> Report:
    """The report on ``answers``, with a metric for each of ``names``."""
    finished = [answer for answer in answers if not answer.has_failed]
    stopped = [Score(float(answer.completion.finish_reason == "stop")) for answer in finished]
    return Report(
        num_prompts=len({answer.row.id for answer in answers}),
        num_completions=len(answers),
        failures=tuple(
            f"{answer.place}: {answer.completion.error}" for answer in answers if answer.has_failed
        ),
        stopped=_metric(STOPPED, finished, stopped, has_pass_at=False),
        metrics=tuple(
            _metric(name, finished, [answer.scores[name] for answer in finished]) for name in names
        ),
        lengths=_lengths([int(answer.completion.ids_N.size) for answer in finished]),
    )


def pass_ks(num_samples: int) -> list[int]:
    """The reported k of pass@k for ``num_samples`` completions of a prompt: powers of two, and all."""
    powers = [1 << power for power in range(1, num_samples.bit_length())]
    return sorted({*powers, num_samples} - {0, 1})


def spaced(answers: Sequence[Answer], limit: int) -> list[Answer]:
    """The first completions of evenly spaced prompts, at most ``limit``."""
    firsts = [answer for answer in answers if answer.completion.index == 0]
    at = np.linspace(0, len(firsts) - 1, min(limit, len(firsts))).round().astype(int)
    return [firsts[index] for index in at.tolist()]


def _metric(
    name: str, answers: Sequence[Answer], scores: Sequence[Score], *, has_pass_at: bool = True
) -> Metric:
    # a prompt counts once
    groups: dict[str, list[float]] = {}
    for answer, score in zip(answers, scores, strict=True):
        if score.value is not None:
            groups.setdefault(answer.row.id, []).append(score.value)
    means = [mean(group) for group in groups.values()]
    is_binary = all(value in (0.0, 1.0) for group in groups.values() for value in group)
    interval: Literal["wilson", "bootstrap"] | None = None
    low, high = None, None
    if means and is_binary:
        interval, (low, high) = "wilson", wilson_interval(sum(means), len(means))
    elif len(means) > 1:
        interval, (low, high) = "bootstrap", bootstrap_interval(means)
    errors = [
        f"{answer.place}: {score.error}"
        for answer, score in zip(answers, scores, strict=True)
        if score.error is not None
    ]
    # pass@k, of right and wrong alone
    pass_at: dict[int, float] = {}
    largest = max(map(len, groups.values()), default=0) if has_pass_at and is_binary else 0
    for k in pass_ks(largest):  # over the prompts with at least k scored completions
        enough = [group for group in groups.values() if len(group) >= k]
        chances = [pass_at_k(len(group), int(sum(group)), k) for group in enough]
        pass_at[k] = float(np.mean(chances))
    num_scored = sum(map(len, groups.values()))
    return Metric(
        name=name,
        mean=mean(means) if means else None,
        low=low,
        high=high,
        interval=interval,
        num_scored=num_scored,
        num_not_applicable=len(scores) - num_scored - len(errors),
        errors=tuple(errors),
        pass_at=pass_at,
    )


def _lengths(lengths: Sequence[int]) -> Lengths | None:
    if not lengths:
        return None
    bins = Counter(max(length - 1, 0).bit_length() for length in lengths)
    return Lengths(
        mean=float(np.mean(lengths)),
        median=float(np.median(lengths)),
        longest=max(lengths),
        histogram=tuple(
            ((1 << (power - 1)) + 1 if power else 1, 1 << power, bins[power])
            for power in range(max(bins) + 1)
        ),
    )


BAR = 30
"""Characters of the longest bar of a histogram."""
CELL = 200
"""Characters shown of a text."""


def show_report(
    console: Console, report: Report, answers: Sequence[Answer], num_samples: int
) -> None:
    """Print metrics, lengths and a few answers."""
    console.print(_metrics(report))
    if report.lengths is not None:
        lengths = report.lengths
        title = f"tokens: mean {lengths.mean:.1f}, median {lengths.median:g}, longest {lengths.longest:,}"
        table = Table("tokens", "answers", "", title=title)
        most = max(count for _, _, count in lengths.histogram)
        for first, last, count in dropwhile(lambda row: not row[2], lengths.histogram):
            span = f"{first:,}" if first == last else f"{first:,}-{last:,}"
            table.add_row(span, f"{count:,}", "█" * round(BAR * count / most))
        console.print(table)
    for metric in report.metrics:
        for error in metric.errors[:1]:
            more = f", and {len(metric.errors) - 1:,} more" if len(metric.errors) > 1 else ""
            console.print(f"[yellow]error of {metric.name}[/yellow]  {escape(error)}{more}")
    if num_samples:
        console.print(_samples(spaced(answers, num_samples), [m.name for m in report.metrics]))


def shown(metric: Metric) -> tuple[str, str]:
    """The mean and its interval: ``62.5%``, ``[45.3%, 77.1%]`` for shares, plain numbers for other values."""
    form = ".1%" if metric.interval == "wilson" else ".4g"
    mean = "nothing scored" if metric.mean is None else format(metric.mean, form)
    if metric.low is None or metric.high is None:
        return mean, ""
    return mean, f"[{metric.low:{form}}, {metric.high:{form}}]"


def _metrics(report: Report) -> Table:
    ks = sorted({k for metric in report.metrics for k in metric.pass_at})
    title = (
        f"{counted(report.num_completions, 'answers')} to {counted(report.num_prompts, 'prompts')}"
    )
    passes = [f"pass@{k}" for k in ks]
    table = Table("", "mean", "95% interval", *passes, "scored", "n/a", "errors", title=title)
    for metric in (*report.metrics, report.stopped):
        passes = [f"{metric.pass_at[k]:.1%}" if k in metric.pass_at else "" for k in ks]
        counts = (metric.num_scored, metric.num_not_applicable, len(metric.errors))
        table.add_row(
            escape(metric.name),
            *map(escape, shown(metric)),
            *passes,
            *(f"{count:,}" for count in counts),
        )
    if report.failures:
        table.caption = (
            f"{counted(len(report.failures), 'completions')} failed and are in none of these"
        )
    return table


def _samples(answers: Sequence[Answer], names: Sequence[str]) -> Table:
    texts = [Column(name, overflow="fold") for name in ("row", "question", "reference", "answer")]
    table = Table(*texts, *map(escape, names), show_lines=True)
    for answer in answers:
        mark = {"stop": "", "length": " [dim](cut)[/dim]"}.get(
            answer.completion.finish_reason, " [red](failed)[/red]"
        )
        scores = []
        for name in names:
            score = answer.scores.get(name)
            is_error = score is not None and score.value is None and score.error is not None
            value = "" if score is None or score.value is None else f"{score.value:g}"
            scores.append("[yellow]error[/yellow]" if is_error else value)
        # the last message to be answered, or the plain prompt; of a long one the beginning and the end
        prompt = answer.row.asked
        question = prompt if isinstance(prompt, str) else text_of(prompt[-1]["content"])
        if len(question) > CELL:
            question = f"{question[: CELL // 2]} ... {question[-CELL // 2 :]}"
        reference = " | ".join(answer.row.references)
        text = escape(answer.completion.text[:CELL])
        table.add_row(
            escape(answer.place.rpartition("/")[2]),
            escape(question),
            escape(reference[:CELL]),
            f"{text}{mark}",
            *scores,
        )
    return table
