"""Calls in the template's own format: derived by rendering, proven by reading back; what cannot be read says so."""

from __future__ import annotations

import pytest
from tests.helpers.tiny_tokenizers import TEMPLATES, tiny_tokenizer

from taut.data.render.chat_template import Template
from taut.data.rows.tool_calls import TOOLS, CallFormat, ToolCall, derive_call_format
from taut.errors import RenderError

TURN = (
    "{{ tools | tojson if tools }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA31 = TURN.replace(
    "CALL", '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
).replace(
    "{% for c in",
    "{% if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one call') }}{% endif %}{% for c in",
)
MISTRAL3 = TURN.replace(
    "CALL",
    '{{ "[TOOL_CALLS] [" if loop.first else ", " }}{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, '
    '"id": "{{ c.id }}"}{{ "]" if loop.last }}',
)
MISTRAL11 = TURN.replace(
    "CALL", "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ f.arguments | tojson }}"
)
DEEPSEEK = TURN.replace(
    "CALL",
    '{{ "<calls>" if loop.first }}<call>function<sep>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```</call>'
    '{{ "</calls>" if loop.last else "\n" }}',
)
TAGS = TURN.replace(
    "CALL",
    "\n<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v | tojson if v is mapping else v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
)
COUNTED = TURN.replace(
    "CALL",
    '{"arguments": {{ f.arguments | tojson }}, "name": "{{ f.name }}", "of": {{ m.tool_calls | length }}}',
)
"""Two calls are not written as one is."""
PYTHONIC = TURN.replace(
    "CALL", "[{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v }},{% endfor %})]"
)
HIDDEN = TURN.replace("{{ m.content }}{%", "{{ m.content.split('</think>') | last }}{%").replace(
    "CALL", "<tool_call>{{ f | tojson }}</tool_call>"
)
"""Takes thoughts out."""
OPEN = (
    TURN.replace(
        "{{ m.content }}{%",
        "{% if m.role == 'assistant' %}[THINK]\n{{ m.reasoning_content }}\n[/THINK]\n\n{% endif %}{{ m.content }}{%",
    )
    .replace("assistant\n{% endif", "assistant\n[THINK]\n{% endif")
    .replace("CALL", "<tool_call>{{ f | tojson }}</tool_call>")
)
"""A turn begins in a thought."""
CHANNELS = (
    "{{ tools | tojson if tools }}{% for m in messages %}{% if m.thinking %}<|im_start|>assistant<|channel|>analysis"
    "<|message|>{{ m.thinking }}<|end|>{% endif %}<|im_start|>{{ m.role }}{% for c in m.tool_calls or [] %}"
    " to=functions.{{ c.function.name }}<|message|>{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ '<|message|>' + m.content if m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)

WRITTEN = {
    "qwen2.5": '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
    "qwen3": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "llama3.1": '{"name": "add", "parameters": {"a": 1}}',
    "mistral3": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]',
    "mistral11": '[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"a": 1}',
    "deepseek": '<calls><call>function<sep>add\n```json\n{"a": 1}\n```</call></calls>',
    "tags": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
}
OF_NAME = {
    **TEMPLATES,
    "llama3.1": LLAMA31,
    "mistral3": MISTRAL3,
    "mistral11": MISTRAL11,
    "deepseek": DEEPSEEK,
    "tags": TAGS,
    "hidden": HIDDEN,
    "open": OPEN,
    "channels": CHANNELS,
}


def format_of(name: str) -> CallFormat:
    return derive_call_format(Template(tiny_tokenizer(), OF_NAME[name]))


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_is_read_in_the_templates_format(name: str) -> None:
    _, calls = format_of(name).read(WRITTEN[name], TOOLS, first=4)
    assert calls == [ToolCall("call00004", "add", {"a": 1})]


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_that_cannot_be_read_says_why(name: str) -> None:
    broken = (
        WRITTEN[name].replace("1", "{")
        if name != "tags"
        else WRITTEN[name].replace("</function>", "")
    )
    _, (call,) = format_of(name).read(broken, TOOLS)
    assert call.error
    assert not call.name


@pytest.mark.parametrize("name", [*WRITTEN])
def test_text_is_no_call(name: str) -> None:
    for text in ("The answer is 5.", 'In JSON: {"a": 5}', "", "{not a call}"):
        assert format_of(name).read(text, TOOLS) == (text, [])


def test_text_beside_calls_and_several_calls() -> None:
    one, two = WRITTEN["qwen3"], WRITTEN["qwen3"].replace("add", "sub")
    said, calls = format_of("qwen3").read(f"First I add.\n{one}\n{two}", TOOLS)
    assert said == "First I add."
    assert [(call.id, call.name) for call in calls] == [("call00000", "add"), ("call00001", "sub")]


