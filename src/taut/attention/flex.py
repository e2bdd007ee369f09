"""Attention through ``torch.nn.attention.flex_attention`` (compiled on CUDA; on the CPU eager, for small inputs).

The layout's ``mask_mod`` says what is visible, a ``score_mod`` applies the softcap, and sinks are applied afterwards:
a sink takes the share 1 - sigmoid(lse - sink) of the softmax, so the output is scaled by sigmoid(lse - sink).

Shapes: q [1, H, T, K], k and v [1, Hkv, T, K] -> out [1, H, T, K].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from taut.attention.layout import Call, Layout


def attend(query: Tensor, key: Tensor, value: Tensor, layout: Layout, call: Call) -> Tensor:
    """One layer's attention; see the module docstring for shapes."""
    out, aux = _kernel(query.device.type)(
        query,
        key,
        value,
        score_mod=None if call.softcap is None else _softcap(call.softcap),
        block_mask=_block_mask(layout, call.window, query.device),
        scale=call.scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if call.sinks is not None:
        share = torch.sigmoid(aux.lse - call.sinks.view(1, -1, 1).to(aux.lse.dtype))
        out = out * share.unsqueeze(-1).to(out.dtype)
    result: Tensor = out
    return result


def _softcap(cap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(score / cap) * cap

    return score_mod


def _block_mask(layout: Layout, window: int | None, device: torch.device) -> BlockMask:
    """The layout's mask in blocks, made once per micro-batch and window."""
    masks = layout.cache
    if ("flex", window) not in masks:
        num_tokens = layout.reach_T.size
        masks["flex", window] = create_block_mask(
            layout.mask_mod(window), None, None, num_tokens, num_tokens, device=str(device)
        )
    block_mask: BlockMask = masks["flex", window]
    return block_mask


@cache
def _kernel(device_type: str) -> Callable[..., Any]:
    eager: Callable[..., Any] = flex_attention
    return torch.compile(eager, dynamic=True) if device_type == "cuda" else eager
