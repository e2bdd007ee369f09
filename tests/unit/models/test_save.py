"""A saved model loads in the library, gives the same logits, stops where it should, and keeps its processor's files."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.tiny_models import (
    CARRIED,
    STATEFUL,
    logits_of,
    parameters_of,
    plain_model,
    tiny_model,
    with_weights_of,
)
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from tests.helpers.vision_models import vision_config
from tests.helpers.vision_processors import save_processor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)

from taut.errors import OutputError
from taut.models import save, weight_files
from taut.models.attention_backends import PREFIX
from taut.models.load import quiet_library
from taut.models.lora.adapters import apply_lora
from taut.models.lora.merge import plain_groups, plain_skeleton
from taut.models.save import copy_processor, saving
from taut.models.settings import LoraConfig, TokensConfig
from taut.models.tokens import add_tokens, add_tokens_to_tokenizer

ROWS = 512
"""More than the tiny tokenizer has tokens."""


def saved(
    model: Any, directory: Path, dtype: torch.dtype = torch.float64, **options: Any
) -> PreTrainedModel:
    tokenizer = options.pop("tokenizer", None) or tiny_tokenizer()
    options.setdefault("stop_ids", [tokenizer.convert_tokens_to_ids("<|im_end|>")])
    options.setdefault("template", tokenizer.chat_template)
    with saving(model, tokenizer, directory, dtype=dtype, **options):
        pass
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", attn_implementation="eager", experts_implementation="eager"
    )


KEPT_NARROW = "olmo_hybrid"
"""The library reads its ``A_log`` in float32, whatever the file has."""


@pytest.mark.parametrize("name", [name for name in (*CARRIED, *STATEFUL) if name != KEPT_NARROW])
def test_every_architecture_reads_back_the_same(name: str, tmp_path: Path) -> None:
    model = tiny_model(name, attention=PREFIX + "reference", vocab_size=ROWS)
    before = parameters_of(model)
    loaded = saved(model, tmp_path / "model")
    assert {p.dtype for p in loaded.parameters()} == {torch.float64}
    expected = logits_of(tiny_model(name, vocab_size=ROWS))
    assert torch.equal(logits_of(with_weights_of(loaded, name, vocab_size=ROWS)), expected)
    read = parameters_of(loaded)
    assert all(torch.equal(value, before[key]) for key, value in read.items())
    assert model.config._attn_implementation == PREFIX + "reference"
    assert model.config.use_cache is False
    assert loaded.config.use_cache is True


def test_weights_may_be_read_by_whoever_may_read_the_config(tmp_path: Path) -> None:
    saved(tiny_model("qwen2", vocab_size=ROWS), tmp_path / "model")
    modes = {path.stat().st_mode for path in (tmp_path / "model").iterdir()}
    assert len(modes) == 1


def test_the_directory_is_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    for _ in range(2):
        saved(tiny_model("qwen2", vocab_size=ROWS), tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= names
    assert not any(name.endswith(".bin") for name in names)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert "taut" not in json.dumps(config)


def test_the_dtype_is_the_one_asked_for(tmp_path: Path) -> None:
    model = tiny_model("qwen2", vocab_size=ROWS, dtype=torch.float32)
    loaded = saved(model, tmp_path / "model", dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in weights  # tied: saved once
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.dtype == torch.float32


def test_stops_are_written_everywhere(tmp_path: Path) -> None:
    """A base model that ends with <|endoftext|>, taught ChatML."""
    tokenizer = tiny_tokenizer(eos="<|endoftext|>")
    end, old = (tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>"))
    model = tiny_model("qwen2", vocab_size=len(tokenizer), eos_token_id=old)
    saved(
        model,
        tmp_path / "model",
        tokenizer=tokenizer,
        template="{{ messages }}",
        stop_ids=[end, old],
    )
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    generation = GenerationConfig.from_pretrained(tmp_path / "model")
    read = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert generation.eos_token_id == [end, old]
    assert not generation._from_model_config
    assert config["eos_token_id"] == end
    assert read.eos_token == "<|im_end|>"
    assert read.pad_token == "<|endoftext|>"
    assert generation.pad_token_id == config["pad_token_id"] == old
    assert read.chat_template == "{{ messages }}"
    assert tokenizer.eos_token == "<|endoftext|>"
    assert model.config.eos_token_id == old


def test_generation_stops_at_the_turn_end(tmp_path: Path) -> None:
    """A head whose bias forces the turn end after any token."""
    tokenizer = tiny_tokenizer(eos="<|endoftext|>")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model = tiny_model("qwen2", vocab_size=len(tokenizer), tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.model.norm.weight.zero_()
        model.lm_head.weight[end] = 0.0
    loaded = saved(model, tmp_path / "model", tokenizer=tokenizer, stop_ids=[end])
    loaded.lm_head.bias = torch.nn.Parameter(torch.zeros(len(tokenizer), dtype=torch.float64))
    with torch.no_grad():
        loaded.lm_head.bias[end] = 1.0
    out = loaded.eval().generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5, do_sample=False)
    assert out[0].tolist() == [5, 6, 7, end]


def test_a_pad_that_is_the_turn_end_is_replaced_where_it_can_be() -> None:
    tokenizer = tiny_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokenizer.pad_token = "<|im_end|>"
    served = save.serving_tokenizer(tokenizer, [end], None)
    assert served.eos_token == "<|im_end|>"
    assert served.pad_token == "<|endoftext|>"
    assert tokenizer.pad_token == "<|im_end|>"


def test_sampling_settings_without_effect_do_not_stop_a_save(tmp_path: Path) -> None:
    model = tiny_model("qwen2", vocab_size=ROWS)
    model.generation_config.temperature = 0.5
    model.generation_config.do_sample = False
    loaded = saved(model, tmp_path / "model")
    assert loaded.generation_config.do_sample in (False, None)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_adapter_and_added_tokens_are_merged(name: str, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(name, vocab_size=len(tokenizer))
    new = add_tokens_to_tokenizer(tokenizer, TokensConfig(add=["<|new|>"]))
    assert add_tokens(model, new) == 1
    modules = ["embed_tokens"] if name == "qwen2" else ["embed_tokens", "lm_head"]
    wrapped = apply_lora(model, LoraConfig(rank=2, modules_to_save=modules))
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.ones_like(parameter))
    expected = logits_of(wrapped)
    loaded = saved(wrapped, tmp_path / "model", tokenizer=tokenizer)
    assert loaded.config.vocab_size == new[0] + 1
    merged = with_weights_of(loaded, name, vocab_size=new[0] + 1)
    assert (logits_of(merged) - expected).abs().max() < 1e-12 * expected.abs().max()
    assert AutoTokenizer.from_pretrained(tmp_path / "model").encode("<|new|>") == new


def test_gathered_weights_are_what_is_saved(tmp_path: Path) -> None:
    model = tiny_model("gemma2", vocab_size=ROWS)
    weights = {name: value.detach() + 1.0 for name, value in model.state_dict().items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    loaded = saved(model, tmp_path / "model", whole=lambda _: weights.items())
    read = loaded.state_dict()
    assert all(torch.equal(read[name], value) for name, value in weights.items())


@pytest.mark.parametrize(
    ("name", "size"),
    [("qwen2", "50GB"), ("qwen2", "20KB"), ("qwen3_moe", "50GB"), ("gpt_oss", "20KB")],
)
def test_the_files_are_those_of_the_library(
    name: str, size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written a layer at a time, in one file and in shards with their index."""
    model = tiny_model(name, dtype=torch.float32)
    plain, skeleton = (
        made.to(torch.bfloat16) for made in (plain_model(model), plain_skeleton(model))
    )
    by_library = type(skeleton).save_pretrained
    monkeypatch.setattr(
        type(skeleton), "save_pretrained", partialmethod(by_library, max_shard_size=size)
    )
    with quiet_library():
        plain.save_pretrained(tmp_path / "library")
        weight_files.save(skeleton, plain_groups(model), tmp_path / "own")
    files = {file.name: file.read_bytes() for file in (tmp_path / "library").iterdir()}
    assert any("-of-" in file for file in files) == (size == "20KB")
    assert files == {file.name: file.read_bytes() for file in (tmp_path / "own").iterdir()}


