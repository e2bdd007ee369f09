"""The tables of ``taut eval``: each answer stands next to its question."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console
from tests.unit.evals.test_report import answers, report, rows

from taut.data.rows.messages import Message
from taut.evals.report import CELL, show_report
from taut.rewards.reward_set import open_rewards


def shown(prompt: tuple[Message, ...] | str) -> str:
    """The report of one answer to this prompt."""
    found = answers([["the fox"]], open_rewards(["exact_match"]))
    asked = [replace(found[0], row=replace(rows(1)[0], prompt=prompt))]
    console = Console(file=StringIO(), width=1000)
    show_report(console, report([["the fox"]], "exact_match"), asked, 1)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    "prompt",
    [
        "Which animal jumps?",
        ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which animal jumps?"}),
        ({"role": "user", "content": [{"type": "text", "text": "Which animal jumps?"}]},),
    ],
)  # fmt: skip
def test_an_answer_has_its_question_beside_it(prompt: tuple[Message, ...] | str) -> None:
    text = shown(prompt)
    assert "question" in text
    (row,) = [line for line in text.splitlines() if "Which animal jumps?" in line]
    assert "the fox" in row
    assert "Be brief." not in text
    assert "1 answer to 1 prompt" in text


def test_a_long_question_shows_its_beginning_and_its_end() -> None:
    text = shown(f"first {'word ' * CELL} last?")
    assert "first word" in text and "last?" in text
    assert text.count("word") < CELL / 4
