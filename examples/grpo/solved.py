"""A reward of one's own: 1 where the task's verifier gives an answer its full score, else 0.

    rewards = "examples/grpo/solved.py:solved"

Where a verifier also gives parts of a score, this is the accuracy.
"""

from __future__ import annotations

from typing import Any

from reasoning_gym import get_score_answer_fn


def solved(text: str, references: list[str], row: dict[str, Any]) -> float:
    score = get_score_answer_fn(row["metadata"]["source_dataset"])
    return float(score(text, row) == 1.0)
