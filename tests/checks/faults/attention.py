"""Faults of attention: what a kernel, a model or its code does wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tests.checks.planting import Place, fault
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen2 import modeling_qwen2

from taut.attention.layout import Call, Layout
from taut.checks.session import Session
from taut.models import attention_backends


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


@fault("attention.calls", says="sliding window of 5")
def a_window_no_layer_asks_for(place: Place, is_faulty: bool) -> Session:
    """The library masks with a window that the layers forget to pass on."""
    read = attention_backends.read_call

    def forgetful(module: Any, size: int, keywords: dict[str, Any]) -> Call:
        return read(module, size, {**keywords, "sliding_window": None})

    if is_faulty:
        place.patch.setattr(attention_backends, "read_call", forgetful)
    return place.session(place.model("mistral"))


@fault("attention.calls", says="neither causal nor its sliding window")
def chunked_attention(place: Place, is_faulty: bool) -> Session:
    """Llama 4's mask comes as no keyword: a kernel that reads keywords would attend to everything."""
    return place.session(place.model("llama4_text" if is_faulty else "llama"))


@fault("attention.future", says="first seen after")
def a_kernel_that_is_not_causal(place: Place, is_faulty: bool) -> Session:
    """An attention function registered without its mask function: the mask is dropped, and causality with it."""

    def everything(q: Tensor, k: Tensor, v: Tensor, layout: Layout, call: Call) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, scale=call.scale, enable_gqa=True)

    if is_faulty:
        place.patch.setitem(attention_backends.BACKENDS, "reference", everything)
    return place.session()


@fault("attention.future", says="looks ahead")
def a_layer_that_looks_one_token_ahead(place: Place, is_faulty: bool) -> Session:
    """A shifted residual: each token is given a little of the next one's."""
    forward = modeling_qwen2.Qwen2MLP.forward

    def ahead(self: Any, x: Tensor) -> Tensor:
        return forward(self, x) + 0.1 * x.roll(-1, dims=1)

    if is_faulty:
        place.patch.setattr(modeling_qwen2.Qwen2MLP, "forward", ahead)
    return place.session()


@fault("attention.state", says="with attention taken out")
def a_token_shift_nobody_declared(place: Place, is_faulty: bool) -> Session:
    """A layer mixes each token with the one before it (as RWKV does) and the config does not say so."""
    forward = modeling_qwen2.Qwen2MLP.forward

    def shifted(self: Any, x: Tensor) -> Tensor:
        return forward(self, x + 0.2 * functional.pad(x, (0, 0, 1, 0))[:, :-1])

    if is_faulty:
        place.patch.setattr(modeling_qwen2.Qwen2MLP, "forward", shifted)
    return place.session()


def _reaching(place: Place, change: Callable[[Layout], Layout]) -> None:
    """The kernel is given a layout that has been changed."""
    plain = attention_backends.BACKENDS["reference"]

    def wrong(query: Any, key: Any, value: Any, layout: Layout, call: Call) -> Tensor:
        return plain(query, key, value, change(layout), call)

    place.patch.setitem(attention_backends.BACKENDS, "reference", wrong)


@fault("attention.neighbor", says="first seen after")
def one_sequence_of_all_samples(place: Place, is_faulty: bool) -> Session:
    """The kernel is told nothing of where samples begin: packing without boundaries (F5)."""

    def joined(layout: Layout) -> Layout:
        return Layout(np.full(layout.num_tokens, layout.num_tokens))

    if is_faulty:
        _reaching(place, joined)
    return place.session()


@fault("attention.neighbor", says="attention=reference")
def boundaries_that_are_one_token_late(place: Place, is_faulty: bool) -> Session:
    """cu_seqlens off by one: the first token of a sample still belongs to the sample before it."""

    def late(layout: Layout) -> Layout:
        ends = {segment.reach for segment in layout.segments}
        bounds = sorted(min(end + 1, layout.num_tokens) for end in ends)
        reach_T = [next(end for end in bounds if end > at) for at in range(layout.num_tokens)]
        return Layout(np.array(reach_T))

    if is_faulty:
        _reaching(place, late)
    return place.session(batch__share_prefixes=False)


@fault("attention.positions", says="positions through the pack")
def positions_counted_by_the_model_itself(place: Place, is_faulty: bool) -> Session:
    """Position embeddings by arange over what comes in, whatever position_ids says."""
    forward = modeling_qwen2.Qwen2DecoderLayer.forward

    def counted(self: Any, hidden_states: Tensor, *args: Any, **keywords: Any) -> Any:
        if self.self_attn.layer_idx == 0:
            places = torch.arange(hidden_states.shape[1], dtype=hidden_states.dtype)
            hidden_states = hidden_states + 0.1 * (0.3 * places).sin()[None, :, None]
        return forward(self, hidden_states, *args, **keywords)

    if is_faulty:
        place.patch.setattr(modeling_qwen2.Qwen2DecoderLayer, "forward", counted)
    return place.session()


def _calling(place: Place, **changes: Any) -> None:
    """The kernel is called with something else than the layer asked for."""
    plain = attention_backends.BACKENDS["reference"]

    def wrong(query: Any, key: Any, value: Any, layout: Layout, call: Call) -> Tensor:
        return plain(query, key, value, layout, replace(call, **changes))

    place.patch.setitem(attention_backends.BACKENDS, "reference", wrong)


@fault("attention.packed", says="library's sdpa attention")
def a_kernel_that_drops_the_window(place: Place, is_faulty: bool) -> Session:
    """The layers ask for a sliding window and the kernel attends to all."""
    if is_faulty:
        _calling(place, window=None)
    return place.session(place.model("mistral"))


@fault("attention.packed", says="library's eager attention")
def a_kernel_that_drops_the_softcap(place: Place, is_faulty: bool) -> Session:
    """The layers ask for a softcap and the kernel knows none."""
    if is_faulty:
        _calling(place, softcap=None)
    return place.session(place.model("gemma2"))


@fault("attention.packed", says="attention=reference")
def key_heads_in_the_wrong_order(place: Place, is_faulty: bool) -> Session:
    """Grouped queries are given their key heads tiled where the model means them repeated."""
    plain = attention_backends.BACKENDS["reference"]

    def tiled(query: Tensor, key: Tensor, value: Tensor, layout: Layout, call: Call) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        return plain(
            query, key.repeat(1, groups, 1, 1), value.repeat(1, groups, 1, 1), layout, call
        )

    if is_faulty:
        place.patch.setitem(attention_backends.BACKENDS, "reference", tiled)
    return place.session()


@fault("attention.shared", says="share_prefixes=false")
def branches_that_see_each_other(place: Place, is_faulty: bool) -> Session:
    """What comes after a shared prefix is taken for one sequence, whatever branch it belongs to."""

    def merged(layout: Layout) -> Layout:
        reach_T = layout.reach_T.copy()
        for segment in layout.segments:
            if segment.parent >= 0:
                reach_T[segment.start : segment.stop] = layout.segments[segment.parent].reach
        return Layout(reach_T)

    if is_faulty:
        _reaching(place, merged)
    return place.session()


@fault("attention.library", says="eager and sdpa")
def a_library_kernel_with_another_scale(place: Place, is_faulty: bool) -> Session:
    """The library's eager attention and its fused one compute different models."""
    eager = modeling_qwen2.eager_attention_forward

    def louder(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **keywords: Any) -> Any:
        return eager(module, q, k, v, mask, **{**keywords, "scaling": 1.3 * keywords["scaling"]})

    if is_faulty:
        place.patch.setattr(modeling_qwen2, "eager_attention_forward", louder)
    return place.session()
