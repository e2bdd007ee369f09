"""Attention over trees and packs through FlexAttention: blocks of a mask, compiled on CUDA.

What is visible in a block of 128 queries and 128 keys follows from the least and the greatest reach and depth in it, on
the host: all of it, some of it (the mask is evaluated there) or nothing (left out). So nothing of size [T, T] exists. A
block that no rule decides counts as some of it. A ``score_mod`` applies the softcap, and sinks are applied afterwards:
a sink takes the share 1 - sigmoid(lse - sink) of the softmax, so the output is scaled by sigmoid(lse - sink).

The compiled function takes the micro-batch as tensors, and a window as depths: it is compiled once per kind of layer
(with a window or not, with two-way blocks or not, each softcap), never per micro-batch. It is one graph, so torch
raises where it would be compiled too often, instead of attending through a [T, T] matrix.

On the CPU it is eager, for small inputs, and has no backward.

Shapes: q [1, H, T, K], k and v [1, Hkv, T, K] -> out [1, H, T, K].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from taut.attention.layout import Call, Layout
from taut.types import to_device

BLOCK = 128
"""Queries and keys of a block."""

MOST_KINDS = 32
"""Compiled versions: kinds of layers, with a gradient or not, in a micro-batch of one block or several."""


class Blocks(NamedTuple):
    """int32, as in torch's ``BlockMask``: of each query block (kv) the key blocks that it sees in part and in full, and
    of each key block (q) the query blocks that see it; counts [1, 1, blocks], and lists [1, 1, blocks, blocks].
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor


class Mask(NamedTuple):
    """The tensors from which a micro-batch's mask is computed, for one window."""

    reach_T: Tensor
    last_T: Tensor | None
    depths: tuple[Tensor, Tensor] | None
    """With a window: the depth of each token [T], and the least that it sees [T]."""
    blocks: Blocks


def attend(query: Tensor, key: Tensor, value: Tensor, layout: Layout, call: Call) -> Tensor:
    """One layer's attention; see the module docstring for shapes."""
    mask = mask_of(layout, call.window)
    out, lse = _kernel(query.device.type)(query, key, value, mask, call.scale, call.softcap)
    if call.sinks is not None:
        share = torch.sigmoid(lse - call.sinks.view(1, -1, 1).to(lse.dtype))
        out = out * share.unsqueeze(-1).to(out.dtype)
    result: Tensor = out
    return result


def mask_of(layout: Layout, window: int | None) -> Mask:
    """The mask for a layout, made at the first layer that asks: one copy to the device, without waiting."""
    found: Mask | None = layout.cache.get(("flex", window))
    if found is None:
        arrays = [layout.reach_T]
        if layout.last_T is not None:
            arrays.append(layout.last_T)
        if window is not None:
            arrays += [layout.depth_T, layout.depth_T - window + 1]
        tensors = [*map(torch.from_numpy, arrays), *blocks(layout, window)]
        made = iter(to_device(tensors, layout.device))
        found = layout.cache["flex", window] = Mask(
            next(made),
            None if layout.last_T is None else next(made),
            None if window is None else (next(made), next(made)),
            Blocks(*made),
        )
    return found


def blocks(layout: Layout, window: int | None) -> Blocks:
    """In host memory."""
    num_tokens = layout.num_tokens
    starts = np.arange(0, num_tokens, BLOCK)
    ends = np.minimum(starts + BLOCK, num_tokens) - 1
    least_reach, most_reach = (f.reduceat(layout.reach_T, starts) for f in (np.minimum, np.maximum))
    is_below = starts[:, None] > starts[None, :]  # [query block, key block]
    is_seen = is_below & (most_reach[None, :] > starts[:, None])
    is_full = is_below & (least_reach[None, :] > ends[:, None])
    np.fill_diagonal(is_seen, val=True)
    if layout.last_T is not None:
        # a two-way block's tokens see up to its last one
        most_last = np.maximum.reduceat(layout.last_T, starts)
        is_seen |= (starts[None, :] <= most_last[:, None]) & ~is_below
    if window is not None:
        depth = layout.depth_T
        least, most = (f.reduceat(depth, starts) for f in (np.minimum, np.maximum))
        is_seen &= least[:, None] - most[None, :] < window
        is_full &= most[:, None] - least[None, :] < window
    if num_tokens % BLOCK:
        is_full[-1] = is_full[:, -1] = False  # the mask keeps the places after the last token out
    is_part = is_seen & ~is_full
    lists: list[Tensor] = []
    for found in (is_part, is_full, is_part.T, is_full.T):
        counts, order = found.sum(1), np.argsort(~found, axis=1, kind="stable")
        lists += [
            torch.from_numpy(some.astype(np.int32, order="C"))[None, None]
            for some in (counts, order)
        ]
    return Blocks(*lists)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Output, and log-sum-exp [1, H, T]."""
    reach_T, last_T, depths, blocks = mask

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = (key <= query) & (query < reach_T[key])
        if last_T is not None:
            allowed = allowed | (last_T[query] == last_T[key])
        if depths is not None:
            depth_T, least_T = depths
            allowed = allowed & (depth_T[key] >= least_T[query])
        return allowed

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert softcap is not None
        return torch.tanh(score / softcap) * softcap

    num_tokens = query.shape[2]
    block_mask = BlockMask((num_tokens, num_tokens), *blocks, (BLOCK, BLOCK), is_visible)
    out, aux = flex_attention(
        query,
        key,
        value,
        score_mod=None if softcap is None else capped,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    assert aux.lse is not None, "asked for"
    return out, aux.lse


@cache
def _kernel(device_type: str) -> Callable[..., Any]:
    return compiled("inductor") if device_type == "cuda" else _attend


def compiled(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """``_attend`` through torch's compiler; scale and softcap are constants of the kernel."""
    kernel: Callable[..., Any] = torch.compile(
        _attend, backend=backend, dynamic=True, fullgraph=True
    )

    def attend(*arguments: Any) -> Any:
        with torch._dynamo.config.patch(specialize_float=True, recompile_limit=MOST_KINDS):
            return kernel(*arguments)

    return attend
