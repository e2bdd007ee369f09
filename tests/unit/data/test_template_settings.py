"""The settings of conversations: a system message for those without one, and values of the template's variables."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.tiny_tokenizers import QWEN3, tiny_tokenizer
from transformers import PreTrainedTokenizerBase

from taut.config import from_mapping
from taut.data.dataset import build_renderer, load_dataset
from taut.data.render.chat_template import with_defaults
from taut.data.rows.prompts import load_prompt_set
from taut.data.rows.schema import Columns, read_any
from taut.data.settings import DataConfig
from taut.errors import ConfigError, DataError

QUESTION = {"role": "user", "content": "What is 2 plus 3?"}
REPLY = {"role": "assistant", "content": "2 plus 3 is 5."}
OWN = {"role": "system", "content": "Be long."}
SWITCH = (
    "{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)


def switched() -> PreTrainedTokenizerBase:
    """A tokenizer whose template has Qwen3's switch."""
    tokenizer = copy.deepcopy(tiny_tokenizer("qwen3"))
    tokenizer.chat_template = QWEN3 + SWITCH
    return tokenizer


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def settings(directory: Path, rows: list[Any], **options: Any) -> DataConfig:
    train = write(directory / "rows.jsonl", rows)
    return from_mapping(DataConfig, {"train": train, "cache": str(directory / "c"), **options})


def texts(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    data = load_dataset(config, "train", build_renderer(config, tokenizer), 512)
    return [tokenizer.decode(data[index].ids_T) for index in range(len(data))]


def test_a_conversation_without_a_system_message_gets_the_one_of_the_settings(
    tmp_path: Path,
) -> None:
    rows = [{"messages": [QUESTION, REPLY]}, {"messages": [OWN, QUESTION, REPLY]}]
    plain = texts(settings(tmp_path, rows), tiny_tokenizer("qwen3"))
    added = texts(settings(tmp_path, rows, system="Be brief."), tiny_tokenizer("qwen3"))
    assert "Be brief." in added[0] and "Be brief." not in plain[0]
    assert added[1] == plain[1] and "Be long." in added[1]


def test_it_is_the_same_row_as_one_that_has_it() -> None:
    columns = Columns(system="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    given = read_any({"messages": [QUESTION, REPLY]}, "f:1", columns)
    assert given == read_any({"messages": [system, QUESTION, REPLY]}, "f:1", Columns())


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [QUESTION], "chosen": [REPLY], "rejected": [{**REPLY, "content": "6"}]},
        {"instruction": "What?", "chosen": "5", "rejected": "6"},
    ],
)
def test_every_answer_of_a_preference_gets_it(record: dict[str, Any]) -> None:
    row: Any = read_any(record, "f:1", Columns(system="Be brief.", kind="preference"))
    for answer in row.answers:
        assert answer.messages[0] == {"role": "system", "content": "Be brief."}
        assert [answer.messages[index]["role"] for index in answer.learned] == ["assistant"]


def test_a_source_may_have_its_own_or_none(tmp_path: Path) -> None:
    rows = [{"messages": [QUESTION, REPLY]}]
    paths = [write(tmp_path / f"{name}.jsonl", rows) for name in "abc"]
    sources: list[Any] = [
        paths[0],
        {"path": paths[1], "system": "Be kind."},
        {"path": paths[2], "system": ""},
    ]
    config = settings(tmp_path, rows, system="Be brief.", train=sources)
    first, second, third = texts(config, tiny_tokenizer("qwen3"))
    assert "Be brief." in first and "Be kind." in second and "system" not in third
    assert config.system_messages == {"Be brief.", "Be kind."}


def test_plain_text_has_no_place_for_it(tmp_path: Path) -> None:
    config = settings(tmp_path, [{"text": "Two and three is five."}], system="Be brief.")
    with pytest.raises(DataError, match=r"rows.jsonl:1: the row is plain text.*system is set"):
        texts(config, tiny_tokenizer("qwen3"))


