"""Adapters on the parts of vision-language models: which, saved, merged, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.vision_models import vision_model
from torch import nn

from taut.errors import ModelError
from taut.models import architecture
from taut.models.load import quiet_library
from taut.models.lora import (
    LoraConfig,
    apply_lora,
    describe_targets,
    plain_model,
    save_adapter,
)
from taut.models.noise import NoiseConfig, install_noise


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
    with pytest.raises(ModelError, match=r"lora.dropout=0.1, and .* is of the vision_tower"):
        install_noise(model, NoiseConfig(), 0)
