"""Rows recognized, converted and refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from taut.data.rows.messages import Completion, Conversation, Document, Row
from taut.data.rows.schema import Columns, best_row, read_any
from taut.errors import ConfigError, DataError, EmptyError

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
        {"name": "f", "parameters": {"a": 1}},
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
    ({"messages": []}, "messages is empty"),
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
    ({"prompt": "a", "completion": [ANSWER]}, "expected two texts, or messages"),
    ({"prompt": [USER], "completion": []}, "completion is empty"),
    ({"text": "a", "images": ["a.png"]}, "the row has images; expected text only"),
    ({"text": None}, "text is empty; .* or set data.empty=drop"),
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


def tool(name: str, properties: Any, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, **more}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def called(arguments: Any, *tools: Any, **user: Any) -> Conversation:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    return conversation({"messages": [{**USER, **user}, answer], "tools": list(tools)})


TEXT, EITHER = {"type": "string"}, {"type": ["integer", "null"]}
OPTION = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}


@pytest.mark.parametrize(
    ("given", "properties", "user", "expected"),
    [
        ({"a": 1, "b": None}, {"a": TEXT}, {}, {"a": 1}),  # not declared
        ({"a": 1, "b": None}, {"a": TEXT, "b": None}, {}, {"a": 1}),
        ({"a": None}, {"a": EITHER}, {}, {"a": None}),
        ({"a": None}, {"a": OPTION}, {"tool_calls": None}, {"a": None}),
        ({"a": None}, {"a": {"description": "any"}}, {}, {"a": None}),
        ({"a": None}, {"a": TEXT}, {}, {}),  # the schema has no null
        (
            {"a": {"b": None, "c": [None]}},
            {"a": {"properties": {"c": {}}}},
            {},
            {"a": {"c": [None]}},
        ),
        ({"a": [{"b": None}]}, {"a": {"items": {"properties": {"c": {}}}}}, {}, {"a": [{}]}),
        ('{"a": 1, "b": null}', {"a": TEXT}, {}, {"a": 1, "b": None}),  # a table fills no text
        ({"a": None}, {}, {}, {"a": None}),  # no schema says, and nothing speaks for a table
        ({"a": None}, {}, {"tool_calls": None}, {}),
    ],
)
def test_nulls_that_a_table_wrote_into_arguments(
    given: Any, properties: Any, user: dict[str, Any], expected: Any
) -> None:
    row = called(given, tool("f", properties), **user)
    assert row.messages[1]["tool_calls"][0]["function"]["arguments"] == expected
    was_changed = expected != given and not isinstance(given, str)
    assert row.notes == (("nulls",) if was_changed else ())


def test_a_required_null_stays_and_nulls_without_tools_too() -> None:
    row = called({"a": None}, tool("f", {"a": TEXT}, required=["a"]))
    assert row.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": None}
    assert called({"a": None}).messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": None}


def test_nulls_that_a_table_wrote_into_tools() -> None:
    default = {"type": "string", "default": None, "enum": ["a", None]}
    assert called({}, tool("f", {"a": default})).tools == (tool("f", {"a": default}),)
    padded = tool("f", {"a": {**default, "items": None}, "b": None, "c": {**OPTION, "type": None}})
    row = called({}, {**padded, "id": None})
    kept = {"a": default | {}, "c": OPTION}
    assert row.tools == (tool("f", kept),) and row.notes == ("nulls",)
    without = tool("f", {"a": {"type": "string", "items": None, "default": None}})
    assert called({}, without).tools == (tool("f", {"a": TEXT}),)


def test_tools_in_text_at_any_depth() -> None:
    plain = tool("f", {"a": TEXT})
    nested = {**plain, "function": {**plain["function"]}}
    nested["function"]["parameters"] = json.dumps(nested["function"]["parameters"])
    for given in (json.dumps(plain), nested):
        assert called({}, given).tools == (plain,)


def test_thoughts() -> None:
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}], "closed": True}]
    text = {"type": "text", "text": "Hello"}
    row = conversation({"messages": [USER, {**ANSWER, "content": [*parts, text]}]})
    assert row.messages[1] == {**ANSWER, "reasoning_content": "Hm."}
    for key in ("reasoning_content", "reasoning", "thinking"):
        empty = conversation({"messages": [USER, {**ANSWER, key: " "}]})
        assert empty.messages[1] == ANSWER
        only = {**ANSWER, "content": "", key: "Hm."}
        assert conversation({"messages": [USER, only]}).messages[1] == only
    with pytest.raises(DataError, match="a thought after its text"):
        read({"messages": [USER, {**ANSWER, "content": [text, *parts]}]})


def test_a_developer_message_is_a_system_message() -> None:
    row = conversation({"messages": [{"role": "developer", "content": "Be brief."}, USER, ANSWER]})
    assert row.messages[0] == {"role": "system", "content": "Be brief."}
    assert row.notes == ("developer",)


def test_empty_messages_that_are_not_learned() -> None:
    system = {"role": "system", "content": ""}
    context = [system, USER, {**ANSWER, "content": "", "train": False}, USER, ANSWER]
    assert len(conversation({"messages": context}).messages) == 5
    for empty in ([{**USER, "content": ""}, ANSWER], [USER, {**ANSWER, "content": " "}]):
        with pytest.raises(EmptyError, match=r"content is empty; .* or set data.empty=drop"):
            read({"messages": empty})


@pytest.mark.parametrize("nothing", [None, "", " ", math.nan])
@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ({"prompt": "a", "completion": "b"}, "completion"),
        ({"instruction": "a", "output": "b", "input": ""}, "output"),
        ({"prompt": "a", "completion": "b"}, "prompt"),
        ({"text": "a"}, "text"),
        ({"messages": [USER, ANSWER]}, "messages"),
        ({"prompt": [USER], "completion": [ANSWER]}, "completion"),
    ],
)
def test_what_is_empty_is_told_in_one_way(columns: Any, name: str, nothing: Any) -> None:
    with pytest.raises(EmptyError) as caught:
        read({**columns, name: nothing})
    assert str(caught.value).startswith(f"d.jsonl:7: {name} is empty; expected ")
    assert str(caught.value).endswith("; fill it in or remove the row, or set data.empty=drop")


def test_a_prompt_of_messages_and_a_completion_as_text() -> None:
    expected = conversation({"prompt": [USER], "completion": [ANSWER]})
    assert conversation({"prompt": [USER], "completion": "Hello"}) == expected
    assert conversation({"prompt": [USER], "completion": ANSWER}) == expected
    row = conversation({"prompt": [USER], "completion": "Hello", "system": "Be brief."})
    assert (row.messages[0]["content"], row.learned) == ("Be brief.", (2,))


def test_columns_that_carry_the_prompt() -> None:
    own = {"enable_thinking": False, "custom_instructions": "", "xml_tools": [], "a": None}
    for given in (own, json.dumps(own)):
        row = conversation({"messages": [USER, ANSWER], "chat_template_kwargs": given})
        assert row.template_variables == {"enable_thinking": False}
    record = {"messages": [USER, ANSWER], "chat_template_kwargs": own}
    assert conversation(record, template_variables={"x": 1}).template_variables == {
        "x": 1,
        "enable_thinking": False,
    }
    for ignored in ("chat_template_kwargs", "enable_thinking"):
        assert not conversation(record, ignore_keys=(ignored,)).template_variables
    for name in ("functions", "tool_defs"):
        for given in ([tool("f", {})], json.dumps([tool("f", {})])):
            row = conversation({"messages": [USER, ANSWER], name: given})
            assert row.tools == (tool("f", {}),)
        assert not conversation({"messages": [USER, ANSWER], name: ["sin"]}).tools


def test_names_of_columns_are_proposed() -> None:
    with pytest.raises(
        DataError,
        match=r"data\.columns\.instruction=Question data\.columns\.output=answer$",
    ):
        read({"Question": "a", "answer": "b", "id": 1})
