"""docs/rl.md: its rows are read as it says, and what a rollout tells stands there."""

from __future__ import annotations

import json
import re
import tomllib

import pytest
from tests.docs.pages import ROOT

from taut.data.rows.messages import Conversation, Document
from taut.data.rows.schema import Columns, read_prompt
from taut.errors import DataError

PAGE = (ROOT / "docs/rl.md").read_text(encoding="utf-8")
TELLING = (ROOT / "src/taut/rl/monitors.py").read_text(encoding="utf-8")


def test_its_row_is_a_prompt_and_so_is_a_question_whose_column_is_named() -> None:
    (line,) = re.findall(r"^    (\{.*\})$", PAGE, re.MULTILINE)
    (mapping,) = re.findall(r"'data\.columns=(\{.*?\})'", PAGE)
    plain = Columns(kind="prompt")
    mapped = Columns(kind="prompt", mapping=tomllib.loads(f"it = {mapping}")["it"])
    row = json.loads(line)
    asked = read_prompt(row, "prompts.jsonl:1", plain)
    assert isinstance(asked, Conversation)
    question = {"question": row["messages"][0]["content"], "answer": row["answer"]}
    same = read_prompt(question, "prompts.jsonl:1", mapped)
    assert isinstance(same, Conversation)
    assert same.messages == asked.messages
    with pytest.raises(DataError, match=r"data\.columns"):
        read_prompt(question, "prompts.jsonl:1", plain)


def test_a_prompt_that_is_text_has_no_template() -> None:
    row = {"prompt": "What is 2+3?", "answer": "5"}
    assert isinstance(read_prompt(row, "prompts.jsonl:1", Columns(kind="prompt")), Document)


def test_every_number_of_a_roll_out_is_told() -> None:
    names = re.findall(
        r'"(\w+)"(?:\]|:)',
        TELLING[TELLING.index("def rollout_event") : TELLING.index("def best_and_worst")],
    )
    assert len(names) > 20
    shown = set(re.findall(r"`([\w*]+)`", PAGE[PAGE.index("## What is reported") :]))
    assert [n for n in names if n not in shown and f"{n.partition('_')[0]}_*" not in shown] == []
