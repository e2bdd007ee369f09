"""Attention over trees and packs through FlashAttention for variable lengths (inside torch; CUDA, 16 bit).

A segment, the first of its branches, the first of that one's, and so on, are contiguous and see each other causally: a
run. The other branches of a segment see all of it. So a tree is

    one causal call                         each run against itself
    one call per level, not causal          each segment of this level, and the tokens below it that are not in its run

No two entries of a call share a query or a key, and no key is copied per branch. The parts of one query are merged by
their log-sum-exp, in float32; the kernel's backward, given the merged output and log-sum-exp, returns each part's exact
share of the gradient (as in attention/reference.py), and the shares are added in float32. Where no prefix is shared
there is the causal call alone, and nothing is gathered.

A sliding window that bites is not a rectangle below a branch: there each segment's queries see the last keys of its
path, gathered, in one causal call aligned to the bottom right. The kernel's left window does not count the token
itself: the library's W becomes W - 1. Softcaps, sinks and two-way blocks are refused (models/attention_backends.py
chooses flex for them).

The operators of ``aten`` are called, since ``torch.nn.attention.varlen`` gives no way to the backward with another
output; FlashAttention 3 and 4 replace them once they are activated.

Shapes: q [1, H, T, K], k and v [1, Hkv, T, K] -> out [1, H, T, K]; inside [T, H, K], log-sum-exp [H, T].
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from taut.attention.layout import Call, Layout
from taut.attention.reference import merge
from taut.errors import AttentionError
from taut.types import IntArray, to_device


def attend(query: Tensor, key: Tensor, value: Tensor, layout: Layout, call: Call) -> Tensor:
    """One layer's attention; see the module docstring for shapes. Raises AttentionError for unsupported calls."""
    if call.softcap is not None or call.sinks is not None or layout.last_T is not None:
        raise AttentionError(
            "attention=varlen found a softcap, sinks or a two-way block in this model; the varlen kernel has none of "
            "them; set attention=flex"
        )
    calls = kernel_calls(layout, call.window)
    heads = [x.squeeze(0).transpose(0, 1) for x in (query, key, value)]
    heads = [x if x.stride(-1) == 1 else x.contiguous() for x in heads]
    out: Tensor = TreeVarlen.apply(*heads, calls, call.scale)  # type: ignore[no-untyped-call]
    return out.transpose(0, 1).unsqueeze(0)


class KernelCall(NamedTuple):
    """Entries of one call: consecutive queries against consecutive keys, of what is gathered."""

    queries: Tensor | None
    """int64: the tokens whose queries are gathered; None: all, in order."""
    keys: Tensor | None
    """int64: the tokens whose keys are gathered; None: all, in order."""
    starts_q: Tensor
    """int32 [entries + 1]: where each entry's queries start."""
    starts_k: Tensor
    """int32 [entries + 1]: where each entry's keys start."""
    max_q: int
    """At least 2: for 1 the kernel orders the log-sum-exp of grouped heads differently."""
    max_k: int
    is_causal: bool
    """From the bottom right: an entry's last query sees its last key."""
    window: int
    """Earlier keys that a query sees; -1: all."""

    @property
    def bounds(self) -> tuple[Tensor, Tensor, int, int, float, bool]:
        """Where the entries are, no dropout, and whether they are causal, as both operators take it. With a window they
        are so by the window.
        """
        is_causal = self.is_causal and self.window < 0
        return self.starts_q, self.starts_k, self.max_q, self.max_k, 0.0, is_causal

    @property
    def window_sizes(self) -> dict[str, int]:
        """To the left and right, as both operators take it."""
        left, right = (self.window, 0) if self.is_causal else (-1, -1)
        return {"window_size_left": left, "window_size_right": right}


class Entries(NamedTuple):
    """A call on the host."""

    queries: Sequence[IntArray]
    keys: Sequence[IntArray]
    is_causal: bool


def kernel_calls(layout: Layout, window: int | None) -> list[KernelCall]:
    """The calls for a layout, made at the first layer that asks: one copy to the device, without waiting."""
    if window is not None and layout.max_depth < window:
        window = None  # nothing is hidden by it
    calls: list[KernelCall] | None = layout.cache.get(("varlen", window))
    if calls is None:
        left = -1 if window is None else window - 1
        calls = [_kernel_call(call, layout.num_tokens, left) for call in entries(layout, window)]
        calls = layout.cache["varlen", window] = _on_device(calls, layout.device)
    return calls


