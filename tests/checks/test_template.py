"""Sound templates, of the shapes met in practice, with sound rows: no check of template or stop set fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.checks.faults.data import plain, talks
from tests.checks.faults.template import CALL, TOOL, rows_of
from tests.checks.planting import Place
from tests.checks.test_planted import told
from tests.helpers.tiny_models import save_tiny
from tests.helpers.tiny_tokenizers import QWEN3, tiny_tokenizer

from taut.checks import CHECKS
from taut.checks.examine import Examination, examine
from taut.checks.registry import Finding
from taut.checks.session import Session

ASKED = [name for name in CHECKS if name.split(".")[0] in ("template", "stop", "data", "model")]

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{% for message in rest %}"
    "{% if loop.index0 == 0 and system %}"
    "{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)
"""A BOS for each exchange, the system message inside the first question."""
MISTRAL_LAST = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}"
    "{% set asked = rest | selectattr('role', 'equalto', 'user') | list %}"
    "{{ bos_token }}{% for message in rest %}"
    "{% if message['role'] == 'user' %}{% if message == asked[-1] and system is defined %}"
    "{{ '[INST] ' + system + '\\n\\n' + message['content'] + ' [/INST]' }}{% else %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}{% else %}{{ ' ' + message['content'] + eos_token }}"
    "{% endif %}{% endfor %}"
)
"""The system message stands in the last question, so that history is rewritten with each."""
ZEPHYR = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
"""Roles in plain words."""
CHANNELS = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant' }}"
    "{% if message.thinking %}{{ '<|start_header_id|>analysis<|end_header_id|>' + message.thinking + "
    "'<|eot_id|><|im_start|>assistant' }}{% endif %}"
    "{{ '<|start_header_id|>final<|end_header_id|>' + message['content'] + '<|im_end|>' }}{% else %}"
    "{{ '<|im_start|>' + message['role'] + '<|start_header_id|>' + message['content'] + '<|eot_id|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)
"""As gpt-oss: the model itself writes which channel it speaks on."""
ALPACA = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '### Instruction:\\n' + message['content'] "
    "+ '\\n\\n' }}{% else %}{{ '### Response:\\n' + message['content'] + eos_token + '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
)
THINKING = QWEN3.replace("assistant\\n' }}{%- endif", "assistant\\n<think>' }}{%- endif")
"""The generation prompt of a model that always thinks; answers without reasoning close it at once."""
SWITCHED = QWEN3.replace(
    "assistant\\n' }}{%- endif",
    "assistant\\n' }}{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif",
)
assert QWEN3 not in (THINKING, SWITCHED)

PLAIN = rows_of("user", "assistant", number=5)
LONGER = rows_of("user", "assistant", "user", "assistant", number=5)
SYSTEM = rows_of("system", "user", "assistant", "user", "assistant", number=5)
THOUGHT = rows_of("user", "assistant", number=5, reasoning_content="the question is about birds")
THOUGHT_LONGER = rows_of(
    "user",
    "assistant",
    "user",
    "assistant",
    number=5,
    reasoning_content="the question is about birds",
)
INLINE = rows_of("user", "assistant", number=5)
for _row in INLINE:
    _row["messages"][1]["content"] = (
        f"<think>\nbirds?\n</think>\n\n{_row['messages'][1]['content']}"
    )
CHANNELED = rows_of("user", "assistant", number=5, thinking="the question is about birds")
CALLING = [
    {
        "tools": [TOOL],
        "messages": [
            {"role": "user", "content": f"what is the weather, {number}?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": '{"sky": "blue"}'},
            {"role": "assistant", "content": f"the sky is blue {number}"},
        ],
    }
    for number in range(4)
]
SPACED = rows_of("user", "assistant", number=5)
for _row in SPACED:
    _row["messages"][0]["content"] = f"  {_row['messages'][0]['content']} \n"
    _row["messages"][1]["content"] += " "
SPACED[0]["messages"][0]["content"] = "What does <|im_end|> mean?"

SOUND: dict[str, tuple[str | None, str | None, list[Any]]] = {
    "chatml": ("chatml", None, SYSTEM),
    "chatml, one row": ("chatml", None, PLAIN[:1]),
    "chatml, white space": ("chatml", None, SPACED),
    "qwen2.5": ("qwen2.5", None, LONGER),
    "qwen2.5, system": ("qwen2.5", None, SYSTEM),
    "qwen2.5, tools": ("qwen2.5", None, CALLING),
    "qwen3": ("qwen3", None, LONGER),
    "qwen3, reasoning": ("qwen3", None, THOUGHT),
    "qwen3, reasoning stripped from history": ("qwen3", None, THOUGHT_LONGER),
    "qwen3, reasoning between tags": ("qwen3", None, INLINE),
    "qwen3, some with reasoning": ("qwen3", None, [*PLAIN, *THOUGHT]),
    "qwen3, switch": ("qwen3", SWITCHED, THOUGHT),
    "qwen3, switch of DeepSeek": (
        "qwen3",
        SWITCHED.replace("enable_thinking", "thinking"),
        THOUGHT,
    ),
    "qwen3, tools": ("qwen3", None, CALLING),
    "qwen3, thinking prompt": ("qwen3", THINKING, [*PLAIN, *THOUGHT]),
    "llama3": ("llama3", None, SYSTEM),
    "llama3, white space": ("llama3", None, SPACED[1:]),
    "gemma": ("gemma", None, LONGER),
    "mistral": ("mistral", None, LONGER),
    "llama2": ("mistral", LLAMA2, SYSTEM),
    "mistral, system last": ("mistral", MISTRAL_LAST, SYSTEM),
    "zephyr": ("mistral", ZEPHYR, SYSTEM),
    "channels": ("chatml", CHANNELS, CHANNELED),
    "alpaca": ("mistral", ALPACA, LONGER),
    "base model, chatml": (None, ZEPHYR, LONGER),
    "no template, texts": (None, None, [{"text": "the cat"}, {"text": "a big red house"}]),
    "no template, two words": (None, None, [{"text": "a b"}]),
    "no template, completions": (None, None, [{"prompt": "the sky is", "completion": " blue"}] * 3),
}


def session_of(place: Place, name: str, **keys: Any) -> Session:
    template, text, rows = SOUND[name]
    model = save_tiny(
        "llama", place.directory / "llama", tiny_tokenizer(template), max_position_embeddings=512
    )
    if text is not None:
        path = place.directory / "template.jinja"
        path.write_text(text, encoding="utf-8")
        keys["data__template"] = str(path)
    return place.session(model, place.data(rows), **{"data__max_length": 500, **keys})


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


def answers(examination: Examination) -> dict[str, Finding]:
    return {one.name: one.finding for one in examination.results}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_template_raises_no_alarm(name: str, place: Place) -> None:
    found = examine(session_of(place, name), only=ASKED)
    assert not found.failures, told(found)
    if SOUND[name][0] or SOUND[name][1]:
        assert answers(found)["template.targets"].outcome == "passed"


def test_a_default_system_prompt_is_told(place: Place) -> None:
    found = answers(examine(session_of(place, "qwen2.5"), only=ASKED))["template.system"]
    assert "'You are a helpful assistant.'" in found.notes[0]


def test_rows_without_a_system_message_of_a_plain_template_have_none(place: Place) -> None:
    found = answers(examine(session_of(place, "qwen3"), only=ASKED))["template.system"]
    assert found.notes == ()


def test_reasoning_that_is_stripped_from_history_is_counted(place: Place) -> None:
    name = "qwen3, reasoning stripped from history"
    found = answers(examine(session_of(place, name), only=ASKED))
    assert found["template.parts"].number == 5
    assert found["template.thinking"].number == 10


def test_an_empty_thought_that_is_taught_is_told(place: Place) -> None:
    found = answers(examine(session_of(place, "qwen3"), only=ASKED))["template.thinking"]
    assert "begin with an empty thought" in found.notes[0]


@pytest.mark.parametrize(
    ("name", "switch"),
    [("qwen3, switch", "enable_thinking"), ("qwen3, switch of DeepSeek", "thinking")],
)
def test_what_a_server_does_with_the_switch_of_thinking_is_told(
    name: str, switch: str, place: Place
) -> None:
    found = answers(examine(session_of(place, name), only=ASKED))["template.thinking"]
    assert len(found.notes) == 1
    assert found.notes[0].startswith(f"served with {switch}=false")


def test_what_taut_mends_is_told(place: Place) -> None:
    tokenizer = tiny_tokenizer("chatml", eos="<|endoftext|>")
    model = save_tiny("llama", place.directory / "llama", tokenizer)
    found = answers(examine(place.session(model, place.data(PLAIN)), only=ASKED))
    notes = " ".join(found["stop.set"].notes)
    assert "the tokenizer's eos is <|endoftext|>; saved as <|im_end|>" in notes
    assert "pad is eos (<|endoftext|>)" in notes
    assert found["stop.targets"].number == 5


def test_texts_of_the_targets_are_told(place: Place) -> None:
    found = answers(examine(session_of(place, "chatml"), only=ASKED))["template.targets"]
    assert len(found.notes) == 3
    assert found.notes[0].endswith("<|im_end|>'")


def test_one_row_with_a_special_token_in_its_words_is_told(place: Place) -> None:
    found = answers(examine(session_of(place, "chatml, white space"), only=ASKED))[
        "template.markup"
    ]
    assert (found.outcome, found.number) == ("warning", 1)
    assert "<|im_end|> in the messages of 1 of" in found.says
    assert "transformers, vLLM" in found.remedy and "control_tokens=as_text" in found.remedy


def test_marks_of_another_model_are_told(place: Place) -> None:
    rows = [{"text": f"<|user|> why {row}? <|assistant|> so <|im_end|>"} for row in range(4)]
    found = answers(examine(place.session(data=place.data(rows)), only=ASKED))["template.lossless"]
    assert found.notes == ("written in pieces, being no tokens: <|user|> <|assistant|>",)


def test_rows_with_a_system_message_of_their_own_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path, monkeypatch)
    rows = talks(*plain())
    for row in rows[:2]:
        row["messages"].insert(0, {"role": "system", "content": "You know it all."})
    session = place.session(data=place.data(rows), data__system="You answer briefly.")
    (found,) = examine(session, only=["template.system"]).results
    assert found.finding.outcome == "passed" and found.finding.number == 12
    own = "2 rows have a system message of their own, which is kept"
    assert f"10 rows have the one of data.system; {own}" in found.finding.notes
