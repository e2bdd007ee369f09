"""What layers keep for the backward pass: the same gradients, and the bytes and copies that each setting says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers.tiny_models import CARRIED, LEAKING, STATEFUL, tiny_model
from tests.helpers.tiny_samples import nested_family
from torch import Tensor, nn

from taut.data.packing import ALONE, PackPolicy, pack
from taut.errors import ConfigError
from taut.models import architecture
from taut.models.lora.adapters import apply_lora
from taut.models.recompute import (
    Offload,
    Recompute,
    applied,
    recompute_activations,
    require_possible,
)
from taut.models.scorer import Scorer
from taut.models.settings import ActivationCheckpointing, LoraConfig
from taut.plan.allocations import Allocations

HOWS: tuple[ActivationCheckpointing, ...] = (False, "selective", True, "offload")


def step(
    name: str, how: ActivationCheckpointing, *, adapts: bool = False
) -> tuple[dict[str, Tensor], int, nn.Module]:
    """A step's gradients, the bytes kept at the end of the forward, and the model."""
    base = tiny_model(name, attention="taut_reference")
    model = apply_lora(base, LoraConfig(rank=2), 0, {}) if adapts else base
    model.train()
    recompute_activations(model, how, is_pinned=False)
    family = nested_family(90)
    packed = pack(family[:1], ALONE) if name in LEAKING else pack(family, PackPolicy(True, 1))
    scorer = Scorer(model)
    with Allocations({"weights": [*scorer.parameters(), *scorer.buffers()]}) as allocations:
        total = scorer(packed).logp_N.sum()
        allocations.end_forward()
    history = allocations.history()
    total.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return gradients, int(history.bytes_MP[-1].sum()), model


@pytest.mark.parametrize("name", [*CARRIED, *STATEFUL])
def test_every_setting_has_the_same_gradients(name: str) -> None:
    expected, *_ = step(name, False)
    for how in HOWS[1:]:
        found, _, model = step(name, how)
        assert found.keys() == expected.keys()
        for key, gradient in found.items():
            torch.testing.assert_close(gradient, expected[key], rtol=1e-12, atol=1e-13)
        functions = [applied(layer) for layer in architecture.layers(model)]
        assert {function and function.how for function in functions} == {how}


@pytest.mark.parametrize("adapts", [False, True])
def test_each_setting_keeps_less_than_the_one_before(*, adapts: bool) -> None:
    (_, none, _), (_, some, _), (_, full, _), _ = (
        step("llama", how, adapts=adapts) for how in HOWS
    )
    assert none > 1.05 * some
    assert some > 1.15 * full


class Counting(Offload):
    """Keeps the order of what goes and comes."""

    def __init__(self) -> None:
        super().__init__("offload", is_pinned=False)
        self.events: list[tuple[str, int]] = []
        self.numbers: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Any:
        kept = super().pack(tensor)
        self.numbers[id(kept)] = len(self.numbers)
        self.events.append(("goes", self.numbers[id(kept)]))
        return kept

    def unpack(self, kept: Any) -> Tensor:
        self.events.append(("is taken", self.numbers[id(kept)]))
        return super().unpack(kept)

    def _fetch(self, kept: Any) -> Tensor:
        if kept.ahead is None:
            self.events.append(("comes", self.numbers[id(kept)]))
        return super()._fetch(kept)


def test_each_input_goes_once_and_comes_back_once_before_it_is_wanted() -> None:
    model = tiny_model("llama", attention="taut_reference", num_hidden_layers=3).train()
    recompute_activations(model, "offload", is_pinned=False)
    function = Counting()
    for layer in architecture.layers(model):
        vars(layer)["_gradient_checkpointing_func"] = function
    total = Scorer(model)(pack(nested_family(90), ALONE)).logp_N.sum()
    assert function.events == [("goes", 0), ("goes", 1), ("goes", 2)]
    function.events.clear()
    total.backward()
    assert function.events == [
        ("is taken", 2), ("comes", 2), ("comes", 1), ("is taken", 1), ("comes", 0), ("is taken", 0)
    ]  # fmt: skip


def test_what_is_kept_is_counted_and_read_back() -> None:
    _, _, model = step("llama", "selective")
    first = applied(architecture.layers(model)[0])
    assert isinstance(first, Recompute)
    # seven products, and attention's calls, in two layers; kept once, and not again in the backward pass
    assert first.num_kept >= 2 * 8
    assert applied(architecture.layers(tiny_model("llama"))[0]) is None


@pytest.mark.parametrize(
    ("how", "device", "attention", "compiles", "says"),
    [
        ("offload", "cpu", "reference", False, "on a CPU, whose memory is the host's"),
        ("selective", "cuda", "flex", False, "selective with attention=flex"),
        ("selective", "cpu", "reference", True, "selective with compile=true"),
        (True, "cpu", "reference", True, None),
        ("offload", "cuda", "flex", True, None),
        ("selective", "cuda", "varlen", False, None),
    ],
)
def test_what_would_do_nothing_is_refused(
    how: ActivationCheckpointing, device: str, attention: str, *, compiles: bool, says: str | None
) -> None:
    def require() -> None:
        require_possible(how, torch.device(device), attention, compiles=compiles)

    if says is None:
        require()
        return
    with pytest.raises(ConfigError, match=says):
        require()
