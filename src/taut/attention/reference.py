"""Attention on any device, from ``scaled_dot_product_attention`` kernels and slices. No gather, no [T, T].

Two exact ways to the same numbers, chosen per call by the layer's options:

``TreeAttention`` (no window that bites, no softcap, no sinks, no two-way block, one head size; CPU): a segment [a, b)
whose subtree ends at e is attended by its own tokens causally and by all its descendants [b, e) fully, so a tree is a
list of contiguous rectangles of (queries, keys). Each goes through the flash kernel, and the parts of one query are
merged by their log-sum-exp. The kernel's backward, given the merged output and log-sum-exp, returns each part's exact
share of the gradient (as in ring attention, arXiv:2310.01889).

``path_attention`` (everything else): per segment, its queries in chunks against the keys on its path, with a boolean
mask from depth; through SDPA, or an explicit softmax for a softcap or sinks.

Shapes: q [1, H, T, K], k and v [1, Hkv, T, K] -> out [1, H, T, K].
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from taut.attention.layout import Call, Layout, Segment

QUERY_CHUNK = 512
"""Rows of the boolean mask or of the explicit scores that exist at a time."""

Part = tuple[int, int, int, int, bool, bool]
"""(first query, end, first key, end, is_causal, is_first): one rectangle; is_first: its queries have no part yet."""


def attend(query: Tensor, key: Tensor, value: Tensor, layout: Layout, call: Call) -> Tensor:
    """One layer's attention; see the module docstring for shapes."""
    is_windowed = call.window is not None and layout.max_depth >= call.window
    is_plain = (
        not is_windowed
        and call.softcap is None
        and call.sinks is None
        and layout.last_T is None
        and query.shape[-1] == value.shape[-1]  # the flash kernel knows one head size
    )
    if is_plain and query.device.type == "cpu":
        result: Tensor = TreeAttention.apply(query, key, value, parts(layout), call.scale)  # type: ignore[no-untyped-call]
        return result
    return path_attention(query, key, value, layout, call)


def parts(layout: Layout) -> list[Part]:
    """The rectangles of a layout, ancestors before descendants."""
    rectangles: list[Part] | None = layout.cache.get("parts")
    if rectangles is None:
        rectangles = []
        for segment in layout.segments:
            is_first = segment.parent < 0
            span = (segment.start, segment.stop)
            rectangles.append((*span, *span, True, is_first))
            if segment.reach > segment.stop:
                rectangles.append((segment.stop, segment.reach, *span, False, is_first))
        layout.cache["parts"] = rectangles
    return rectangles


class TreeAttention(torch.autograd.Function):
    """Merged flash attention over rectangles. q [1, H, T, K], k and v [1, Hkv, T, K]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: list[Part], scale: float
    ) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        wide = torch.promote_types(q.dtype, torch.float32)
        is_merged = not all(is_first for *_, is_first in parts)
        out = _rows_first(q, wide if is_merged else q.dtype)
        lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide).transpose(1, 2)
        for q0, q1, k0, k1, is_causal, is_first in parts:
            some_out, some_lse = kernel(
                q[:, :, q0:q1], k[:, :, k0:k1], v[:, :, k0:k1], 0.0, is_causal, scale=scale
            )
            if is_first:
                out[:, :, q0:q1], lse[:, :, q0:q1] = some_out, some_lse
            else:
                merge(out[:, :, q0:q1], lse[:, :, q0:q1], some_out, some_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.parts, ctx.scale = parts, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grad = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        wide = torch.promote_types(q.dtype, torch.float32)
        is_merged = len(ctx.parts) > 1
        sums = [_rows_first(x, wide if is_merged else x.dtype) for x in (q, k, v)]
        # the kernel's backward runs one thread for each key head: with fewer of them than threads, they are repeated
        groups = q.shape[1] // k.shape[1] if k.shape[1] < torch.get_num_threads() else 1
        k, v = _repeat(k, groups), _repeat(v, groups)
        for q0, q1, k0, k1, is_causal, _ in sorted(ctx.parts, key=lambda part: not part[4]):
            rows, columns = slice(q0, q1), slice(k0, k1)
            grad_q, *grads_kv = kernel(
                grad[:, :, rows],
                q[:, :, rows],
                k[:, :, columns],
                v[:, :, columns],
                out[:, :, rows],
                lse[:, :, rows],
                0.0,
                is_causal,
                scale=ctx.scale,
            )
            if groups > 1:
                grads_kv = [share.unflatten(1, (-1, groups)).sum(2) for share in grads_kv]
            shares = (grad_q, *grads_kv)
            for total, where, share in zip(sums, (rows, columns, columns), shares, strict=True):
                if is_causal:  # every token is in one causal square, and they come first
                    total[:, :, where] = share
                else:
                    total[:, :, where] += share
        return sums[0].to(q.dtype), sums[1].to(k.dtype), sums[2].to(v.dtype), None, None


def _rows_first(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor [1, H, T, K], in memory [1, T, H, K] as the kernels and the layers around have it."""
    return torch.empty_like(
        heads.transpose(1, 2), dtype=dtype, memory_format=torch.contiguous_format
    ).transpose(1, 2)


def merge(out: Tensor, lse: Tensor, some_out: Tensor, some_lse: Tensor) -> None:
    """Add one part of the keys to a running softmax average, in place."""
    share = torch.sigmoid(some_lse - lse)
    out.lerp_(some_out.to(out.dtype), share.unsqueeze(-1))
    torch.logaddexp(lse, some_lse, out=lse)


def path_attention(query: Tensor, key: Tensor, value: Tensor, layout: Layout, call: Call) -> Tensor:
    """Queries of each segment, in chunks, against the keys on the segment's path."""
    groups = query.shape[1] // key.shape[1]
    outs = []
    for segment, path in zip(layout.segments, layout.paths, strict=True):
        for start in range(segment.start, segment.stop, QUERY_CHUNK):
            stop = min(start + QUERY_CHUNK, segment.stop)
            keys = path[_key_range(segment, start, stop, layout, call.window)]
            mask = layout.visible(np.arange(start, stop), keys, call.window).to(query.device)
            index = torch.from_numpy(keys).to(query.device)
            some_key = _repeat(key.index_select(2, index), groups)
            some_value = _repeat(value.index_select(2, index), groups)
            some_query = query[:, :, start:stop]
            if call.softcap is None and call.sinks is None:
                out = functional.scaled_dot_product_attention(
                    some_query, some_key, some_value, attn_mask=mask, scale=call.scale
                )
            else:
                out = _explicit(some_query, some_key, some_value, mask, call)
            outs.append(out)
    return torch.cat(outs, dim=2)


def _key_range(
    segment: Segment, start: int, stop: int, layout: Layout, window: int | None
) -> slice:
    """The depths that the queries [start, stop) of a segment can see."""
    first = segment.depth + start - segment.start
    end = stop if layout.last_T is None else int(layout.last_T[start:stop].max()) + 1
    return slice(max(0, first - window + 1) if window else 0, segment.depth + end - segment.start)


def _explicit(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, call: Call) -> Tensor:
    """softmax(softcap(q k^T)) v with sinks, in at least float32 for the softmax."""
    scores = query @ key.transpose(-1, -2) * call.scale
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(
        ~mask, -torch.inf
    )
    if call.sinks is not None:
        sinks = call.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    return weights[..., : key.shape[2]].to(value.dtype) @ value


def _repeat(heads: Tensor, groups: int) -> Tensor:
    return heads if groups == 1 else heads.repeat_interleave(groups, dim=1)
