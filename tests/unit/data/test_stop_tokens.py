"""The stop set: what ends an answer and why, and what must not."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.tiny_models import save_tiny, tiny_config
from tests.helpers.tiny_tokenizers import TEMPLATES, tiny_tokenizer
from transformers import GenerationConfig

from taut.data.render.render import Renderer
from taut.data.render.stop_tokens import (
    PLAIN_END,
    TEXT_END,
    TOOL_END,
    UNNAMED,
    derive_stop_set,
    described,
)
from taut.data.rows.messages import Completion, read_conversation
from taut.errors import ModelError, RenderError
from taut.models.load import load_config, stop_ids_in_files

HARMONY = (
    "{% if tools %}{{ '<|im_start|>tools ' + tools[0].function.name + '<end_of_turn>' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role }}"
    "{% if message.tool_calls %}{{ ' to=' + message.tool_calls[0].function.name + '[INST]' }}"
    "{{ message.tool_calls[0].function.arguments | tojson + '<|eot_id|>' }}"
    "{% elif message.role == 'assistant' %}"
    "{% if message.thinking %}{{ '[INST]' + message.thinking + '<end_of_turn><|im_start|>assistant' }}{% endif %}"
    "{{ '[INST]' + message.content + ('</s>' if loop.last else '<end_of_turn>') }}"
    "{% else %}{{ '[INST]' + message.content + '<end_of_turn>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)
"""gpt-oss's manner: three ends for three kinds of message, and a reasoning message inside an answer."""


def ids(renderer: Renderer, *tokens: str) -> list[int]:
    return [renderer.tokenizer.convert_tokens_to_ids(token) for token in tokens]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_known_template_ends_plain_turns_and_tool_calls_alike(name: str) -> None:
    renderer = Renderer(tiny_tokenizer(name))
    stops = derive_stop_set(renderer)
    assert stops.reasons == {renderer.tokenizer.eos_token_id: PLAIN_END}
    assert stops.turn_ends == stops.ids
    assert not stops.left_out


def test_the_turn_end_comes_first_and_the_end_of_text_stays() -> None:
    renderer = Renderer(tiny_tokenizer("chatml", eos="<|endoftext|>"))
    end, text, other = ids(renderer, "<|im_end|>", "<|endoftext|>", "</s>")
    named = {end: "generation_config.json", other: "generation_config.json"}
    stops = derive_stop_set(renderer, named)
    assert list(stops.reasons.items()) == [
        (end, PLAIN_END),
        (text, TEXT_END),
        (other, "generation_config.json names it"),
    ]
    assert stops.turn_ends == (end,)
    assert described(stops, renderer.template)[0] == "<|im_end|> <|endoftext|> </s>"


def test_a_turn_that_calls_tools_may_have_an_end_of_its_own() -> None:
    renderer = Renderer(tiny_tokenizer("chatml", eos="<|endoftext|>"), HARMONY)
    last, call, text, inner = ids(renderer, "</s>", "<|eot_id|>", "<|endoftext|>", "<end_of_turn>")
    stops = derive_stop_set(renderer, {inner: "generation_config.json"})
    assert stops.reasons == {last: PLAIN_END + UNNAMED, call: TOOL_END, text: TEXT_END}
    assert stops.turn_ends == (last, call)
    assert "inside an answer" in stops.left_out[inner]


def test_what_must_not_end_an_answer_is_left_out_with_its_reason() -> None:
    renderer = Renderer(tiny_tokenizer("qwen3"))
    opens, inside = ids(renderer, "<|im_start|>", "<tool_call>")
    named = dict.fromkeys((opens, inside, 2, 10**6, -1), "config.json")
    stops = derive_stop_set(renderer, named)
    assert stops.ids == (renderer.tokenizer.eos_token_id,)
    for index, words in (
        (opens, "opens the assistant's turn"),
        (inside, "writes it inside an answer"),
        (2, "it is text, '#'"),
        (10**6, "no such token"),
        (-1, "no such token"),
    ):
        assert words in stops.left_out[index]
    assert "left out: id 2, config.json names it" in described(stops, renderer.template)[1]


def test_without_a_template_the_eos_ends_a_text() -> None:
    renderer = Renderer(tiny_tokenizer(None))
    assert derive_stop_set(renderer).reasons == {renderer.tokenizer.eos_token_id: TEXT_END}
    renderer.tokenizer.eos_token = None
    fresh = Renderer(renderer.tokenizer)
    assert derive_stop_set(fresh).ids == ()


def test_what_the_files_name_is_read_without_weights(tmp_path: Path) -> None:
    directory = save_tiny("qwen2", tmp_path / "model", tiny_tokenizer())
    GenerationConfig(eos_token_id=[7, 8]).save_pretrained(directory)
    for weights in directory.glob("*.safetensors"):
        weights.write_bytes(b"")
    named = stop_ids_in_files(str(directory), load_config(str(directory)))
    assert named == {7: "generation_config.json", 8: "generation_config.json", 2: "config.json"}
    (directory / "generation_config.json").unlink()
    assert stop_ids_in_files(str(directory), tiny_config("qwen2")) == {2: "config.json"}
    (directory / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot be loaded as a generation_config"):
        stop_ids_in_files(str(directory), tiny_config("qwen2"))


def render(renderer: Renderer, answer: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}]
    renderer.render(read_conversation(messages, "f:1"))


def test_a_row_with_another_end_inside_its_turn_is_refused() -> None:
    plain = Renderer(tiny_tokenizer("chatml", eos="<|endoftext|>"))
    render(plain, "Paris<|endoftext|> is it")
    stopping = plain.stopping_at(derive_stop_set(plain).ids)
    render(stopping, "Paris is it")
    with pytest.raises(RenderError, match=r"f:1: messages\[1\]: '<\|endoftext\|>' ends an answer"):
        render(stopping, "Paris<|endoftext|> is it")
    assert stopping.identity() != plain.identity()
    completion = Completion("f:2", "Hi", " there<|im_end|> again")
    with pytest.raises(RenderError, match=r"f:2: '<\|im_end\|>' ends an answer"):
        stopping.render(completion)


def test_a_turn_that_ends_with_no_stop_is_refused() -> None:
    """A template that ends long turns with another token: no server would stop there."""
    template = (
        "{% for m in messages %}{{ m.role + ':\\n' + m.content }}"
        "{{ '<end_of_turn>' if m.content | length > 20 else '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
    )
    renderer = Renderer(tiny_tokenizer("chatml"), template)
    stopping = renderer.stopping_at(derive_stop_set(renderer).ids)
    render(stopping, "Paris")
    with pytest.raises(RenderError, match=r"'<end_of_turn>', at which no server would stop"):
        render(stopping, "Paris is the capital of France")
