"""Training a tower changes nothing but who pays: activations computed again give the same gradients, and what no
feature depends on is found.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.helpers.vision_models import FAMILIES
from tests.helpers.vision_samples import Drawn, Seeing
from torch import Tensor, nn

from taut.data.packing import ALONE, pack
from taut.models import architecture
from taut.models.recompute import recompute_activations

UNREAD = {
    "llava_onevision": {"model.vision_tower.post_layernorm." + it for it in ("weight", "bias")}
}


@pytest.mark.parametrize("kind", [*FAMILIES, "qwen3_5"])
def test_the_tower_computed_again_has_the_same_gradients(kind: str, tmp_path: Path) -> None:
    seeing = Seeing.of(kind, tmp_path)
    model = architecture.unwrap(seeing.scorer.model)
    assert set(architecture.freeze_unused(model)) == UNREAD.get(kind, set())
    kept = gradients(seeing)
    recompute_activations(model, how=True)
    entered = count_entries(tower_block(model))
    again = gradients(seeing)
    assert len(entered) == 2  # forward, and once more in backward
    assert again.keys() == kept.keys()
    assert {architecture.part_of(name) for name in kept} == set(architecture.PARTS)
    for name, gradient in again.items():
        torch.testing.assert_close(gradient, kept[name], rtol=1e-12, atol=1e-13)


def gradients(seeing: Seeing) -> dict[str, Tensor]:
    """Of every parameter that trains; all have one."""
    sample = seeing.sample("a", ["What is it? ", Drawn(0, 20, 12), " A cat."])
    model = seeing.scorer.model
    model.zero_grad()
    seeing.scorer(pack([sample], ALONE)).logp_N.sum().backward()
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            found[name] = parameter.grad.clone()
    return found


def tower_block(model: nn.Module) -> nn.Module:
    """The first of the tower's blocks."""
    lists = {
        name: it
        for name, it in model.named_modules()
        if isinstance(it, nn.ModuleList) and architecture.part_of(name) == "vision_tower"
    }
    return next(iter(lists.values()))[0]


def count_entries(module: nn.Module) -> list[None]:
    """Grows by one whenever a norm in the block is called: the block itself is entered once."""
    entered: list[None] = []
    norm = next(it for name, it in module.named_modules() if "norm" in name)
    norm.register_forward_hook(lambda *_: entered.append(None))
    return entered
