"""Adapters, on language and vision-language models: what trains, what is refused, and adapter = merged = reloaded."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.refusals import ErrorCode, refused
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_models import (
    logits_of,
    parameters_of,
    plain_model,
    tiny_model,
    with_weights_of,
)
from tests.helpers.vision_models import vision_model
from torch import Tensor, nn
from transformers import Qwen2ForCausalLM

from taut.attention.layout import Layout
from taut.config import from_mapping
from taut.data.packing import ALONE, pack
from taut.errors import ModelError
from taut.models import architecture, heads
from taut.models.attention_backends import PREFIX
from taut.models.load import quiet_library
from taut.models.lora.adapters import apply_lora, describe_targets
from taut.models.lora.merge import save_adapter
from taut.models.noise import install_noise
from taut.models.scorer import Scorer
from taut.models.settings import LoraConfig, NoiseConfig
from taut.types import Sample


def trained(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def shake(model: nn.Module) -> nn.Module:
    """Give every trainable parameter a value that is not its first, so that an adapter does
    something.
    """
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.1 * draw.to(parameter.dtype))
    return model


def test_rank_zero_is_the_model_itself() -> None:
    model = tiny_model("llama")
    assert apply_lora(model, LoraConfig()) is model


def test_only_adapters_train_and_every_one_gets_a_gradient() -> None:
    model = shake(apply_lora(tiny_model("llama"), LoraConfig(rank=2)))
    assert len(trained(model)) == 2 * 7 * 2
    assert all("lora_" in name for name in trained(model))
    logits_of(model).square().sum().backward()
    graded = {
        n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0
    }
    assert graded == trained(model)


def test_a_fresh_adapter_changes_nothing_and_is_drawn_from_the_seed() -> None:
    base = tiny_model("qwen3")
    before = logits_of(base)
    model = apply_lora(base, LoraConfig(rank=2), seed=3)
    assert torch.equal(logits_of(model), before)
    again = apply_lora(tiny_model("qwen3"), LoraConfig(rank=2), seed=3)
    other = apply_lora(tiny_model("qwen3"), LoraConfig(rank=2), seed=4)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    drawn = [parameters_of(m)[name] for m in (model, again, other)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_the_scale_is_alpha_over_rank_or_its_root() -> None:
    for settings, scale in (
        ({}, 2.0),
        ({"alpha": 3.0}, 0.75),
        ({"alpha": 3.0, "rslora": True}, 1.5),
    ):
        model = apply_lora(tiny_model("llama"), LoraConfig(rank=4, **settings))
        scales = [m.scaling for m in model.modules() if hasattr(m, "lora_A")]
        found = {value for scaling in scales for value in scaling.values()}
        assert found == {scale}


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("qwen2", {}),
    ("gemma2", {"rslora": True}),
    ("llama", {"dora": True}),
    ("phi3", {"targets": ["qkv_proj"]}),
    ("qwen3_moe", {"targets": ["q_proj", "o_proj"]}),
    ("llama", {"targets": ["layers[-1:].mlp.*"]}),
    ("gemma2", {"init": "pissa", "rslora": True}),
    ("qwen2", {"init": "olora", "rows": {"model.embed_tokens": [5, 90]}}),
    ("qwen2", {"modules_to_save": ["embed_tokens"]}),
    ("llama", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    ("llama", {"modules_to_save": ["lm_head"], "dropout": 0.1}),
    ("qwen2", {"rows": {"model.embed_tokens": [5, 90]}}),
    ("gemma2", {"rows": {"model.embed_tokens": [5, 90]}}),
    ("llama", {"rows": {"model.embed_tokens": [5, 90], "lm_head": [5, 90]}}),
    ("granite", {"rows": {"lm_head": [90, 5]}, "modules_to_save": ["embed_tokens"]}),
]


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
def test_adapter_equals_merged_equals_reloaded(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    base = tiny_model(name)
    before = logits_of(base)
    rows = settings.get("rows")
    settings = {key: value for key, value in settings.items() if key != "rows"}
    model = shake(apply_lora(base, LoraConfig(rank=2, **settings), rows=rows)).eval()
    adapted = logits_of(model)
    assert (adapted - before).abs().max() > 1e-3
    frozen = parameters_of(model)
    plain = plain_model(model)
    plain.save_pretrained(tmp_path / "merged")
    save_adapter(model, tmp_path / "adapter")
    named = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert named == sorted(named), "the file is the same whatever the process"
    read = type(base).from_pretrained(tmp_path / "merged", dtype=torch.float64)
    merged = with_weights_of(read, name)
    assert (logits_of(merged) - adapted).abs().max() < 1e-12
    again = apply_lora(tiny_model(name), LoraConfig(adapter=str(tmp_path / "adapter"))).eval()
    assert (logits_of(again) - adapted).abs().max() < 1e-12
    assert trained(again) == trained(model)
    assert all(torch.equal(value, frozen[key]) for key, value in parameters_of(model).items())
    assert torch.equal(logits_of(model), adapted)


def test_merging_reads_a_state_dict_that_is_given() -> None:
    model = shake(apply_lora(tiny_model("llama"), LoraConfig(rank=2))).eval()
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    expected = plain_model(model).state_dict()
    shake(model)
    found = plain_model(model, lambda _: whole.items()).state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_tied_embedding_trained_whole_stays_tied_to_the_head() -> None:
    config = LoraConfig(rank=2, modules_to_save=["embed_tokens"])
    model = apply_lora(tiny_model("qwen2"), config)
    assert architecture.is_tied(model)
    assert architecture.head(model).weight.requires_grad
    assert architecture.is_tied(plain_model(shake(model)))


def test_the_head_is_honored_when_it_is_trained_whole() -> None:
    model = apply_lora(tiny_model("llama"), LoraConfig(rank=2, modules_to_save=["lm_head"]))
    shake(model)
    assert architecture.head(model).weight.requires_grad
    assert heads.check_head(model) < 1e-12


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("llama", {"targets": ["q_prj"]}, r"'q_prj' matches no linear module; did you mean q_proj"),
        ("llama", {"targets": ["q_proj", "lm_head"]}, "'lm_head' is the output head"),
        ("llama", {"modules_to_save": ["embed"]}, r"'embed' matches no module; did you mean"),
        ("qwen2", {"modules_to_save": ["lm_head"]}, "tied to the embedding; name the embedding"),
    ],
)
def test_what_would_not_be_honored_is_refused(
    name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        apply_lora(tiny_model(name), LoraConfig(rank=2, **settings))


def test_all_linear_leaves_the_head_out() -> None:
    model = apply_lora(tiny_model("llama"), LoraConfig(rank=2))
    assert not any("lm_head" in name for name in trained(model))


def test_an_adapter_directory_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no adapter_config"):
        apply_lora(tiny_model("llama"), LoraConfig(adapter=str(tmp_path)))
    save_adapter(apply_lora(tiny_model("llama"), LoraConfig(rank=2)), tmp_path)
    wider = tiny_model("llama", hidden_size=64)
    with pytest.raises(ModelError, match="does not fit this model"):
        apply_lora(wider, LoraConfig(adapter=str(tmp_path)))
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    (tmp_path / "adapter_model.safetensors").write_text(pointer)
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors is a git-lfs pointer"):
        apply_lora(tiny_model("llama"), LoraConfig(adapter=str(tmp_path)))
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no adapter_model"):
        apply_lora(tiny_model("llama"), LoraConfig(adapter=str(tmp_path)))


@pytest.mark.parametrize("setting", ["dropout", "dora"])
def test_what_experts_cannot_have_is_refused(setting: str) -> None:
    value = {"dropout": 0.1, "dora": True}[setting]
    with pytest.raises(ModelError, match=rf"peft puts no such adapters on Qwen3Moe.*{setting}"):
        apply_lora(tiny_model("qwen3_moe"), from_mapping(LoraConfig, {"rank": 4, setting: value}))


def test_settings_that_would_be_ignored_are_refused() -> None:
    for settings, code in (
        ({"dropout": 0.1}, "dropout/rank"),
        ({"adapter": "a", "alpha": 2.0}, "alpha/adapter"),
        ({"adapter": "a", "rank": 2}, "rank/adapter"),
    ):
        with refused(ErrorCode(code)):
            from_mapping(LoraConfig, settings)


def made_elsewhere(name: str, directory: Path, **settings: Any) -> nn.Module:
    """An adapter that taut would not make, saved, with its model."""
    config = peft.LoraConfig(r=2, target_modules=settings.pop("targets", ["q_proj"]), **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = shake(peft.get_peft_model(tiny_model(name), config)).eval()
    save_adapter(model, directory)
    return model


def test_an_adapter_that_parted_head_and_embedding_is_merged_apart(tmp_path: Path) -> None:
    """The head of a tied model was trained whole: merged and tied again it would be lost (FAILURES
    29).
    """
    expected = logits_of(made_elsewhere("qwen2", tmp_path / "adapter", modules_to_save=["lm_head"]))
    model = apply_lora(tiny_model("qwen2"), LoraConfig(adapter=str(tmp_path / "adapter"))).eval()
    assert (logits_of(model) - expected).abs().max() < 1e-12
    plain_model(model).save_pretrained(tmp_path / "merged")
    read = Qwen2ForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    assert not architecture.is_tied(read)
    merged = with_weights_of(read, "qwen2", tie_word_embeddings=False)
    assert (logits_of(merged) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_adapter_of_the_head_or_the_embedding_is_refused(target: str, tmp_path: Path) -> None:
    made_elsewhere("llama", tmp_path, targets=["q_proj", target])
    with pytest.raises(ModelError, match="which taut trains whole, by rows or not at all"):
        apply_lora(tiny_model("llama"), LoraConfig(adapter=str(tmp_path)))


ROWS = {
    "qwen2": {"model.embed_tokens": [5, 90]},
    "gemma2": {"model.embed_tokens": [5, 90]},
    "llama": {"model.embed_tokens": [5, 90], "lm_head": [5, 90]},
}
SAMPLE_IDS = [5, 7, 90, 3, 5, 90, 11, 5]


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("is_linear", [True, False])
def test_rows_have_the_gradients_of_the_librarys_own_forward(name: str, is_linear: bool) -> None:
    """taut's way (rows looked up, chunked head) against peft's (whole tables copied) and autograd."""
    results = []
    for is_ours in (True, False):
        model = tiny_model(name, attention=PREFIX + "reference")
        model = shake(apply_lora(model, LoraConfig(rank=2), rows=ROWS[name]))
        if is_ours:
            total, logp_N = ours(model, is_linear)
        else:
            del architecture.embedding(model).token_adapter.forward_adapters
            total, logp_N = theirs(model)
        total.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        assert all(grad is not None and grad.any() for grad in grads.values())
        results.append((logp_N, grads))
    torch.testing.assert_close(*results, rtol=0, atol=1e-9)


WEIGHTS = torch.linspace(1, 2, len(SAMPLE_IDS) - 1, dtype=torch.float64)


def ours(model: nn.Module, is_linear: bool) -> tuple[Tensor, Tensor]:
    ids_T = np.asarray(SAMPLE_IDS)
    sample = Sample("a", ids_T, np.arange(1, ids_T.size), np.ones(ids_T.size - 1))
    scores = Scorer(model)(pack([sample], ALONE), WEIGHTS if is_linear else None)
    total = scores.linear_sum if is_linear else (WEIGHTS * scores.logp_N).sum()
    return total, scores.logp_N.detach()


def theirs(model: nn.Module) -> tuple[Tensor, Tensor]:
    ids = torch.tensor(SAMPLE_IDS)
    layout = Layout(np.full(ids.numel(), ids.numel()))
    logits_TV = model(input_ids=ids[None], use_cache=False, taut_layout=layout).logits[0]
    logp_TV = logits_TV[:-1].log_softmax(-1)
    logp_N = logp_TV.gather(1, ids[1:, None])[:, 0]
    return (WEIGHTS * logp_N).sum(), logp_N.detach()


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_part_of_the_head_and_can_be_switched_off(name: str) -> None:
    base = tiny_model(name)
    before = logits_of(base)
    model: Any = shake(apply_lora(base, LoraConfig(rank=2), rows=ROWS[name]))
    assert architecture.is_tied(model) == (name != "llama")
    assert architecture.head(model).rows is not None
    assert heads.check_head(model) < 1e-12
    with model.disable_adapter():
        assert architecture.head(model).rows is None
        assert torch.equal(logits_of(model), before)
    assert not torch.equal(logits_of(model), before)


def test_an_adapter_that_trains_rows_of_one_table_apart_is_refused(tmp_path: Path) -> None:
    made_elsewhere("qwen2", tmp_path, trainable_token_indices={"lm_head": [3]})
    with pytest.raises(ModelError, match="apart, which are one table"):
        apply_lora(tiny_model("qwen2"), LoraConfig(adapter=str(tmp_path)))


SAVED: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {}),
    "dora": ("llama", {"dora": True}),
    "trained whole": ("llama", {"modules_to_save": ["lm_head"]}),
    "tied, trained whole": ("qwen2", {"modules_to_save": ["embed_tokens"]}),
    "rows": ("llama", {"rows": {"model.embed_tokens": [5, 90], "lm_head": [5, 90]}}),
    "tied rows": ("qwen2", {"rows": {"model.embed_tokens": [5, 90]}}),
}


def saved_adapter(case: str, directory: Path) -> tuple[str, Path]:
    """A base model's name, and the file of an adapter of it that says something."""
    name, settings = SAVED[case]
    rows = settings.get("rows")
    settings = {key: value for key, value in settings.items() if key != "rows"}
    model = apply_lora(tiny_model(name), LoraConfig(rank=2, **settings), rows=rows)
    save_adapter(shake(model), directory)
    return name, directory / "adapter_model.safetensors"


