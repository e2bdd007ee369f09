"""Facts are found in a model's files and the data's first row; where they are not here, that is the answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.tiny_tokenizers import save_tokenizer, tiny_tokenizer

from taut_tools.migrate.examine import examine
from taut_tools.migrate.facts import FACTS, Answer, Facts

GENERATION = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% generation %}"
    "{{ message['content'] + '<|im_end|>\\n' }}{% endgeneration %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def a_model(
    directory: Path, *, eos: str = "<|im_end|>", pad: str | None = "<|endoftext|>", **config: Any
) -> Path:
    """A directory with a tiny ChatML tokenizer and a config."""
    directory.mkdir()
    tokenizer = tiny_tokenizer("chatml")
    tokenizer.eos_token = eos
    tokenizer.pad_token = pad
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen2", **config}))
    save_tokenizer(tokenizer, directory)
    return directory


def facts_of(tmp_path: Path, **settings: Any) -> Facts:
    """The facts of a TRL recipe with these settings, which lies beside the model."""
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({"model_name_or_path": "model", **settings}))
    return Facts(examine(f"trl.sft:{path}").recipe, tmp_path)


def holds(facts: Facts, name: str) -> bool | None:
    return facts.answer(name).holds


def test_an_eos_that_is_not_the_turn_end(tmp_path: Path) -> None:
    a_model(tmp_path / "model", eos="<|endoftext|>")
    facts = facts_of(tmp_path)
    assert facts.answer("turn_end_is_not_eos") == Answer(
        True, "the template ends turns with '<|im_end|>', eos is '<|endoftext|>'"
    )
    assert holds(facts, "turn_end_is_new")
    assert holds(facts, "turn_end_is_not_named")


def test_the_recipe_may_put_the_eos_right(tmp_path: Path) -> None:
    a_model(tmp_path / "model", eos="<|endoftext|>")
    facts = facts_of(tmp_path, eos_token="<|im_end|>")
    assert holds(facts, "turn_end_is_not_eos") is False
    assert holds(facts, "turn_end_is_not_named") is False
    assert holds(facts, "turn_end_is_new"), "the row is as untrained as before"


def test_generation_config_may_name_the_end(tmp_path: Path) -> None:
    model = a_model(tmp_path / "model", eos="<|endoftext|>")
    end = tiny_tokenizer("chatml").convert_tokens_to_ids("<|im_end|>")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    facts = facts_of(tmp_path)
    assert holds(facts, "turn_end_is_not_eos")
    assert holds(facts, "turn_end_is_not_named") is False
    assert holds(facts, "turn_end_is_new") is False


def test_a_sound_model(tmp_path: Path) -> None:
    a_model(tmp_path / "model")
    facts = facts_of(tmp_path)
    for name in ("turn_end_is_not_eos", "turn_end_is_new", "pad_is_eos", "has_state_layers"):
        assert holds(facts, name) is False
    for name in ("is_adapter", "is_vision", "template_thinks"):
        assert holds(facts, name) is False
    assert holds(facts, "template_has_no_generation")


def test_pad_and_eos(tmp_path: Path) -> None:
    a_model(tmp_path / "model", pad="<|im_end|>")
    assert holds(facts_of(tmp_path), "pad_is_eos")


def test_a_template_that_the_recipe_gives(tmp_path: Path) -> None:
    a_model(tmp_path / "model")
    (tmp_path / "t.jinja").write_text(GENERATION)
    facts = facts_of(tmp_path, chat_template_path="t.jinja")
    assert holds(facts, "template_has_no_generation") is False
    facts = facts_of(tmp_path, chat_template_path="nowhere.jinja")
    assert facts.answer("turn_end_is_not_eos") == Answer(
        None, "could not look: the chat template nowhere.jinja is not here"
    )


@pytest.mark.parametrize(
    ("config", "fact"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, "has_state_layers"),
        ({"vision_config": {}}, "is_vision"),
    ],
)
def test_what_the_config_says(tmp_path: Path, config: dict[str, Any], fact: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert holds(facts_of(tmp_path), fact)


def test_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    assert holds(facts_of(tmp_path), "is_adapter")


@pytest.mark.parametrize("name", sorted(FACTS))
def test_a_model_that_is_not_here_has_no_facts(tmp_path: Path, name: str) -> None:
    facts = facts_of(tmp_path, model_name_or_path="someone/nothing", dataset_name="someone/data")
    answer = facts.answer(name)
    assert (answer.holds is None) == (name != "has_unknown_keys_in_file")
    assert answer.says


@pytest.mark.parametrize(
    ("row", "fact"),
    [
        ({"prompt": "a", "completion": "b"}, "data_is_prompt_completion"),
        ({"messages": []}, "data_is_messages"),
        ({"messages": [], "images": []}, "data_has_pictures"),
    ],
)
def test_the_first_row(tmp_path: Path, row: dict[str, Any], fact: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    facts = facts_of(tmp_path, dataset_name="rows.jsonl")
    assert holds(facts, fact)
    others = {
        "data_is_prompt_completion": {"data_is_messages", "data_has_pictures"},
        "data_is_messages": {"data_is_prompt_completion", "data_has_pictures"},
        "data_has_pictures": {"data_is_prompt_completion"},
    }
    assert not any(holds(facts, other) for other in others[fact])


@pytest.mark.parametrize(
    ("command", "holding"),
    [
        ("trl sft", False),
        ("accelerate launch --config_file zero3.yaml sft.py", True),
        ("accelerate launch --config_file mine.yaml sft.py", None),
        ("torchrun --nproc_per_node 8 sft.py", False),
        ("torchrun sft.py --deepspeed ds_zero2.json", True),
    ],
)
def test_who_keeps_float32_weights(tmp_path: Path, command: str, holding: bool | None) -> None:
    path = tmp_path / "a.sh"
    path.write_text(f"{command} --model_name_or_path model --dtype bfloat16\n")
    facts = Facts(examine(f"trl:{path}").recipe, tmp_path)
    assert holds(facts, "keeps_master_weights") is holding


def test_a_model_here_decides_what_was_open(tmp_path: Path) -> None:
    a_model(tmp_path / "model", eos="<|endoftext|>")
    path = tmp_path / "sft.yaml"
    path.write_text("model_name_or_path: model\nmax_length: 64\nuse_peft: true\n")
    found = examine(f"trl:{path}")
    assert {one.trap.id for one in found.having("walks_in")} == {
        "trl.eos-is-not-turn-end",
        "trl.lora-untrained-turn-end",
    }
    assert found.exit_code == 1