def entries(layout: Layout, window: int | None) -> list[Entries]:
    """The calls as flat indices: each visible pair of a query and a key is in one entry. ``window``: one that bites."""
    if window is not None and not layout.is_flat:
        queries = [np.arange(segment.start, segment.stop) for segment in layout.segments]
        keys = [
            path[max(0, segment.depth - window + 1) :]
            for segment, path in zip(layout.segments, layout.paths, strict=True)
        ]
        return [Entries(queries, keys, is_causal=True)]
    runs: list[IntArray] = []
    below: dict[int, list[tuple[IntArray, IntArray]]] = {}
    levels: list[int] = []
    first = 0
    """Of the segments of the run."""
    for index, segment in enumerate(layout.segments):
        levels.append(levels[segment.parent] + 1 if segment.parent >= 0 else 0)
        following = layout.segments[index + 1 : index + 2]
        if following and following[0].parent == index:  # its first branch continues the run
            continue
        runs.append(np.arange(layout.segments[first].start, segment.stop))
        for level, above in zip(levels[first:], layout.segments[first : index + 1], strict=True):
            if above.reach > segment.stop:
                rectangle = np.arange(segment.stop, above.reach), np.arange(above.start, above.stop)
                below.setdefault(level, []).append(rectangle)
        first = index + 1
    calls = [Entries(runs, runs, is_causal=True)]
    for level in sorted(below):
        queries, keys = ([pair[side] for pair in below[level]] for side in (0, 1))
        calls.append(Entries(queries, keys, is_causal=False))
    return calls


def _kernel_call(call: Entries, num_tokens: int, window: int) -> KernelCall:
    """In host memory."""
    sides = call.queries, call.keys
    indices = [np.concatenate(members) for members in sides]
    queries, keys = (
        None if np.array_equal(index, np.arange(num_tokens)) else torch.from_numpy(index)
        for index in indices
    )
    sizes = [[member.size for member in members] for members in sides]
    starts_q, starts_k = (torch.tensor([0, *accumulate(some)], dtype=torch.int32) for some in sizes)
    max_q, max_k = max(2, *sizes[0]), max(sizes[1])
    return KernelCall(queries, keys, starts_q, starts_k, max_q, max_k, call.is_causal, window)


def _on_device(calls: Sequence[KernelCall], device: torch.device) -> list[KernelCall]:
    fields = [call._asdict() for call in calls]
    places = [(some, name) for some in fields for name in some if torch.is_tensor(some[name])]
    moved = to_device([some[name] for some, name in places], device)
    for (some, name), there in zip(places, moved, strict=True):
        some[name] = there
    return [KernelCall(**some) for some in fields]


class TreeVarlen(torch.autograd.Function):
    """Merged flash attention over a layout's calls. q [T, H, K], k and v [T, Hkv, K]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, calls: list[KernelCall], scale: float
    ) -> Tensor:
        out, lse = _forward(q, k, v, calls[0], scale)
        if len(calls) > 1:
            out = out.to(torch.promote_types(q.dtype, torch.float32))
            lse = (
                lse.clone()
            )  # the kernel's own may be kept for the backward pass (models/recompute.py)
        for call in calls[1:]:
            rows = call.queries
            assert rows is not None, "the first token is below no other"
            merged, merged_lse = out.index_select(0, rows), lse.index_select(1, rows)
            some_out, some_lse = _forward(q, k, v, call, scale)
            merge(merged, merged_lse.T, some_out, some_lse.T)
            out.index_copy_(0, rows, merged)
            lse.index_copy_(1, rows, merged_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.calls, ctx.scale = calls, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        inputs = q, k, v
        wide = torch.promote_types(q.dtype, torch.float32)
        sums: list[Tensor | None] = [None, None, None]
        for call in ctx.calls:
            shares = _backward(grads[0], q, k, v, out, lse, call, ctx.scale)
            for side, (share, index) in enumerate(
                zip(shares, (call.queries, call.keys, call.keys), strict=True)
            ):
                total = sums[side]
                if index is None:
                    assert total is None, "only the first call takes all tokens"
                    sums[side] = share if len(ctx.calls) == 1 else share.to(wide)
                    continue
                if total is None:
                    total = sums[side] = torch.zeros_like(inputs[side], dtype=wide)
                total.index_add_(0, index, share.to(wide))
        found = (
            total.to(x.dtype) for total, x in zip(sums, inputs, strict=True) if total is not None
        )
        return (*found, None, None)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, call: KernelCall, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the call's queries."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        _take(q, 0, call.queries),
        _take(k, 0, call.keys),
        _take(v, 0, call.keys),
        *call.bounds,
        False,
        scale=scale,
        **call.window_sizes,
    )
    return out, lse


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: KernelCall,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the call's queries, keys and values."""
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        _take(grad, 0, call.queries).contiguous(),
        _take(q, 0, call.queries),
        _take(k, 0, call.keys),
        _take(v, 0, call.keys),
        _take(out, 0, call.queries),
        _take(lse, 1, call.queries),
        *call.bounds,
        no_dropout,
        no_dropout,
        scale=scale,
        **call.window_sizes,
    )
    return grads


def _take(heads: Tensor, dim: int, index: Tensor | None) -> Tensor:
    return heads if index is None else heads.index_select(dim, index)