def test_variables_become_defaults_of_the_template(tmp_path: Path) -> None:
    tokenizer = switched()
    config = settings(tmp_path, [], chat_template_kwargs={"enable_thinking": False})
    renderer, plain = build_renderer(config, tokenizer), build_renderer(DataConfig(), tokenizer)
    prompt = tokenizer.decode(renderer.prompt_ids([QUESTION]))
    assert prompt == tokenizer.apply_chat_template(
        [QUESTION], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert prompt != tokenizer.decode(plain.prompt_ids([QUESTION]))
    # the saved template needs no setting, and a request's own value still takes precedence
    saved = renderer.template.template
    on = tokenizer.decode(plain.prompt_ids([QUESTION]))
    for asked, expected in (({}, prompt), ({"enable_thinking": True}, on)):
        served = tokenizer.apply_chat_template(
            [QUESTION], chat_template=saved, tokenize=False, add_generation_prompt=True, **asked
        )
        assert served == expected
    assert renderer.identity() != plain.identity()


@pytest.mark.parametrize(
    "value", [True, None, 3, 1.5, 'a "b" {{ c }} %} \\ ü 😀', ["x", 1], {"k": [None, "v"]}]
)
def test_any_value_is_written_so_that_the_template_reads_it(value: Any) -> None:
    tokenizer = switched()
    template = with_defaults("\n  {{ value | tojson }}", {"value": value})
    text = tokenizer.apply_chat_template([QUESTION], chat_template=template, tokenize=False)
    given = tokenizer.apply_chat_template(
        [QUESTION], chat_template="\n  {{ value | tojson }}", tokenize=False, value=value
    )
    assert text == given


def test_a_source_may_have_its_own_variables(tmp_path: Path) -> None:
    tokenizer = switched()
    path = write(tmp_path / "p.jsonl", [{"messages": [QUESTION]}])
    sources = [path, {"path": path, "chat_template_kwargs": {"enable_thinking": False}}]
    config = settings(tmp_path, [], train=sources)
    renderer = build_renderer(config, tokenizer)
    first, second = load_prompt_set(replace(config, cache=None), "train", renderer, 512).prompt_rows
    off = build_renderer(DataConfig(chat_template_kwargs={"enable_thinking": False}), tokenizer)
    assert first.ids_T.tolist() == renderer.prompt_ids([QUESTION]).tolist()
    assert second.ids_T.tolist() == off.prompt_ids([QUESTION]).tolist() != first.ids_T.tolist()


@pytest.mark.parametrize("name", ["enable_thinkin", "messages", "add_generation_prompt", "range"])
def test_a_variable_that_the_template_does_not_read_is_refused(name: str, tmp_path: Path) -> None:
    config = settings(tmp_path, [], chat_template_kwargs={name: False})
    with pytest.raises(
        ConfigError, match=rf"data.chat_template_kwargs: .*no variable '{name}'.*enable_thinking"
    ):
        build_renderer(config, switched())


def test_one_of_a_source_is_refused_with_its_row(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"messages": [QUESTION, REPLY]}])
    config = settings(
        tmp_path, [], train=[{"path": path, "chat_template_kwargs": {"mood": "good"}}]
    )
    with pytest.raises(ConfigError, match=r"p.jsonl:1: the chat template reads no variable 'mood'"):
        texts(config, switched())


@pytest.mark.parametrize("value", [True, False, None])
def test_a_switch_of_a_row_that_its_template_does_not_read_is_let_pass(value: Any) -> None:
    """SmolTalk2 has enable_thinking in each row, and most templates have no such switch."""
    row = {"messages": [QUESTION, REPLY]}
    names = ("enable_thinking", "bos_token", "add_generation_prompt")
    switches = {"chat_template_kwargs": dict.fromkeys(names, value)}
    renderer = build_renderer(DataConfig(), tiny_tokenizer("qwen3"))
    plain, own = (read_any(it, "p.jsonl:1", Columns()) for it in (row, {**row, **switches}))
    (expected,), (found,) = renderer.render(plain), renderer.render(own)  # type: ignore[arg-type]
    assert found.ids_T.tolist() == expected.ids_T.tolist()
    assert renderer.template.unread({"enable_thinking": value}) == ["enable_thinking"]


@pytest.mark.parametrize("value", ["good", [1], {"a": 1}, 3])
def test_a_text_of_a_row_that_its_template_does_not_read_is_refused(value: Any) -> None:
    row = {"messages": [QUESTION, REPLY], "chat_template_kwargs": {"mood": value}}
    renderer = build_renderer(DataConfig(), tiny_tokenizer("qwen3"))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"p.jsonl:1: .* reads no variable 'mood'"):
            renderer.render(read_any(row, "p.jsonl:1", Columns()))  # type: ignore[arg-type]


def test_a_switch_of_a_source_that_its_template_does_not_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"messages": [QUESTION, REPLY]}])
    config = settings(tmp_path, [], train=[{"path": path, "chat_template_kwargs": {"think": True}}])
    with pytest.raises(
        ConfigError, match=r"p.jsonl:1: the chat template reads no variable 'think'"
    ):
        texts(config, switched())


MINISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}"
    "{% elif m.content is string %}{{ m.content + eos_token }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'thinking' %}{{ '[THINK]' + part.thinking + '[/THINK]' }}{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""What Ministral 3 and Magistral read: a thought is a part of the content."""


@pytest.mark.parametrize(
    "answer",
    [
        {
            "content": [
                {"type": "thinking", "thinking": "Add."},
                {"type": "text", "text": "It is 5."},
            ]
        },
        {"content": "It is 5.", "reasoning_content": "Add."},
    ],
)
def test_a_thought_is_a_part_of_the_content_where_the_template_writes_it_so(answer: Any) -> None:
    renderer = build_renderer(DataConfig(template=MINISTRAL), tiny_tokenizer())
    row = {"messages": [QUESTION, {"role": "assistant", **answer}, QUESTION, REPLY]}
    (sample,) = renderer.render(read_any(row, "p.jsonl:1", Columns()))  # type: ignore[arg-type]
    targets = renderer.tokenizer.decode(sample.ids_T[sample.target_at_N])
    assert targets == "[THINK]Add.[/THINK]It is 5.<|im_end|>2 plus 3 is 5.<|im_end|>"
    assert renderer.template.takes_thought_parts
    listing = MINISTRAL.replace("m.content is string", "true").replace("+ eos", "| string + eos")
    for other in (None, listing):  # one that writes a list as Python does takes no parts
        config = DataConfig(template=other)
        template = build_renderer(config, tiny_tokenizer("qwen3")).template
        assert not template.takes_thought_parts
