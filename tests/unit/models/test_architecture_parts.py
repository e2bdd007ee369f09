"""The parts of every family by name, and the parameters that patterns mean."""

from __future__ import annotations

import pytest
import torch
from tests.models import tiny_model
from tests.vision_models import FAMILIES, vision_config
from torch import nn
from transformers import AutoModelForImageTextToText

from taut.errors import ModelError
from taut.models import architecture
from taut.models.load import freeze

PROJECTORS = {
    "qwen2_vl": {"model.visual.merger"},
    "qwen2_5_vl": {"model.visual.merger"},
    "qwen3_vl": {"model.visual.merger", "model.visual.deepstack_merger_list"},
    "internvl": {"model.multi_modal_projector"},
    "idefics3": {"model.connector"},
    "smolvlm": {"model.connector"},
    "llava_onevision": {"model.image_newline", "model.multi_modal_projector"},
    "gemma3": {"model.multi_modal_projector"},
}


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
    named = architecture.assign_patterns(model, ["projector", "lm_head.weight"], "optim.rates")
    assert set(named.values()) == {"projector", "lm_head.weight"}
    assert all(name.startswith("model.visual.merger") for name in named if "lm_head" not in name)
    with pytest.raises(ModelError, match=r"optim.rates: 'vision_tower' matches no parameter that"):
        architecture.assign_patterns(model, ["vision_tower"], "optim.rates")
    with pytest.raises(ModelError, match=r"is matched by 'projector' and by '\*merger\*'"):
        architecture.assign_patterns(model, ["projector", "*merger*"], "optim.rates")
