"""Answers and what they are worth: ``cases/KIND.jsonl``, a case a line: reward, answer, references, row, options, and
the expected value; null: the row is an error.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from taut.rewards import RewardInput
from taut.rewards.registry import verifier_of
from taut.rewards.worker import judged

FILES = sorted((Path(__file__).parent / "cases").glob("*.jsonl"))
SLOW = {"math_more"}


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in SLOW else [])
        for path in FILES
    ],
)
def test_answers_are_worth_what_a_reader_says(path: Path) -> None:
    wrong = []
    for line in path.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        verifier = verifier_of(case["reward"], case.get("options", {}))
        row, references = case.get("row", {}), tuple(case["references"])
        score = judged(
            case["reward"],
            verifier,
            RewardInput(text=case["answer"], references=references, row=row),
        )
        if score.value != case["expected"] or (score.error is None) == (case["expected"] is None):
            wrong.append((case, score))
    assert wrong == []