@pytest.mark.parametrize("case", slow_except(["dora", "tied rows"], SAVED))
def test_each_tensor_of_an_adapter_must_be_there(case: str, tmp_path: Path) -> None:
    """One tensor taken out, whichever it is."""
    name, file = saved_adapter(case, tmp_path)
    whole = load_file(file)
    apply_lora(tiny_model(name), LoraConfig(adapter=str(tmp_path)))
    kinds = {re.sub(r"\d+", "N", key): key for key in whole}
    for key in kinds.values():
        save_file({other: whole[other] for other in whole if other != key}, file)
        with pytest.raises(ModelError, match=r"adapter_model\.safetensors lacks ") as raised:
            apply_lora(tiny_model(name), LoraConfig(adapter=str(tmp_path)))
        assert str(tmp_path) in str(raised.value) and key.removesuffix(".weight") in str(
            raised.value
        )


def test_the_tensors_an_adapter_lacks_are_counted(tmp_path: Path) -> None:
    name, file = saved_adapter("linear", tmp_path)
    whole = load_file(file)
    key = min(whole)
    save_file({key: whole[key]}, file)
    lacks = rf"lacks tensors for the model: {len(whole) - 1} of {len(whole)}, base_model\."
    with pytest.raises(ModelError, match=rf"^lora\.adapter={tmp_path}: .*{lacks}"):
        apply_lora(tiny_model(name), LoraConfig(adapter=str(tmp_path)))


