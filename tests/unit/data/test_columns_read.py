"""What ``recognize`` says is read of a row, against what reading it does: another value of a column that is read makes
another row, or an error; one of a column that is not read makes the same row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from taut.data.rows.messages import Conversation, images_of, text_of
from taut.data.rows.schema import Columns, best_row, read_any, recognize
from taut.data.settings import Kind
from taut.errors import DataError

ASKED, SAID = {"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}
OTHER = {"role": "assistant", "content": "no"}
TOOL = {"name": "look", "parameters": {}}
BESIDE = {
    "system": "be short",
    "tools": [TOOL],
    "images": ["a.png"],
    "input": "of what",
    "history": [["when?", "now"]],
}
"""Columns that go with a prompt, where its format has them."""
CHANGED: dict[str, Any] = {
    "prompt": "why not?",
    "tools": [{**TOOL, "name": "find"}],
    "images": ["b.png"],
    "history": [["when?", "then"]],
    "label": False,
    "completions": ["a", "c"],
    "labels": [True, True],
    "scores": [1, 5],
    "answers": ["so", "never"],
}
"""Another value, where it is not a text."""
PAIR = {"chosen": "so", "rejected": "no"}
WHOLE = {"chosen": [ASKED, SAID], "rejected": [ASKED, OTHER]}
SCORED = {"chosen_score": 2.0, "rejected_score": 1.0}
ROWS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "completion": ("sft", {"prompt": "why?", "completion": "so"}),
    "messages in two": ("sft", {"prompt": [ASKED], "completion": [SAID]}),
    "messages": ("sft", {"messages": [ASKED, SAID]}),
    "alpaca": ("sft", {"instruction": "why?", "output": "so"}),
    "asked": ("prompt", {"prompt": "why?"}),
    "asked as text": ("prompt", {"text": "why?"}),
    "asked as messages": ("prompt", {"prompt": [ASKED]}),
    "pair": ("preference", {"prompt": "why?", **PAIR, **SCORED}),
    "pair with a margin": ("preference", {"prompt": "why?", **PAIR, **SCORED, "margin": 1.0}),
    "pair with one score": ("preference", {"prompt": "why?", **PAIR, "chosen_score": 2.0}),
    "pair beside a list": ("preference", {"prompt": "why?", **PAIR, "answers": ["so", "no"]}),
    "pair after messages": ("preference", {"prompt": [ASKED], **PAIR}),
    "pair of conversations": ("preference", WHOLE),
    "pair of conversations and a prompt": ("preference", {"prompt": "why?", **WHOLE}),
    "pair after an instruction": ("preference", {"instruction": "why?", **PAIR}),
    "worse than messages": (
        "preference",
        {"messages": [ASKED, SAID], "rejected_response": "no"},
    ),
    "list": ("preference", {"prompt": "why?", "answers": ["so", "no"], "scores": [2, 1]}),
    "labeled": ("unpaired", {"prompt": "why?", "completion": "so", "label": True, **PAIR}),
    "labeled pair": ("unpaired", {"prompt": "why?", **PAIR}),
    "scored": ("scored", {"prompt": "why?", "completion": "so", "score": 1.0}),
    "steps": ("stepwise", {"prompt": "why?", "completions": ["a", "b"], "labels": [True, False]}),
}


def another(name: str, value: Any) -> Any:
    if name in CHANGED and not (name == "prompt" and isinstance(value, list)):
        return CHANGED[name]
    if isinstance(value, list):
        return [{**item, "content": f"{item['content']} then"} for item in value]
    return value + 1.0 if isinstance(value, float) else f"{value} then"


def read(row: Mapping[str, Any], columns: Columns) -> str:
    try:
        return repr(read_any(row, "d.jsonl:1", columns))
    except DataError as error:
        return f"refused: {error}"


@pytest.mark.parametrize("is_templated", [True, False])
@pytest.mark.parametrize("name", ROWS)
def test_a_column_counts_as_read_where_another_value_makes_another_row(
    name: str, is_templated: bool
) -> None:
    kind, row = ROWS[name]
    columns = Columns(kind=kind, apply_chat_template=is_templated)
    taken = {  # what a row of this format may have beside it
        column: value
        for column, value in BESIDE.items()
        if not read({**row, column: value}, columns).startswith("refused: ")
    }
    whole = {**taken, **row}
    before, unread = read(whole, columns), recognize(whole, "d.jsonl:1", columns).unread
    assert not before.startswith("refused: "), before
    for column, value in whole.items():
        after = read({**whole, column: another(column, value)}, columns)
        assert (after == before) == (column in unread), (column, unread)


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("sft", {"completion": "so"}),
        ("preference", PAIR),
        ("preference", {"answers": ["so", "no"], "scores": [2, 1]}),
        ("unpaired", {"completion": "so", "label": True}),
        ("unpaired", PAIR),
        ("scored", {"completion": "so", "score": 1.0}),
        ("stepwise", {"completions": ["so"], "labels": [True]}),
        ("prompt", {"answer": "so"}),
    ],
)
def test_a_text_prompt_under_the_template_has_the_rows_system_message_pictures_and_tools(
    kind: Kind, row: Mapping[str, Any]
) -> None:
    columns = Columns(kind=kind, apply_chat_template=True)
    beside = {name: BESIDE[name] for name in ("system", "tools", "images")}
    found = best_row(read_any({"prompt": "what is <image>", **row, **beside}, "d.jsonl:1", columns))
    assert isinstance(found, Conversation)
    assert [message["role"] for message in found.messages][:2] == ["system", "user"]
    assert found.messages[0]["content"] == "be short"
    assert text_of(found.messages[1]["content"]) == "what is "
    assert len(images_of(found.messages)) == len(found.tools) == 1
    assert found.learned == (() if kind == "prompt" else (2,))
