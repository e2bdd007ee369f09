"""Evaluation by generation: an engine answers prompts, rewards score the answers.

Reads no file and prints nothing; ``report.py`` computes the metrics.
"""

from __future__ import annotations

from collections.abc import Sequence

from taut.data.rows.messages import Message
from taut.data.rows.prompts import PromptRow
from taut.errors import DataError
from taut.evals.report import Answer
from taut.inference.engine import Engine, OnDone
from taut.inference.settings import Sampling
from taut.rewards.reward_set import RewardSet
from taut.rewards.verifier import RewardInput
from taut.types import Completion, FinishReason


def answer(
    engine: Engine,
    rows: Sequence[PromptRow],
    sampling: Sampling,
    reward_set: RewardSet | None,
    on_done: OnDone | None = None,
) -> list[Answer]:
    """The answers to every row, in the order of rows and samples, with scores if there is a reward set."""
    return judge(
        rows, engine.generate([row.as_prompt() for row in rows], sampling, on_done), reward_set
    )


def to_reward_input(
    row: PromptRow,
    text: str,
    *,
    num_tokens: int | None = None,
    finish_reason: FinishReason = "stop",
    prompt: tuple[Message, ...] | str | None = None,
    messages: tuple[Message, ...] = (),
) -> RewardInput:
    """Return an answer to a row as rewards get it. ``num_tokens``: of a completion, which continues the beginning that
    its prompt gives; None: a text that was not sampled, such as a reference. ``prompt``: by default the row's.
    """
    is_sampled = num_tokens is not None
    return RewardInput(
        text=row.beginning + text if is_sampled else text,
        references=row.references,
        row=row.columns,
        num_tokens=num_tokens,
        finish_reason=finish_reason,
        prompt=row.asked if prompt is None else prompt,
        opened=row.opened if is_sampled else "",
        messages=messages,
    )


def completed(row: PromptRow, completion: Completion) -> RewardInput:
    """Return a completion of a row as rewards get it."""
    return to_reward_input(
        row,
        completion.text,
        num_tokens=int(completion.ids_N.size),
        finish_reason=completion.finish_reason,
    )


def judge(
    rows: Sequence[PromptRow], completions: Sequence[Completion], reward_set: RewardSet | None
) -> list[Answer]:
    """Completions of ``rows`` with their scores."""
    by_id = {row.id: row for row in rows}
    finished = [c for c in completions if reward_set is not None and c.finish_reason != "error"]
    shown = [completed(by_id[c.prompt_id], c) for c in finished]
    reward_results = reward_set.grade(shown) if reward_set is not None else []
    scores = {
        id(c): reward_result.parts
        for c, reward_result in zip(finished, reward_results, strict=True)
    }
    return [Answer(by_id[c.prompt_id], c, scores.get(id(c), {})) for c in completions]


def require_scorable(rows: Sequence[PromptRow], reward_set: RewardSet, max_errors: float) -> None:
    """Raise DataError, before anything is generated, where too many references are unusable for taut's own rewards."""
    labels = [part.label for part in reward_set.parts if part.verifier.needs_reference]
    with_reference = [row for row in rows if row.references]
    reward_results = reward_set.grade(
        [to_reward_input(row, row.references[0]) for row in with_reference], labels, extract=False
    )
    for label in labels:
        scores = [reward_result.parts[label] for reward_result in reward_results]
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