def test_an_adapter_whose_layers_have_other_names_is_refused(tmp_path: Path) -> None:
    name, file = saved_adapter("linear", tmp_path)
    whole = load_file(file)
    save_file({key.replace(".layers.", ".h."): value for key, value in whole.items()}, file)
    both = rf"lacks tensors for the model: {len(whole)} of .* and has tensors that .* no place for: {len(whole)} of"
    with pytest.raises(ModelError, match=both):
        apply_lora(tiny_model(name), LoraConfig(adapter=str(tmp_path)))


def test_a_tensor_too_many_is_refused(tmp_path: Path) -> None:
    name, file = saved_adapter("linear", tmp_path)
    whole = load_file(file)
    key = next(key for key in whole if "layers.1." in key)
    save_file({**whole, key.replace("layers.1.", "layers.7."): whole[key].clone()}, file)
    with pytest.raises(
        ModelError, match=r"has tensors that the model has no place for: 1 of .*layers\.7\."
    ):
        apply_lora(tiny_model(name), LoraConfig(adapter=str(tmp_path)))


def test_an_adapter_that_brings_weights_of_the_base_is_refused(tmp_path: Path) -> None:
    name, file = saved_adapter("linear", tmp_path)
    weight = "base_model.model.model.norm.weight"
    norm = torch.zeros_like(tiny_model(name).get_parameter("model.norm.weight"))
    save_file({**load_file(file), weight: norm}, file)
    with pytest.raises(
        ModelError, match=r"has tensors of the base model: 1 of .*model\.norm\.weight"
    ):
        apply_lora(tiny_model(name), LoraConfig(adapter=str(tmp_path)))


