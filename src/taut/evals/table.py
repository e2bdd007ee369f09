"""A report as tables for people. Says nothing that is not in the report. Commands import it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import dropwhile

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from taut.data.media import text_of
from taut.data.prompts import PromptRow
from taut.evals.report import Answer, Lengths, Metric, Report, spaced
from taut.printing import counted

BAR = 30
"""Characters of the longest bar of a histogram."""
CELL = 200
"""Characters shown of a text."""


def show_report(
    console: Console, report: Report, answers: Sequence[Answer], num_samples: int
) -> None:
    """Metrics, lengths and a few answers."""
    console.print(_metrics(report))
    if report.lengths is not None:
        console.print(_lengths(report.lengths))
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


def _lengths(lengths: Lengths) -> Table:
    title = (
        f"tokens: mean {lengths.mean:.1f}, median {lengths.median:g}, longest {lengths.longest:,}"
    )
    table = Table("tokens", "answers", "", title=title)
    most = max(count for _, _, count in lengths.histogram)
    rows = dropwhile(lambda row: not row[2], lengths.histogram)
    for first, last, count in rows:
        span = f"{first:,}" if first == last else f"{first:,}-{last:,}"
        table.add_row(span, f"{count:,}", "█" * round(BAR * count / most))
    return table


def _samples(answers: Sequence[Answer], names: Sequence[str]) -> Table:
    texts = [Column(name, overflow="fold") for name in ("row", "question", "reference", "answer")]
    table = Table(*texts, *map(escape, names), show_lines=True)
    for answer in answers:
        mark = {"stop": "", "length": " [dim](cut)[/dim]"}.get(
            answer.completion.finish_reason, " [red](failed)[/red]"
        )
        scores = [_score(answer, name) for name in names]
        reference = " | ".join(answer.row.references)
        text = escape(answer.completion.text[:CELL])
        table.add_row(
            escape(answer.place.rpartition("/")[2]),
            escape(_question(answer.row)),
            escape(reference[:CELL]),
            f"{text}{mark}",
            *scores,
        )
    return table


def _question(row: PromptRow) -> str:
    """The last message that was to be answered, or the plain prompt; of a long one the beginning and the end."""
    asked = row.prompt if isinstance(row.prompt, str) else text_of(row.prompt[-1]["content"])
    return asked if len(asked) <= CELL else f"{asked[: CELL // 2]} ... {asked[-CELL // 2 :]}"


def _score(answer: Answer, name: str) -> str:
    score = answer.scores.get(name)
    if score is None or (score.value is None and score.error is None):
        return ""
    return "[yellow]error[/yellow]" if score.value is None else f"{score.value:g}"
