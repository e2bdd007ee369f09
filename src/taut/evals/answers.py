"""Evaluation by generation: an engine answers prompts, rewards judge the answers.

Reads no file and prints nothing; what the answers come to is in ``report.py``. Commands, the training loop's evaluation
and the demo import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from taut.config import configclass
from taut.data.prompts import PromptRow
from taut.errors import DataError
from taut.evals.report import Answer
from taut.rewards import REWARDS, Reward
from taut.rollout.engine import Engine, OnDone, Sampling
from taut.types import Completion, Prompt


@configclass
class EvalSampling(Sampling):
    """How answers are drawn: greedily, unless a temperature is set."""

    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Divides the logits; 0, the default of evaluations: always the most likely token."""


def answer(
    engine: Engine,
    rows: Sequence[PromptRow],
    sampling: Sampling,
    rewards: Sequence[Reward],
    on_done: OnDone | None = None,
) -> list[Answer]:
    """The judged answers to every row, in the order of rows and samples."""
    return judge(rows, engine.generate(prompts_of(rows), sampling, on_done), rewards)


def prompts_of(rows: Sequence[PromptRow]) -> list[Prompt]:
    """What an engine takes."""
    return [Prompt(row.id, row.ids_T) for row in rows]


def judge(
    rows: Sequence[PromptRow], completions: Sequence[Completion], rewards: Sequence[Reward]
) -> list[Answer]:
    """What the rewards say of completions of ``rows``."""
    by_id = {row.id: row for row in rows}
    return [
        _judge_one(by_id[completion.prompt_id], completion, rewards) for completion in completions
    ]


def _judge_one(row: PromptRow, completion: Completion, rewards: Sequence[Reward]) -> Answer:
    if completion.finish_reason == "error":
        return Answer(row, completion, {})
    scores = {
        reward.name: reward.score(completion.text, row.references, row.columns)
        for reward in rewards
    }
    return Answer(row, completion, scores)


def require_scorable(
    rows: Sequence[PromptRow], rewards: Sequence[Reward], max_errors: float
) -> None:
    """Raise DataError, before anything is generated, where too many references are none for taut's own rewards."""
    for reward in rewards:
        if REWARDS.get(reward.name) is not reward.verifier:
            continue
        scored = [
            (row, reward.score(row.references[0], row.references, row.columns))
            for row in rows
            if row.references
        ]
        errors = [(row, score.error) for row, score in scored if score.error is not None]
        if len(errors) > max_errors * len(scored):
            row, reason = errors[0]
            raise DataError(
                f"{row.place}: {reward.name}: {reason}; so {len(errors)} of {len(scored)} references; "
                f"expected at most {max_errors:.0%}"
            )