def test_one_group_of_weights_is_merged_at_a_time() -> None:
    model = apply_lora(tiny_model("llama"), LoraConfig(rank=2))
    asked: list[str] = []

    def whole(names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in model.state_dict().items():
            if name in names:
                asked.append(name)
                yield name, tensor

    for group in plain_groups(model, whole):
        places = {name.split(".layers.")[-1].split(".")[0] for name in group}
        assert len(places) == 1
        assert asked[-1].split("base_model.model.")[1].startswith(next(iter(group))[:14])


def test_a_tensor_that_the_library_does_not_list_is_refused(tmp_path: Path) -> None:
    skeleton = plain_skeleton(tiny_model("llama"))
    with quiet_library(), pytest.raises(OutputError, match="saves no tensor extra of Llama"):
        weight_files.save(skeleton, [{"extra": torch.zeros(2)}], tmp_path / "first")
    with quiet_library(), pytest.raises(OutputError, match="tensors were not written, lm_head"):
        weight_files.save(skeleton, [], tmp_path / "second")


def test_a_tokenizer_that_reads_back_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        save.AutoTokenizer, "from_pretrained", lambda path: tiny_tokenizer("llama3", adds_bos=False)
    )
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["say it again"])
    with pytest.raises(OutputError, match="gives other ids"):
        saved(tiny_model("qwen2", vocab_size=ROWS), tmp_path / "model", tokenizer=tokenizer)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        saved(tiny_model("qwen2", vocab_size=ROWS), tmp_path / "file" / "model")


def loaded_from(directory: Path) -> PreTrainedModel:
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(vision_config("idefics3"))
    model.name_or_path = str(directory)
    assert isinstance(model, PreTrainedModel)
    return model


def test_files_are_copied_as_they_are(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    out.mkdir()
    save_processor("idefics3", base)
    (base / "chat_template.json").write_text("{}")  # the library would take it for the one in use
    copy_processor(loaded_from(base), out, has_template=True)
    assert {file.name for file in out.iterdir()} == {
        "preprocessor_config.json",
        "processor_config.json",
    }
    for file in out.iterdir():
        assert file.read_bytes() == (base / file.name).read_bytes()


def test_a_template_among_the_settings_stays_behind(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    out.mkdir()
    save_processor("idefics3", base)
    said = json.loads((base / "processor_config.json").read_text())
    (base / "processor_config.json").write_text(json.dumps({**said, "chat_template": "old"}))
    copy_processor(loaded_from(base), out, has_template=True)
    assert json.loads((out / "processor_config.json").read_text()) == said


def test_without_files_nothing_can_be_saved(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    with pytest.raises(OutputError, match=r"base has no preprocessor_config.json any more"):
        copy_processor(loaded_from(tmp_path / "base"), tmp_path, has_template=True)


def test_a_model_that_takes_no_pictures_needs_none(tmp_path: Path) -> None:
    copy_processor(tiny_model("llama"), tmp_path, has_template=True)
    assert not list(tmp_path.iterdir())
