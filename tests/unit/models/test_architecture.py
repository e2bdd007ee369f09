"""Parts, heads, state and RoPE of twenty architectures; the parts of vision-language models, and patterns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers.tiny_models import CARRIED, REFUSED, STATEFUL, tiny_model
from tests.helpers.vision_models import FAMILIES, vision_config
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from taut.errors import ModelError
from taut.models import architecture, heads
from taut.models.load import freeze
from taut.models.lora.adapters import apply_lora
from taut.models.settings import LoraConfig

ALL = (*CARRIED, *STATEFUL, *REFUSED)


@pytest.mark.parametrize("name", ALL)
def test_parts_are_found_and_the_head_is_the_models_own(name: str) -> None:
    model = tiny_model(name)
    assert architecture.decoder(model) is model.model
    assert architecture.layers(model) is model.model.layers
    assert architecture.embedding(model) is model.model.embed_tokens
    assert architecture.is_tied(model) == model.config.tie_word_embeddings
    assert heads.check_head(model) < 1e-12
    num_stateful = len(architecture.stateful_layers(model))
    assert (num_stateful > 0) == (name in STATEFUL)
    assert architecture.attention_layer_count(model) == len(model.model.layers) - num_stateful
    assert len(architecture.layer_types(model)) == len(model.model.layers)


def test_head_of_each_kind() -> None:
    specs = {name: architecture.head(tiny_model(name)) for name in ("gemma2", "granite", "cohere2")}
    assert specs["gemma2"].softcap == 5.0
    assert specs["granite"].scale == pytest.approx(1 / 1.7)
    assert specs["cohere2"].scale == 0.3


def test_a_head_that_does_something_else_is_refused() -> None:
    model = tiny_model("llama")
    model.lm_head.register_forward_hook(lambda module, args, logits: logits + 1.0)
    with pytest.raises(ModelError, match="taut cannot score with this head"):
        heads.check_head(model)


def test_a_head_with_a_bias() -> None:
    model = tiny_model("llama")
    bias = torch.linspace(-1, 1, 97, dtype=torch.float64)
    model.lm_head.bias = torch.nn.Parameter(bias)
    assert architecture.head(model).bias is model.lm_head.bias
    assert heads.check_head(model) < 1e-12


def test_what_a_layout_does_not_describe() -> None:
    assert architecture.length_dependent_rope(tiny_model("phi3_longrope")) == ("longrope", 32)
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    assert architecture.length_dependent_rope(tiny_model("llama", rope_parameters=dynamic)) == (
        "dynamic",
        256,
    )
    assert architecture.length_dependent_rope(tiny_model("gemma3")) is None


def test_state_is_found_by_class_where_the_config_is_silent() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mixer = torch.nn.Conv1d(32, 32, 3)
    assert architecture.stateful_layers(model) == ["layers.1.mixer (Conv1d)"]


def test_a_peft_model_has_the_same_parts() -> None:
    model = tiny_model("llama")
    wrapped = apply_lora(model, LoraConfig(rank=2))
    assert architecture.decoder(wrapped) is model.model
    assert heads.check_head(wrapped) < 1e-12
    assert architecture.attention_layer_count(wrapped) == 2


def test_flops_by_hand() -> None:
    """llama: per layer q and o 32x32, k and v 32x16, three 32x48: 7,680 weights; 4 heads of 8;
    head 97 x 32.
    """
    model = tiny_model("llama")
    cost = architecture.flops(model)
    assert cost.per_token == 6 * 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    assert cost.per_pair == 12 * 2 * 4 * 8
    assert cost.per_target == 6 * 97 * 32
    assert (cost.per_window_pair, cost.window) == (0.0, None)
    windowed = architecture.flops(tiny_model("gemma2"))
    assert windowed.per_pair == windowed.per_window_pair == 12 * 4 * 16
    assert windowed.window == 5


def test_flops_of_layers_with_heads_of_different_sizes() -> None:
    cost = architecture.flops(tiny_model("gemma4_text"))
    assert cost.per_window_pair == 12 * 4 * (8 + 8)
    assert cost.per_pair == 12 * 4 * (16 + 16)
    assert cost.window == 5


def test_flops_count_active_experts_and_leave_out_gradients_of_frozen_weights() -> None:
    """qwen3_moe: q, o 32x64, k, v 32x32, router 4x32, and 2 of 4 experts of three 32x24."""
    model = tiny_model("qwen3_moe")
    weights = 2 * 32 * 64 + 2 * 32 * 32 + 4 * 32 + 2 * 3 * 32 * 24
    assert architecture.flops(model).per_token == 6 * 2 * weights
    model.requires_grad_(False)
    assert architecture.flops(model).per_token == 4 * 2 * weights


def test_names_match_as_globs_or_expressions() -> None:
    names = ["model.layers.0.mlp.up", "model.layers.1.mlp.up", "lm_head.weight"]
    model = tiny_model("llama")
    assert architecture.match_pattern(model, "*.mlp.*", names, "freeze") == names[:2]
    assert architecture.match_pattern(model, r"/layers\.1\./", names, "freeze") == [names[1]]
    with pytest.raises(ModelError, match="is not a regular expression"):
        architecture.match_pattern(model, "/(/", names, "freeze")
    assert architecture.suggest("mlp", names).startswith("did you mean '*mlp*' (2 names")


PROJECTORS = {
    "qwen2_vl": {"model.visual.merger"},
    "qwen2_5_vl": {"model.visual.merger"},
    "qwen3_vl": {"model.visual.merger", "model.visual.deepstack_merger_list"},
    "internvl": {"model.multi_modal_projector"},
    "idefics3": {"model.connector"},
    "smolvlm": {"model.connector"},
    "llava_onevision": {"model.image_newline", "model.multi_modal_projector"},
    "gemma3": {"model.multi_modal_projector"},
    "gemma4": {"model.embed_vision"},
}


def test_what_hears_sound_is_frozen_and_has_no_adapters() -> None:
    hearing = {
        "model_type": "gemma4_audio",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "output_proj_dims": 16,
        "subsampling_conv_channels": [4, 4],
    }
    config = vision_config("gemma4")
    fields = config.to_dict() | {"audio_config": hearing}
    fields.pop("model_type")
    build: Any = AutoModelForImageTextToText.from_config
    model = build(AutoConfig.for_model("gemma4", **fields))
    heard = {name for name, _ in model.named_parameters() if "audio" in name}
    assert len(heard) > 20
    assert {architecture.part_of(name) for name in heard} == {None}
    assert architecture.count_by_part(heard) == f"{len(heard)} in sound"
    assert set(architecture.freeze_unused(model)) == heard
    apply_lora(model, LoraConfig(rank=2))
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    assert trained
    assert not any("audio" in name for name in trained)


def skeleton(kind: str) -> nn.Module:
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(vision_config(kind))
    assert isinstance(model, nn.Module)
    return model


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_parameter_of_a_family_is_of_the_part_it_is_said_to_be(kind: str) -> None:
    model = skeleton(kind)
    decoder, head = model.model.get_decoder(), model.get_output_embeddings()
    language = {id(p) for module in (decoder, head) for p in module.parameters()}
    found: dict[str, set[str]] = {word: set() for word in architecture.PARTS}
    for name, parameter in model.named_parameters():
        part = architecture.part_of(name)
        assert part is not None
        assert (part == "language_model") == (id(parameter) in language), name
        found[part].add(name)
    assert all(any(name.startswith(p) for p in PROJECTORS[kind]) for name in found["projector"])
    for prefix in PROJECTORS[kind]:
        assert any(name.startswith(prefix) for name in found["projector"])
    towers = {".".join(name.split(".")[:2]) for name in found["vision_tower"]}
    assert len(towers) == 1
    assert freeze(model, ["vision_tower", "*.layers.0.*"])
    assert not any(
        p.requires_grad for n, p in model.named_parameters() if n in found["vision_tower"]
    )
    assert all(p.requires_grad for n, p in model.named_parameters() if n in found["projector"])


def test_what_a_wrapper_puts_around_a_name_changes_nothing() -> None:
    assert architecture.part_of(
        "base_model.model.model.visual.blocks.0.attn.qkv.lora_A.default.weight"
    ) == ("vision_tower")
    assert (
        architecture.part_of("model.visual.merger.modules_to_save.default.mlp.0.weight")
        == "projector"
    )
    assert architecture.part_of("base_model.model.lm_head.base_layer.weight") == "language_model"
    assert architecture.part_of("score.weight") is None


def test_a_model_without_pictures_has_no_such_parts() -> None:
    with pytest.raises(
        ModelError, match=r"freeze: 'vision_tower' is a part .* LlamaForCausalLM is"
    ):
        freeze(tiny_model("llama"), ["vision_tower"])


def test_parameters_are_named_once_and_train() -> None:
    model = skeleton("qwen2_vl")
    freeze(model, ["vision_tower"])
    named = architecture.assign_patterns(
        model, ["projector", "lm_head.weight"], "optim.group_learning_rates"
    )
    assert set(named.values()) == {"projector", "lm_head.weight"}
    assert all(name.startswith("model.visual.merger") for name in named if "lm_head" not in name)
    with pytest.raises(
        ModelError, match=r"optim.group_learning_rates: 'vision_tower' matches no parameter that"
    ):
        architecture.assign_patterns(model, ["vision_tower"], "optim.group_learning_rates")
    with pytest.raises(ModelError, match=r"is matched by 'projector' and by '\*merger\*'"):
        architecture.assign_patterns(model, ["projector", "*merger*"], "optim.group_learning_rates")
