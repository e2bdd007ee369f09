"""Attention through ``torch.nn.attention.varlen.varlen_attn`` (FlashAttention inside torch; CUDA, 16-bit).

A segment is one entry of the variable-length batch: its queries are contiguous, its keys are gathered along its path
(ancestors, then itself) and the causal mask is aligned to the bottom right, so a branch is a short q against a longer
k. Where no prefix is shared nothing is gathered. The kernel's left window does not count the token itself:
the library's W becomes W - 1. Keys and values are gathered again in backward; only the index is kept.

Softcaps, sinks and two-way blocks are refused (``select.py`` chooses flex for them).
Shapes: q [1, H, T, K], k and v [1, Hkv, T, K] -> out [1, H, T, K].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from taut.attention.layout import Call, Layout
from taut.errors import AttentionError


def attend(query: Tensor, key: Tensor, value: Tensor, layout: Layout, call: Call) -> Tensor:
    """One layer's attention; see the module docstring for shapes. Raises AttentionError for unsupported calls."""
    if call.softcap is not None or call.sinks is not None or layout.last_T is not None:
        raise AttentionError(
            "attention=varlen found a softcap, sinks or a two-way block in this model; the varlen kernel has none of "
            "them; set attention=flex"
        )
    query, key, value = (heads.squeeze(0).transpose(0, 1) for heads in (query, key, value))
    if layout.is_flat:
        out = _kernel_on(query, key, value, layout, call)
    else:
        out = checkpoint(
            _gathered,
            query,
            key,
            value,
            layout,
            call,
            use_reentrant=False,
            preserve_rng_state=False,
        )
    return out.transpose(0, 1).unsqueeze(0)


def _gathered(query: Tensor, key: Tensor, value: Tensor, layout: Layout, call: Call) -> Tensor:
    index = layout.key_index
    return _kernel_on(query, key.index_select(0, index), value.index_select(0, index), layout, call)


def _kernel_on(query: Tensor, key: Tensor, value: Tensor, layout: Layout, call: Call) -> Tensor:
    """q [T, H, K], k and v [sum of path lengths, Hkv, K] -> [T, H, K]."""
    from torch.nn.attention.varlen import varlen_attn

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
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, torch.Tensor)
    return out
