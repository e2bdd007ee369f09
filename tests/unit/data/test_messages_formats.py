"""Rows recognised, converted and refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from taut.data.messages import Completion, Conversation, Document, Row
from taut.data.schema import Columns, best_row, read_any
from taut.errors import ConfigError, DataError

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


def read(record: object, **columns: Any) -> Row:
    return best_row(read_any(record, "d.jsonl:7", Columns(**columns)))


def conversation(record: object, **columns: Any) -> Conversation:
    row = read(record, **columns)
    assert isinstance(row, Conversation)
    return row


def test_messages() -> None:
    row = conversation({"id": 3, "messages": [USER, ANSWER, {**USER, "train": False}]})
    assert row.messages == (USER, ANSWER, USER)
    assert row.learned == (1,)
    assert row.place == "d.jsonl:7"


def test_nulls_and_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row = conversation({"messages": [{**USER, "content": parts, "tool_calls": None}, ANSWER]})
    assert row.messages[0] == {"role": "user", "content": "ab"}


def test_tool_calls_take_one_shape() -> None:
    forms: list[Any] = [
        CALL,
        {"name": "f", "arguments": '{"a": 1}'},
        {"function": {"name": "f", "arguments": '{"a": 1}'}},
    ]
    for call in forms:
        turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        tool = {"role": "tool", "content": "", "tool_call_id": "x"}
        row = conversation({"messages": [USER, turn, tool], "tools": '[{"name": "f"}]'})
        assert row.messages[1]["tool_calls"] == [CALL]
        assert row.messages[1]["content"] == ""
        assert row.tools == ({"type": "function", "function": {"name": "f"}},)


def test_completion() -> None:
    assert read({"prompt": "a", "completion": "b"}) == Completion("d.jsonl:7", "a", "b")
    row = conversation({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]})
    assert len(row.messages) == 4
    assert row.learned == (3,)


def test_text() -> None:
    assert read({"text": "a b"}) == Document("d.jsonl:7", "a b")
    assert read({"body": "a b"}, mapping={"text": "body"}) == Document("d.jsonl:7", "a b")


def test_alpaca() -> None:
    record = {
        "instruction": "Add",
        "input": "2 3",
        "output": "5",
        "system": "S",
        "history": [["Hi", "Hello"]],
    }
    row = conversation(record)
    assert [message["content"] for message in row.messages] == ["S", "Hi", "Hello", "Add\n2 3", "5"]
    assert row.learned == (2, 4)
    bare = conversation({"instruction": "Add", "input": "", "output": "5", "system": ""})
    assert [message["content"] for message in bare.messages] == ["Add", "5"]


def test_sharegpt() -> None:
    turns = [
        {"from": "human", "value": "Weather?"},
        {"from": "function_call", "value": json.dumps({"name": "f", "arguments": {"a": 1}})},
        {"from": "observation", "value": "18"},
        {"from": "gpt", "value": "It is 18."},
    ]
    row = conversation({"conversations": turns, "system": "S", "tools": ""})
    roles = [message["role"] for message in row.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert row.messages[2]["tool_calls"] == [CALL]
    assert row.learned == (2, 4)
    mapped = conversation({"dialog": turns}, mapping={"messages": "dialog"})
    assert mapped.messages == row.messages[1:]
    assert conversation({"conversations": [USER, ANSWER]}).messages == (USER, ANSWER)


def test_two_formats_need_a_choice() -> None:
    record = {"messages": [USER, ANSWER], "text": "rendered"}
    with pytest.raises(DataError, match=r"^d.jsonl:7: .*messages and text.*data.format"):
        read(record)
    assert isinstance(read(record, format="text"), Document)
    assert isinstance(
        read({"m": [USER, ANSWER], "text": "x"}, mapping={"messages": "m"}), Conversation
    )


def test_mapping_errors() -> None:
    with pytest.raises(ConfigError, match="did you mean 'messages'"):
        Columns(mapping={"mesages": "dialog"})
    with pytest.raises(
        DataError, match=r"data.columns.messages is 'dialogs'.*did you mean 'dialog'"
    ):
        read({"dialog": []}, mapping={"messages": "dialogs"})


REFUSED: list[tuple[object, str]] = [
    ([1], "the row is a list of 1; expected an object"),
    ({}, "the row is an empty object"),
    ({"massages": []}, "keys 'massages'; expected messages"),
    ({"messages": []}, "messages is an empty list"),
    ({"messages": "x"}, "text but not JSON"),
    ({"messages": ["x"]}, r"messages\[0\] is 'x'"),
    ({"messages": [{"content": "x"}]}, r"messages\[0\].role is missing"),
    (
        {"messages": [USER, {"role": "asistant", "content": "x"}]},
        r"messages\[1\].role is 'asistant'.*did you mean 'assistant'",
    ),
    ({"messages": [{"role": "user"}]}, "content is empty"),
    ({"messages": [{"role": "user", "content": " \n"}]}, "content is empty"),
    ({"messages": [{"role": "user", "content": 3}]}, "content is 3; expected a string"),
    ({"messages": [{**USER, "contnet": "x"}]}, "unknown key 'contnet'.*did you mean 'content'"),
    ({"messages": [{**USER, "mood": "x"}]}, "unknown key 'mood'.*data.ignore_keys"),
    ({"messages": [{**ANSWER, "loss": 0}]}, "write train: false"),
    ({"messages": [{**ANSWER, "train": 0}]}, "train is 0; expected true or false"),
    ({"messages": [{**USER, "train": True}]}, "train is true on a user message"),
    ({"messages": [{**USER, "tool_calls": [CALL]}]}, "tool_calls on a user message"),
    ({"messages": [{**USER, "images": ["a.png"]}]}, "images; expected pictures as parts"),
    ({"messages": [{**USER, "content": [{"type": "image_url"}]}]}, "has no picture; expected one"),
    ({"messages": [{**ANSWER, "tool_calls": 3}]}, "tool_calls is 3"),
    ({"messages": [{**ANSWER, "tool_calls": [{"name": ""}]}]}, "name is ''"),
    ({"messages": [{**ANSWER, "tool_calls": [{"name": "f", "arguments": "{"}]}]}, "not JSON"),
    ({"messages": [{**ANSWER, "tool_calls": [{"name": "f", "arguments": [1]}]}]}, "a list of 1"),
    ({"messages": [USER], "tools": {}}, "tools is an empty object"),
    ({"messages": [USER], "tools": [{"name": "f", "x": b"y"}]}, "tools is no JSON .*bytes"),
    (
        {"messages": [{**ANSWER, "tool_calls": [{"name": "f", "arguments": {"a": math.nan}}]}]},
        r"tool_calls\[0\] is no JSON",
    ),
    (
        {"messages": [{**ANSWER, "tool_calls": [{"name": "f", "arguments": '{"a": 1, "a": 2}'}]}]},
        "not JSON .*'a' is there twice",
    ),
    ({"prompt": "a", "completion": ""}, "completion is empty"),
    ({"prompt": "a", "completion": [ANSWER]}, "expected two texts or two lists"),
    ({"prompt": [USER], "completion": []}, "completion is an empty list"),
    ({"text": "a", "images": ["a.png"]}, "the row has images; expected text only"),
    ({"text": None}, "the row is an empty object"),
    ({"text": 3}, "text is 3; expected a string"),
    ({"instruction": "a", "output": "b", "history": [["x"]]}, r"history\[0\] is a list of 1"),
    ({"conversations": [{"from": "humen", "value": "x"}]}, "from is 'humen'.*did you mean 'human'"),
    ({"conversations": [{"from": "human", "value": 1}]}, "value is 1"),
    (
        {"messages": [{"role": "system", "content": "a"}, USER], "system": "b"},
        "a system column and a system message",
    ),
]


@pytest.mark.parametrize(
    ("record", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED]
)
def test_refused(record: object, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read(record)
    assert str(caught.value).startswith("d.jsonl:7: ")
    assert "\n" not in str(caught.value)


def test_ignored_keys() -> None:
    row = conversation({"messages": [{**USER, "mood": "x"}, ANSWER]}, ignore_keys=("mood",))
    assert row.messages == (USER, ANSWER)
