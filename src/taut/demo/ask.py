"""Greedy answers to the questions of the held-out documents, and how they score.

Through the local engine, which computes a document once for all its questions, and ``taut.evals``. An answer ends at
the model's own stop set, or is cut after ``MAX_NEW_TOKENS`` and counted as unfinished.

May be imported by ``taut.demo`` only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from taut.data.prompts import PromptRow
from taut.data.render import Renderer
from taut.demo.reading import Document, Question, prompt
from taut.evals import report
from taut.evals.answers import EvalSampling, answer
from taut.evals.report import Answer, Metric
from taut.inference.open import ModelUse, open_engine
from taut.rewards import open_panel

MAX_NEW_TOKENS = 16
RIGHT, HOLDING = "exact_match", "contains"
"""An exact match with a reference; a reference somewhere in the answer: right, if not brief."""


@dataclass(frozen=True)
class Report:
    """All answers of one model."""

    answers: tuple[Answer, ...]

    @cached_property
    def whole(self) -> report.Report:
        return report.build_report(self.answers, [RIGHT, HOLDING])

    @property
    def right(self) -> Metric:
        return self.whole.metrics[0]

    @property
    def holding(self) -> Metric:
        return self.whole.metrics[1]

    @property
    def ended(self) -> Metric:
        """Answers that end by themselves."""
        return self.whole.stopped

    def as_dict(self) -> dict[str, float | int | None]:
        """The numbers, for ``demo.json``."""
        return {
            "questions": len(self.answers),
            "right": num_of(self.right),
            "holding": num_of(self.holding),
            "ended": num_of(self.ended),
            "exact_match": self.right.mean,
            "exact_match_low": self.right.low,
            "exact_match_high": self.right.high,
            "ended_share": self.ended.mean,
        }


def num_of(metric: Metric) -> int:
    """How many answers have it; all of them are scored."""
    return round((metric.mean or 0.0) * metric.num_scored)


def ask(model_dir: Path, documents: Sequence[Document], progress: Callable[[], None]) -> Report:
    """The model's greedy answer to every question; ``progress`` is called after each."""
    use = ModelUse(model=str(model_dir), dtype="float32")
    with open_engine(use) as opened, open_panel([RIGHT, HOLDING]) as panel:
        rows = rows_of(documents, opened.renderer)
        answers = answer(
            opened.engine,
            rows,
            EvalSampling(max_new_tokens=MAX_NEW_TOKENS),
            panel,
            lambda completion: progress(),
        )
    return Report(tuple(answers))


def rows_of(documents: Sequence[Document], renderer: Renderer) -> list[PromptRow]:
    """Every question as a prompt."""
    pairs = [(document, question) for document in documents for question in document.questions]
    return [_row(index, *pair, renderer) for index, pair in enumerate(pairs, 1)]


def _row(index: int, document: Document, question: Question, renderer: Renderer) -> PromptRow:
    turn = {"role": "user", "content": prompt(document, question)}
    return PromptRow(
        place=f"question {index}",
        id=f"question {index}",
        ids_T=renderer.prompt_ids([turn]),
        prompt=(turn,),
        references=question.references,
        reference_from="answer",
        columns={"question": question.text},
    )
