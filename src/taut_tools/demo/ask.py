"""Greedy answers to the questions of the held-out documents, and their scores.

Uses the local engine, which computes a document once for all its questions, and ``taut.evals``. An answer ends at a
token of the model's stop set, or is truncated after ``MAX_NEW_TOKENS`` and counts as unfinished.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from taut.data.render.render import Renderer
from taut.data.rows.prompts import PromptRow
from taut.evals import report
from taut.evals.answers import answer
from taut.evals.report import Answer, Metric
from taut.evals.settings import EvalSampling
from taut.inference.factory import open_engine
from taut.inference.settings import ModelUse
from taut.rewards.reward_set import open_rewards
from taut.rewards.settings import RewardSpec
from taut_tools.demo.reading import Document, prompt

MAX_NEW_TOKENS = 16
RIGHT, HOLDING = "exact_match", "contains"
"""Rewards: the answer equals a reference, or contains one."""


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
        """Share of answers that end with a stop token."""
        return self.whole.stopped

    def as_dict(self) -> dict[str, float | int | None]:
        """The numbers in ``demo.json``."""
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
    """The number of answers with a score of 1; all answers are scored."""
    return round((metric.mean or 0.0) * metric.num_scored)


def ask(model_dir: Path, documents: Sequence[Document], progress: Callable[[], None]) -> Report:
    """Answer every question greedily; ``progress`` is called after each answer."""
    use = ModelUse(model=str(model_dir), dtype="float32")
    specs = [RewardSpec(name=name, options={"normalize": "squad"}) for name in (RIGHT, HOLDING)]
    with open_engine(use) as opened, open_rewards(specs) as reward_set:
        rows = rows_of(documents, opened.renderer)
        answers = answer(
            opened.engine,
            rows,
            EvalSampling(max_new_tokens=MAX_NEW_TOKENS),
            reward_set,
            lambda completion: progress(),
        )
    return Report(tuple(answers))


def rows_of(documents: Sequence[Document], renderer: Renderer) -> list[PromptRow]:
    """Render every question as a prompt."""
    rows = []
    pairs = [(document, question) for document in documents for question in document.questions]
    for number, (document, question) in enumerate(pairs, 1):
        turn = {"role": "user", "content": prompt(document, question)}
        row = PromptRow(
            place=f"question {number}",
            id=f"question {number}",
            ids_T=renderer.prompt_ids([turn]),
            prompt=(turn,),
            references=question.references,
            reference_from="answer",
            columns={"question": question.text},
        )
        rows.append(row)
    return rows
