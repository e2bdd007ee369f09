"""Evaluation by generation: an engine answers prompts, rewards score the answers.

Reads no file and prints nothing; ``report.py`` computes the metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from taut.config import configclass
from taut.data.prompts import PromptRow
from taut.errors import DataError
from taut.evals.report import Answer
from taut.inference.engine import Engine, OnDone, Sampling
from taut.rewards import Answered, Panel
from taut.types import Completion, FinishReason


@configclass
class EvalSampling(Sampling):
    """Sampling of answers: greedy, unless a temperature is set."""

    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Divides the logits. 0, the default of evaluations, always takes the most likely token."""


def answer(
    engine: Engine,
    rows: Sequence[PromptRow],
    sampling: Sampling,
    panel: Panel | None,
    on_done: OnDone | None = None,
) -> list[Answer]:
    """The answers to every row, in the order of rows and samples, with scores if there is a panel."""
    return judge(rows, engine.generate([row.as_prompt() for row in rows], sampling, on_done), panel)


def answered(
    row: PromptRow, text: str, *, num_tokens: int, finish_reason: FinishReason
) -> Answered:
    """A completion of a row as rewards judge it."""
    return Answered(
        text=text,
        references=row.references,
        row=row.columns,
        num_tokens=num_tokens,
        finish_reason=finish_reason,
        prompt=row.prompt,
    )


def judge(
    rows: Sequence[PromptRow], completions: Sequence[Completion], panel: Panel | None
) -> list[Answer]:
    """Completions of ``rows`` with their scores."""
    by_id = {row.id: row for row in rows}
    finished = [c for c in completions if panel is not None and c.finish_reason != "error"]
    shown = [
        answered(
            by_id[c.prompt_id],
            c.text,
            num_tokens=int(c.ids_N.size),
            finish_reason=c.finish_reason,
        )
        for c in finished
    ]
    verdicts = panel.grade(shown) if panel is not None else []
    scores = {id(c): verdict.parts for c, verdict in zip(finished, verdicts, strict=True)}
    return [Answer(by_id[c.prompt_id], c, scores.get(id(c), {})) for c in completions]


def require_scorable(rows: Sequence[PromptRow], panel: Panel, max_errors: float) -> None:
    """Raise DataError, before anything is generated, where too many references are unusable for taut's own rewards."""
    labels = [part.label for part in panel.parts if part.verifier.needs_reference]
    with_reference = [row for row in rows if row.references]
    verdicts = panel.grade(
        [as_answer(row, row.references[0]) for row in with_reference], labels, are_bare=True
    )
    for label in labels:
        scores = [verdict.parts[label] for verdict in verdicts]
        errors = [
            (row, score.error)
            for row, score in zip(with_reference, scores, strict=True)
            if score.error is not None
        ]
        if len(errors) > max_errors * len(with_reference):
            row, reason = errors[0]
            raise DataError(
                f"{row.place}: {label}: {reason}; so {len(errors)} of {len(with_reference)} references; "
                f"expected at most {max_errors:.0%}"
            )


def as_answer(row: PromptRow, text: str) -> Answered:
    """A text as if it were an answer to a row."""
    return Answered(text=text, references=row.references, row=row.columns, prompt=row.prompt)
