"""The tokens between turns are the template's own, whatever was sampled; what was sampled is never written again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.helpers.tiny_tokenizers import TEMPLATES, tiny_tokenizer

from taut.data.render.render import Renderer
from taut.data.render.stop_tokens import derive_stop_set
from taut.data.rows.messages import Message
from taut.errors import RenderError
from taut.rl.turns import Bridge, _calls

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds",
        "parameters": {"type": "object", "properties": {}},
    },
}
HEAD = "{{ tools | tojson if tools }}{% for m in messages %}"
END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
MISTRAL_LIKE = (
    HEAD
    + "{% if m.role == 'tool' %}{% if m.tool_call_id | length != 9 or loop.previtem.role == 'user' or "
    "(loop.previtem.role == 'assistant' and not loop.previtem.tool_calls) %}"
    "{{ raise_exception('a tool answers a call') }}{% endif %}[TOOL_RESULTS] {{ m.tool_call_id }} {{ m.content }}"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{{ c.function | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}]{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endif %}"
    + END
)
MARKED = (
    HEAD
    + "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<s>{{ c.function | tojson }}</s>"
    "{% endfor %}" + END
)
"""Its calls are marked with special tokens."""
FORGETFUL = HEAD + "<|im_start|>{{ m.role }}\n{{ m.content if m.role == 'user' }}" + END
ECHOING = (
    HEAD
    + "{{ loop.previtem.content if m.role == 'user' and not loop.first }}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + END
)
DEAF = TEMPLATES["qwen2.5"].replace(
    "'\\n<tool_response>\\n' + message.content", "'\\n<tool_response>\\n'"
)
"""Leaves out what a tool says."""
FIRST_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDLESS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '<|im_end|>' if loop.last and m.role in ENDED }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
ASKED: Message = {"role": "user", "content": "What is 2 plus 3?"}
SAID: Message = {"role": "user", "content": "Are you sure? Understood <|im_end|>"}


def bridge_of(template: str | None, name: str = "chatml") -> Bridge:
    renderer = Renderer(tiny_tokenizer(name), template)
    return Bridge(renderer, derive_stop_set(renderer).ids)


def call(index: str = "call00000", name: str = "add") -> dict[str, object]:
    return {"id": index, "type": "function", "function": {"name": name, "arguments": {}}}


def answer(index: str = "call00000") -> Message:
    return {"role": "tool", "tool_call_id": index, "name": "add", "content": "5"}


def whole(bridge: Bridge, messages: Sequence[Message]) -> list[int]:
    return bridge.prompt(messages, [TOOL])


@pytest.mark.parametrize("name", sorted({*TEMPLATES} - {"qwen3"}))
def test_prompt_turn_and_between_are_the_templates_own_rendering(name: str) -> None:
    bridge = bridge_of(None, name)
    turn: Message = {"role": "assistant", "content": "It is 5."}
    row = bridge.template.apply((ASKED, turn), (), "row")
    ids = bridge.template.encode([row])[row]
    end = bridge.template.end_of_turn(ids, 1, "row")
    between = bridge.between((ASKED, turn), [SAID], (), last=ids[end])
    assert [*ids[: end + 1], *between] == bridge.prompt((ASKED, turn, SAID), ())
    assert bridge.rewrites(turn, SAID, ()) is None


@pytest.mark.parametrize(
    "content", ["", "5", "Understood", "<think>\nhm", "a</think>b", "<|im_end|>", "{{ x }}"]
)
def test_what_is_between_does_not_depend_on_what_was_said(content: str) -> None:
    bridge = bridge_of(None, "qwen3")
    turns = [{"role": "assistant", "content": text} for text in ("It is 5.", content)]
    end = bridge.renderer.stop_ids[0]
    one, two = (bridge.between((ASKED, turn), [SAID], (), last=end) for turn in turns)
    assert one == two
    assert bridge.template.decode(one).startswith("\n<|im_start|>user\nAre you sure?")


def test_a_turn_that_a_stop_string_ended_gets_its_end() -> None:
    bridge = bridge_of(None)
    turn: Message = {"role": "assistant", "content": "5."}
    (end,) = bridge.renderer.stop_ids
    ended = bridge.between((ASKED, turn), [SAID], (), last=end)
    assert bridge.between((ASKED, turn), [SAID], (), last=end + 1) == [end, *ended]


@pytest.mark.parametrize(
    "template", [TEMPLATES["qwen2.5"], MISTRAL_LIKE, MARKED], ids=["qwen", "mistral", "marked"]
)
def test_after_calls_come_their_answers(template: str) -> None:
    bridge = bridge_of(template)
    turn: Message = {"role": "assistant", "content": "", "tool_calls": [call(), call("call00001")]}
    said = [answer(), answer("call00001")]
    (end,) = bridge.renderer.stop_ids
    between = bridge.between((ASKED, turn), said, [TOOL], last=end)
    full = whole(bridge, [ASKED, turn, *said])
    assert full[-len(between) - 1 :] == [end, *between]
    assert bridge.template.decode(between).count("5") == 2


def test_an_answer_to_a_call_that_none_could_read_stands_after_a_call() -> None:
    bridge = bridge_of(MISTRAL_LIKE)
    turn: Message = {"role": "assistant", "content": "[TOOL_CALLS] [{add"}
    more: Message = {"role": "assistant", "content": "5."}
    (end,) = bridge.renderer.stop_ids
    first = bridge.between((ASKED, turn), [answer()], [TOOL], last=end)
    later = bridge.between((ASKED, turn, answer(), more), [SAID], [TOOL], last=end)
    assert (
        bridge.template.decode(first)
        == "\n[TOOL_RESULTS] call00000 5<|im_end|>\n<|im_start|>assistant\n"
    )
    assert bridge.template.decode(later).startswith("\n<|im_start|>user\nAre you sure?")


def test_a_template_that_writes_history_differently_is_told_apart() -> None:
    turn: Message = {"role": "assistant", "content": "Yes."}
    found = bridge_of(None, "qwen3").rewrites(turn, ASKED, ())
    assert found is not None
    assert "Yes.<|im_end|>" in found


def test_a_template_that_leaves_out_what_was_said_is_refused() -> None:
    with pytest.raises(RenderError, match="does not write what an assistant says"):
        bridge_of(FORGETFUL)


def test_a_history_of_calls_without_ids_is_told_by_place() -> None:
    bridge = bridge_of(None, "qwen2.5")
    calls = [{key: it for key, it in call(name=name).items() if key != "id"} for name in "ab"]
    tools: list[Message] = [{"role": "tool", "content": text} for text in "123"]
    turn: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    assert [one["id"] for one in _calls(turn, tools)] == ["call00000", "call00001", "call00002"]
    assert [one["function"]["name"] for one in _calls(turn, tools)] == ["a", "b", "tool"]
    more: Message = {"role": "assistant", "content": "5."}
    assert bridge.between((ASKED, turn, *tools, more), [SAID], [TOOL], last=0)


def test_a_template_that_leaves_out_what_others_say_is_refused() -> None:
    turn: Message = {"role": "assistant", "content": "", "tool_calls": [call()]}
    with pytest.raises(RenderError, match="not write what a message of role tool says"):
        bridge_of(DEAF).between((ASKED, turn), [answer()], [TOOL], last=0)
    bridge, more = bridge_of(FIRST_SYSTEM), {"role": "assistant", "content": "5."}
    assert bridge.between((ASKED, more), [SAID], (), last=0)
    with pytest.raises(RenderError, match="not write what a message of role system says"):
        bridge.between((ASKED, more), [{"role": "system", "content": "Stop."}, SAID], (), last=0)


def test_a_template_that_ends_only_the_last_turn_is_refused() -> None:
    turn: Message = {"role": "assistant", "content": "5."}
    with pytest.raises(RenderError, match="no token that ends it"):
        bridge_of(ENDLESS.replace("ENDED", "['assistant']")).between((ASKED, turn), [ASKED], (), 0)
    with pytest.raises(
        RenderError, match="not write what a message of role user says after a turn"
    ):
        bridge_of(ENDLESS.replace("ENDED", "['user', 'assistant']")).between(
            (ASKED, turn), [ASKED], (), 0
        )


def test_a_template_whose_answer_depends_on_what_was_said_is_refused() -> None:
    with pytest.raises(RenderError, match="does not depend on what was said"):
        bridge_of(ECHOING).rewrites({"role": "assistant", "content": "Yes."}, ASKED, ())
