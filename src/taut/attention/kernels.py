"""Attention through torch's kernels for trees and packs: variable lengths, and blocks of a mask.

``varlen`` is ``torch.nn.attention.varlen.varlen_attn`` (FlashAttention inside torch; CUDA, 16-bit). A segment is one
entry of the variable-length batch: its queries are contiguous, its keys are gathered along its path (ancestors, then
itself) and the causal mask is aligned to the bottom right, so a branch is a short q against a longer k. Where no prefix
is shared nothing is gathered. The kernel's left window does not count the token itself: the library's W becomes W - 1.
Keys and values are gathered again in backward; only the index is kept. Softcaps, sinks and two-way blocks are refused
(models/attention_backends.py chooses flex for them).

``flex`` is ``torch.nn.attention.flex_attention`` (compiled on CUDA; on the CPU eager, for small inputs). The layout's
``mask_mod`` defines what is visible, a ``score_mod`` applies the softcap, and sinks are applied afterwards: a sink
takes the share 1 - sigmoid(lse - sink) of the softmax, so the output is scaled by sigmoid(lse - sink).

Shapes: q [1, H, T, K], k and v [1, Hkv, T, K] -> out [1, H, T, K].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from taut import capabilities
from taut.attention.layout import Call, Layout
from taut.errors import AttentionError


def varlen(query: Tensor, key: Tensor, value: Tensor, layout: Layout, call: Call) -> Tensor:
    """One layer's attention; see the module docstring for shapes. Raises AttentionError for unsupported calls."""
    from torch.nn.attention.varlen import varlen_attn

    if call.softcap is not None or call.sinks is not None or layout.last_T is not None:
        raise AttentionError(
            "attention=varlen found a softcap, sinks or a two-way block in this model; the varlen kernel has none of "
            "them; set attention=flex"
        )

    takes_fewer = capabilities.lack("varlen attention with fewer key heads") is None

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """q [T, H, K], k and v [T, Hkv, K] -> [T, H, K]."""
        if not layout.is_flat:
            key, value = (heads.index_select(0, layout.key_index) for heads in (key, value))
        groups = query.shape[1] // key.shape[1]
        options: dict[str, Any] = {"enable_gqa": groups > 1} if takes_fewer else {}
        if groups > 1 and not takes_fewer:
            key, value = (heads.repeat_interleave(groups, 1) for heads in (key, value))
        out = varlen_attn(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            layout.cu_seqlens_q,
            layout.cu_seqlens_k,
            layout.max_seqlen_q,
            layout.max_seqlen_k,
            scale=call.scale,
            window_size=(-1 if call.window is None else call.window - 1, 0),
            **options,
        )
        assert isinstance(out, torch.Tensor)
        return out

    heads = [heads.squeeze(0).transpose(0, 1) for heads in (query, key, value)]
    if layout.is_flat:
        out = attend(*heads)
    else:
        out = checkpoint(attend, *heads, use_reentrant=False, preserve_rng_state=False)
    return out.transpose(0, 1).unsqueeze(0)


def flex(query: Tensor, key: Tensor, value: Tensor, layout: Layout, call: Call) -> Tensor:
    """One layer's attention; see the module docstring for shapes."""
    cap = 1.0 if call.softcap is None else call.softcap

    def capped(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(score / cap) * cap

    masks = layout.cache  # a mask is made once per micro-batch and window
    if ("flex", call.window) not in masks:
        num_tokens, device = layout.reach_T.size, str(query.device)
        masks["flex", call.window] = create_block_mask(
            layout.mask_mod(call.window), None, None, num_tokens, num_tokens, device=device
        )
    out, aux = _flex_kernel(query.device.type)(
        query,
        key,
        value,
        score_mod=None if call.softcap is None else capped,
        block_mask=masks["flex", call.window],
        scale=call.scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if call.sinks is not None:
        share = torch.sigmoid(aux.lse - call.sinks.view(1, -1, 1).to(aux.lse.dtype))
        out = out * share.unsqueeze(-1).to(out.dtype)
    result: Tensor = out
    return result


@cache
def _flex_kernel(device_type: str) -> Callable[..., Any]:
    eager: Callable[..., Any] = flex_attention
    return torch.compile(eager, dynamic=True) if device_type == "cuda" else eager
