"""Faults of attention: what a kernel, a model or its code does wrong."""

from __future__ import annotations

from typing import Any

import torch
from tests.checks.planting import Place, fault
from torch import Tensor
from transformers.models.qwen2 import modeling_qwen2

from taut.attention import select
from taut.attention.layout import Layout
from taut.checks.session import Session


@fault("attention.calls", says="called reference")
def a_layer_with_attention_of_its_own(place: Place, is_faulty: bool) -> Session:
    """The last layer computes attention by itself and never looks at the interface."""
    forward = modeling_qwen2.Qwen2Attention.forward

    def own(self: Any, hidden_states: Tensor, **keywords: Any) -> tuple[Tensor, None]:
        if self.layer_idx < 1:
            return forward(self, hidden_states, **keywords)  # type: ignore[return-value]
        heads = hidden_states.new_zeros(1, hidden_states.shape[1], self.o_proj.in_features)
        return self.o_proj(heads), None

    if is_faulty:
        place.patch.setattr(modeling_qwen2.Qwen2Attention, "forward", own)
    return place.session()


def _reaching(place: Place, change: Any) -> None:
    """Every attention call is given a layout that has been changed."""
    plain = select.BACKENDS["reference"]

    def wrong(query: Any, key: Any, value: Any, layout: Layout, call: Any) -> Tensor:
        return plain(query, key, value, change(layout), call)

    place.patch.setitem(select.BACKENDS, "reference", wrong)


@fault("attention.neighbour", says="first seen after")
def one_sequence_of_all_samples(place: Place, is_faulty: bool) -> Session:
    """The kernel is told nothing of where samples begin: F5's packing without boundaries."""
    if is_faulty:
        _reaching(
            place,
            lambda layout: Layout(torch.full((layout.num_tokens,), layout.num_tokens).numpy()),
        )
    return place.session()
