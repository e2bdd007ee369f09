"""The template that ships: tools and calls token for token, turns that end, and no model without its tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.helpers.tiny_tokenizers import TEMPLATES, tiny_tokenizer

from taut.data.dataset import build_renderer, input_paths
from taut.data.render.render import Renderer
from taut.data.render.stop_tokens import derive_stop_set
from taut.data.render.template_files import read_template, template_decision
from taut.data.rows.messages import Message
from taut.data.rows.tool_calls import TOOLS, ToolCall, derive_call_format
from taut.data.settings import DataConfig
from taut.errors import ConfigError
from taut.rl.turns import Bridge

SYSTEM: Message = {"role": "system", "content": "Be brief."}
ASKED: Message = {"role": "user", "content": "What is 2 plus 3?"}
CALLS = [
    ToolCall(
        "call00000", "mixed", {"words": 'a "b" é', "number": 3, "flag": True, "tree": {"x": [1.5]}}
    ),
    ToolCall("call00001", "find_weather", {"city": "Paris", "unit": "celsius"}),
]


def renderer() -> Renderer:
    """Of a tokenizer whose own template writes no tools."""
    return build_renderer(DataConfig(template="hermes"), tiny_tokenizer("chatml"))


def text(*messages: Message, tools: bool = False, is_prompt: bool = True) -> str:
    applied = renderer().template.apply(
        messages, TOOLS if tools else (), "row", is_prompt=is_prompt
    )
    return applied.text


@pytest.mark.parametrize("content", ["", "I look it up."])
def test_calls_are_read_back_as_they_were_written(content: str) -> None:
    """The format is derived from the template's text, which a model imitates; then a result is a turn of the user."""
    calls = derive_call_format(renderer().template)
    assert (calls.begin, calls.end) == ("<tool_call>", "</tool_call>")
    turn: Message = {
        "role": "assistant",
        "content": content,
        "tool_calls": [call.as_message() for call in CALLS],
    }
    answers: list[Message] = [
        {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": f"{k}"}
        for k, call in enumerate(CALLS)
    ]
    whole = text(SYSTEM, ASKED, turn, *answers, tools=True)
    said = whole.partition("<|im_start|>assistant\n")[2].partition("<|im_end|>")[0]
    assert calls.read(said, TOOLS) == (content, CALLS)
    assert whole.endswith(
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n0\n</tool_response>\n<tool_response>\n1\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    for tool in TOOLS:
        assert json.dumps(tool) in whole
    assert whole.startswith("<|im_start|>system\nBe brief.\n\nYou may call functions.")


def test_without_tools_it_is_chatml_and_history_stays_as_it_was() -> None:
    answer: Message = {"role": "assistant", "content": "5."}
    chat = (SYSTEM, ASKED, answer, ASKED)
    chatml = Renderer(tiny_tokenizer("chatml")).template
    assert text(*chat) == chatml.apply(chat, (), "row", is_prompt=True).text
    assert text(ASKED) == "<|im_start|>user\nWhat is 2 plus 3?<|im_end|>\n<|im_start|>assistant\n"
    made = renderer()
    stops = derive_stop_set(made).ids
    (end,) = made.stop_ids
    assert made.tokenizer.convert_ids_to_tokens(end) == "<|im_end|>"
    assert end in stops
    bridge = Bridge(made, stops)
    calling: Message = {"role": "assistant", "content": "", "tool_calls": [CALLS[0].as_message()]}
    result: Message = {"role": "tool", "tool_call_id": "call00000", "name": "mixed", "content": "5"}
    assert bridge.rewrites(answer, ASKED, TOOLS) is None
    assert bridge.rewrites(calling, result, TOOLS) is None


def test_it_replaces_the_models_own_by_a_decision() -> None:
    (decision,) = template_decision("hermes")
    assert (decision.name, decision.value) == ("chat template", "hermes")
    assert template_decision("mine.jinja") == template_decision(None) == []
    assert input_paths(DataConfig(template="hermes")) == []
    assert input_paths(DataConfig(template="mine.jinja")) == ["mine.jinja"]


def test_a_tokenizer_without_its_tokens_is_refused() -> None:
    class Bare:
        def get_vocab(self) -> dict[str, int]:
            return {"<|im_start|>": 1}

    with pytest.raises(
        ConfigError, match=r"writes <\|im_end\|>, which the tokenizer does not have.*tokens.add"
    ):
        read_template("hermes", Bare(), "data.template")  # type: ignore[arg-type]


def test_a_file_is_read_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    tokenizer = tiny_tokenizer("chatml")
    with pytest.raises(
        ConfigError, match=r"cannot read .*expected a file with a chat template, or one of hermes"
    ):
        read_template(str(file), tokenizer, "template", is_of_run=False)
    file.write_text(TEMPLATES["qwen2.5"])
    assert read_template(str(file), tokenizer, "template", is_of_run=False) == TEMPLATES["qwen2.5"]


def test_a_template_may_stand_in_the_configuration() -> None:
    text = "{% for m in messages %}{{ m.content }}|{% endfor %}"
    config = DataConfig(template=text)
    assert input_paths(config) == []
    made = build_renderer(config, tiny_tokenizer("chatml"))
    assert made.template.apply([ASKED], (), "row", is_prompt=True).text == "What is 2 plus 3?|"