def test_a_bad_call_does_not_hide_a_good_one() -> None:
    bad = "<tool_call>{add}</tool_call>"
    _, calls = format_of("qwen3").read(bad + WRITTEN["qwen3"], TOOLS)
    assert [bool(call.error) for call in calls] == [True, False]
    _, (cut,) = format_of("qwen3").read(WRITTEN["qwen3"].removesuffix("</tool_call>"), TOOLS)
    assert cut.error == "expected </tool_call> after the call"
    _, calls = format_of("qwen3").read('<tool_call>{"name": "a" ' + ADD, TOOLS)
    assert [bool(call.error) for call in calls] == [True, False]
    text = "[TOOL_CALLS]a[CALL_ID]abc[ARGS]{bad}[TOOL_CALLS]b[CALL_ID]abd[ARGS]{}"
    _, calls = format_of("mistral11").read(text, TOOLS)
    assert [call.name for call in calls] == ["", "b"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"arguments": {"a": 1}}', "the call has no name"),
        ('{"name": "add", "arguments": [1]}', "the arguments are no JSON object"),
        ('{"name": "add", "name": "sub", "arguments": {}}', "the key 'name' is there twice"),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN is no JSON"),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', "half of a surrogate pair"),
        ('{"name": "add", "arguments": "{} junk"}', "there is text after the arguments"),
    ],
)
def test_what_is_wrong_with_a_call(text: str, error: str) -> None:
    _, (call,) = format_of("qwen3").read(f"<tool_call>{text}</tool_call>", TOOLS)
    assert call.error is not None
    assert error in call.error


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "mistral3", "llama3.1", "hidden"])
def test_arguments_by_the_other_name_are_arguments(name: str) -> None:
    text = WRITTEN.get(name, WRITTEN["qwen3"])
    other = {"arguments": "parameters", "parameters": "arguments"}
    key = next(key for key in other if key in text)
    _, (call,) = format_of(name).read(text.replace(key, other[key]), TOOLS)
    assert (call.name, call.arguments, call.error) == ("add", {"a": 1}, None)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            '{"name": "add", "args": {"a": 1}}',
            "the call has args; expected its arguments under arguments",
        ),
        ('{"name": "add", "a": 1, "b": 2}', "the call has a and b; expected"),
        ('{"name": "add", "input": {}}', "the call has input; expected"),
        (
            '{"name": "add", "arguments": {"a": 1}, "parameters": {"a": 2}}',
            "arguments and parameters",
        ),
        ('{"name": "add", "parameters": [1]}', "the arguments are no JSON object"),
        ('{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}', "no name"),
    ],
)
def test_arguments_that_cannot_be_told_make_no_empty_call(text: str, error: str) -> None:
    _, (call,) = format_of("qwen3").read(f"<tool_call>{text}</tool_call>", TOOLS)
    assert error in str(call.error) and not call.name


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "now"}',
        '{"name": "now", "id": "x", "type": "function"}',
        '{"name": "now", "parameters": {}}',
    ],
)
def test_a_call_may_have_no_arguments(text: str) -> None:
    _, (call,) = format_of("qwen3").read(f"<tool_call>{text}</tool_call>", TOOLS)
    assert (call.name, call.arguments, call.error) == ("now", {}, None)


def test_tagged_values_have_the_type_of_the_schema() -> None:
    text = (
        "<tool_call><function=mixed><parameter=words>\n3\n</parameter>"
        "<parameter=number>\n3\n</parameter></function></tool_call>"
    )
    _, (call,) = format_of("tags").read(text, TOOLS)
    assert call.arguments == {"words": "3", "number": 3}
    _, (wrong,) = format_of("tags").read(
        text.replace("3\n</parameter></f", "x\n</parameter></f"), TOOLS
    )
    assert wrong.error == "the argument number is not of type integer"


def typed(value: str, parameters: object) -> ToolCall:
    text = f"<tool_call><function=add><parameter=x>\n{value}\n</parameter></function></tool_call>"
    tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    _, (call,) = format_of("tags").read(text, [tool])
    return call


@pytest.mark.parametrize(
    ("kinds", "value", "read"),
    [
        (["string", "integer"], "hello", "hello"),
        (["string", "integer"], "5", 5),
        (["string", "null"], "5", "5"),
        (["null", "string"], "None", None),
        (["string"], "5", "5"),
    ],
)
def test_a_tagged_value_has_one_of_several_types(
    kinds: list[str], value: str, read: object
) -> None:
    assert typed(value, {"properties": {"x": {"type": kinds}}}).arguments == {"x": read}


def test_a_tagged_value_that_has_none_of_the_types_says_so() -> None:
    call = typed("hello", {"properties": {"x": {"type": ["integer", "null"]}}})
    assert call.error == "the argument x is not of type integer or null"
    assert "surrogate" in str(
        typed('{"a": "\\ud800"}', {"properties": {"x": {"type": "object"}}}).error
    )


