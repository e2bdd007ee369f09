"""Nothing that an answer says is run: values and arithmetic are all that is evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from taut.rewards.verifier import RewardInput
from taut_tools.reasoning_gym.reward import Gym, plain_eval, rows


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("[1, 'a', (2.5, None)]", [1, "a", (2.5, None)]),
        (" -(3 + 4) * 2**3", -56),
        ("{1: [2]}", {1: [2]}),
    ],
)
def test_values_and_arithmetic_are_evaluated(code: str, value: Any) -> None:
    assert plain_eval(code) == value


@pytest.mark.parametrize(
    "code",
    [
        "__import__('os')",
        "[0] * 9",
        "9 * (1, 2) * 9",
        "'a' * 9",
        "b'%9d' % 1",
        "{} | {}",
        "open('x')",
        "().__class__",
        "[x for x in ()]",
        "(lambda: 1)()",
        "f'{1}'",
        "exp(1).diff",
        "exp(1, evaluate=0)",
        "(1)(2)",
        "Function('f')",
        "unknown",
    ],
)
def test_whatever_else_is_asked_for_is_refused(code: str) -> None:
    with pytest.raises(ValueError, match=r"is no arithmetic|no function of numbers"):
        plain_eval(code, {"exp": abs, "open": open, "__import__": __import__})


@pytest.mark.parametrize(
    "task", ["countdown", "polynomial_multiplication", "n_queens", "spiral_matrix"]
)
@pytest.mark.parametrize("answer", ["open({mark!r}, 'w')", "[open({mark!r}, 'w')]"])
def test_no_task_of_reasoning_gym_runs_an_answer(tmp_path: Path, task: str, answer: str) -> None:
    """Each of these tasks would: they evaluate an answer by Python or by sympy."""
    mark = tmp_path / "mark"
    (row,) = rows(task, 1, seed=1)
    text = answer.format(mark=str(mark))
    score = Gym()(RewardInput(text=text, row=row))
    assert score is not None and score < 0.5
    assert not mark.exists()
    assert Gym()(RewardInput(text=row["answer"], row=row)) == 1
