"""Layers whose state follows the layout: the library's numbers on a sample, and no stand-in for another function."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.tiny_models import FOLLOWING, LEAKING, STATEFUL, tiny_model
from torch import Tensor, nn

from taut.attention.layout import Layout
from taut.models import architecture, recurrent_layers

TOKENS = torch.arange(150) * 7 % 97


def states(model: nn.Module) -> Tensor:
    layout = Layout(np.full(TOKENS.numel(), TOKENS.numel()))
    positions = torch.arange(TOKENS.numel())
    return architecture.hidden_states(model, TOKENS, positions, layout)


@pytest.mark.parametrize("name", FOLLOWING)
def test_a_sample_alone_is_the_librarys(name: str) -> None:
    """The library computes the rule in float32: in float64 it is that far from ours."""
    model = tiny_model(name, attention="taut_reference", dtype=torch.float32, sharpen=False)
    with torch.no_grad():
        ours = states(model)
        model.set_attn_implementation("eager")
        theirs = model.model(input_ids=TOKENS[None], use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", STATEFUL)
def test_layers_are_known_by_whether_their_state_follows(name: str) -> None:
    model = tiny_model(name, attention="taut_reference")
    leaking = architecture.leaking_layers(model)
    assert leaking == (architecture.stateful_layers(model) if name in LEAKING else [])
    assert architecture.leaking_layers(tiny_model(name)), "before install"


def mixer(model: nn.Module) -> nn.Module:
    return next(
        module
        for module in model.modules()
        if "torch_chunk_gated_delta_rule" in inspect.unwrap(type(module).forward).__code__.co_names
    )


def test_a_function_that_computes_something_else_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("qwen3_5_text")
    names = inspect.unwrap(type(mixer(model)).forward).__globals__
    library = names["torch_chunk_gated_delta_rule"]

    def shifted(*args: Any, **named: Any) -> tuple[Tensor, None]:
        return library(*args, **named)[0] + 1e-3, None

    monkeypatch.setitem(names, "torch_chunk_gated_delta_rule", shifted)
    recurrent_layers.install(model)
    assert not recurrent_layers.follows_layout(mixer(model))
    assert architecture.leaking_layers(model) == ["layers.0 (linear_attention)"]


def test_others_keep_the_librarys_functions() -> None:
    plain = tiny_model("qwen3_5_text")
    tiny_model("qwen3_5_text", attention="taut_reference")
    names = inspect.unwrap(type(mixer(plain)).forward).__globals__
    assert names["torch_chunk_gated_delta_rule"].__module__.startswith("transformers")
    assert "forward" not in vars(mixer(plain))