@pytest.mark.parametrize("parameters", [None, {"properties": {"x": True}}, {"properties": None}])
def test_a_schema_that_says_nothing_of_an_argument(parameters: object) -> None:
    assert typed("hello", parameters).arguments == {"x": "hello"}


def test_a_message_has_arguments_of_its_own() -> None:
    call = ToolCall("call00000", "add", {"a": [1]})
    call.as_message()["function"]["arguments"]["a"].append(2)
    assert call.arguments == {"a": [1]}


@pytest.mark.parametrize("value", ["[" * 100_000, "NaN", "1e999", "9" * 5000, '{"a": 1, "a": 2}'])
def test_a_tagged_value_is_json_as_the_standard_has_it(value: str) -> None:
    text = f"<tool_call><function=mixed><parameter=number>\n{value}\n</parameter></function></tool_call>"
    _, (call,) = format_of("tags").read(text, TOOLS)
    assert call.error == "the argument number is not of type integer"


ADD = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("name", "text", "num_calls"),
    [
        ("qwen3", f"<think>I could write {ADD} but no.</think>The answer is 5.", 0),
        ("qwen3", f"<think>Yes.</think>\n\n{ADD}<think>Again? {ADD}</think>{ADD}", 2),
        ("qwen3", f"{ADD}<think>And {ADD}", 1),
        ("qwen3", f"It was open. {ADD}</think>{ADD}", 1),
        ("hidden", f"<think>{ADD}</think>{ADD}", 1),
        ("open", f"hm {ADD} [/THINK]\n\n{ADD}", 1),
        ("open", f"hm {ADD}", 0),
        ("qwen2.5", f"<think>{ADD}</think>{ADD}", 1),
        ("qwen2.5", f"<think>It could be {ADD}, but", 0),
        ("qwen2.5", f"{ADD}<think>Again? {ADD}</think>", 1),
        ("llama3.1", f"<think>{WRITTEN['llama3.1']}</think>{WRITTEN['llama3.1']}", 1),
        ("llama3.1", f"<think>{WRITTEN['llama3.1']}</think>", 0),
        ("mistral3", f"<think>{WRITTEN['mistral3']}</think>Five.", 0),
        ("mistral11", f"<think>\n{WRITTEN['mistral11']}\n</think>\n{WRITTEN['mistral11']}", 1),
        ("deepseek", f"<think>{WRITTEN['deepseek']}</think>", 0),
        ("tags", f"<think>{WRITTEN['tags']}</think>{WRITTEN['tags']}", 1),
        ("channels", " to=functions.add<|message|>{}", 1),
        (
            "channels",
            "<|channel|>analysis<|message|>I write to=functions.add<|message|>{}<|end|><|im_start|>assistant "
            "to=functions.sub<|message|>{}",
            1,
        ),
    ],
)
def test_in_a_thought_nothing_is_a_call(name: str, text: str, num_calls: int) -> None:
    said, calls = format_of(name).read(text, TOOLS)
    assert [call.error for call in calls] == [None] * num_calls
    assert num_calls or said == text.strip()


def test_the_models_own_id_is_kept_where_it_is_one() -> None:
    text = '[TOOL_CALLS] [{"name": "add", "arguments": {}, "id": "a1B2c3D4e"}]'
    _, (call,) = format_of("mistral3").read(text, TOOLS)
    assert call.id == "a1B2c3D4e"
    _, twice = format_of("mistral3").read(text + text, TOOLS)
    assert [call.id for call in twice] == ["a1B2c3D4e", "call00001"]
    _, ours = format_of("mistral3").read(text.replace("a1B2c3D4e", "call00001") + text[:30], TOOLS)
    assert [call.id for call in ours] == ["call00001", "call00002"]


def test_a_special_token_may_stand_before_a_bare_call() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|python_tag|>"]})
    found = derive_call_format(Template(tokenizer, LLAMA31))
    _, (call,) = found.read(f"<|python_tag|>{WRITTEN['llama3.1']}", TOOLS)
    assert call.name == "add"


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral"])
def test_a_template_without_calls_is_refused(name: str) -> None:
    with pytest.raises(RenderError, match=r"writes no tool calls.*data\.template=hermes"):
        derive_call_format(Template(tiny_tokenizer(name), None))


def test_a_form_that_cannot_be_read_is_refused_with_what_it_is() -> None:
    with pytest.raises(RenderError, match="expected JSON, or tags"):
        derive_call_format(Template(tiny_tokenizer(), COUNTED))
    with pytest.raises(RenderError, match=r"find_weather\(city=Paris"):
        derive_call_format(Template(tiny_tokenizer(), PYTHONIC))