def adapted_parts(model: nn.Module) -> str:
    return architecture.count_by_part(
        name for name, m in model.named_modules() if hasattr(m, "lora_A")
    )


def test_all_linear_is_the_language_model() -> None:
    config = LoraConfig(rank=2)
    model = apply_lora(vision_model("smolvlm"), config)
    value, reason = describe_targets(model, config)
    assert value == adapted_parts(model) == "14 in language_model"
    assert "name vision_tower or projector in lora.targets" in reason


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["vision_tower"], "8 in vision_tower"),
        (["projector"], "6 in projector"),
        (["q_proj", "/visual\\.blocks\\.0\\..*qkv/"], "1 in vision_tower, 3 in language_model"),
        (["*.linear_fc1"], "2 in vision_tower, 3 in projector"),
        (
            ["linear_fc2", "language_model"],
            "2 in vision_tower, 3 in projector, 21 in language_model",
        ),
    ],
)
def test_targets_name_parts_patterns_and_ends(targets: list[str], expected: str) -> None:
    assert adapted_parts(
        apply_lora(vision_model("qwen3_vl"), LoraConfig(rank=2, targets=targets))
    ) == (expected)


@pytest.mark.parametrize("kind", ["qwen3_vl", "llava_onevision"])
def test_an_adapter_is_saved_loaded_and_merged(kind: str, tmp_path: Path) -> None:
    """The saved names are the library's own: those of a model that it saves."""
    before = {name: value.clone() for name, value in vision_model(kind).state_dict().items()}
    config = LoraConfig(
        rank=2, targets=["vision_tower", "language_model"], modules_to_save=["projector"]
    )
    model = apply_lora(vision_model(kind), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    merged = plain_model(model)
    changed = {name for name, value in merged.state_dict().items() if not value.equal(before[name])}
    assert {architecture.part_of(name) for name in changed} == set(architecture.PARTS)
    save_adapter(model, tmp_path / "adapter")
    again = apply_lora(vision_model(kind), LoraConfig(adapter=str(tmp_path / "adapter")))
    for name, value in plain_model(again).state_dict().items():
        assert torch.equal(value, merged.state_dict()[name]), name
    with quiet_library():
        merged.save_pretrained(tmp_path / "merged")
        vision_model(kind).save_pretrained(tmp_path / "library")
    saved, theirs = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("merged", "library")
    )
    assert saved.keys() == theirs.keys()


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'projector' matches no linear module; train it whole"):
        apply_lora(vision_model("gemma3"), LoraConfig(rank=2, targets=["projector"]))
    config = LoraConfig(rank=2, dropout=0.1, targets=["vision_tower"])
    model = apply_lora(vision_model("qwen2_vl"), config)
    with pytest.raises(ModelError, match=r"lora.dropout=0.1 with .* of the vision_tower"):
        install_noise(model, NoiseConfig(), 0)
