"""Rendered ids are token for token those of ``apply_chat_template``, for every shape of template."""

from __future__ import annotations

from typing import Any

import pytest
from tests.helpers.tiny_tokenizers import TEMPLATES, tiny_tokenizer

from taut.data.render.render import Renderer
from taut.data.rows.messages import read_conversation

SINGLE = [
    {"role": "user", "content": "What is 2 plus 3?"},
    {"role": "assistant", "content": "2 plus 3 is 5."},
]
DOUBLE = [
    *SINGLE,
    {"role": "user", "content": "  Thank you! Naïve café 你好 🙂\n"},
    {"role": "assistant", "content": "You are welcome.\n\nHello  again"},
]
SYSTEM = [{"role": "system", "content": "Answer the question."}, *DOUBLE]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
CALLING = [
    {"role": "user", "content": "What is the weather in Paris?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "18 degrees"},
    {"role": "assistant", "content": "It is 18 degrees."},
]
WITHOUT_SYSTEM = ("gemma", "mistral")


def library_ids(tokenizer: Any, messages: list[Any], **options: Any) -> list[int]:
    encoded = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
    return list(encoded["input_ids"])


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", [SINGLE, DOUBLE, SYSTEM], ids=["single", "double", "system"])
def test_the_last_sample_is_the_library_s_rendering(name: str, messages: list[Any]) -> None:
    if messages is SYSTEM and name in WITHOUT_SYSTEM:
        pytest.skip("the template takes no system message")
    tokenizer = tiny_tokenizer(name)
    samples = Renderer(tokenizer).render(read_conversation(messages, "f:1"))
    assert samples[-1].ids_T.tolist() == library_ids(tokenizer, messages)


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_target_span_is_what_follows_the_library_s_prompt(name: str) -> None:
    tokenizer = tiny_tokenizer(name)
    samples = Renderer(tokenizer).render(read_conversation(DOUBLE, "f:1"))
    for index in (1, 3):
        prompt = library_ids(tokenizer, DOUBLE[:index], add_generation_prompt=True)
        sample = samples[-1] if index == 3 else samples[0]
        assert sample.ids_T[: len(prompt)].tolist() == prompt
        assert len(prompt) in sample.target_at_N
        assert len(prompt) - 1 not in sample.target_at_N


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_prompt_is_the_library_s(name: str) -> None:
    tokenizer = tiny_tokenizer(name)
    expected = library_ids(tokenizer, DOUBLE[:3], add_generation_prompt=True)
    assert Renderer(tokenizer).prompt_ids(DOUBLE[:3]).tolist() == expected


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_tools_and_tool_calls(name: str) -> None:
    tokenizer = tiny_tokenizer(name)
    row = read_conversation(CALLING, "f:1", TOOLS)
    samples = Renderer(tokenizer).render(row)
    assert samples[-1].ids_T.tolist() == library_ids(tokenizer, CALLING, tools=TOOLS)
    first = samples[0]
    prompt = library_ids(tokenizer, CALLING[:1], tools=TOOLS, add_generation_prompt=True)
    assert first.target_at_N[0] == len(prompt)
    learned = tokenizer.decode(first.ids_T[first.target_at_N])
    assert (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>' in learned
    )
    assert "18 degrees\n</tool_response>" not in learned
