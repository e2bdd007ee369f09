"""Attention on any device, from ``scaled_dot_product_attention`` kernels and slices. No gather, no [T, T].

Two exact ways to the same numbers, chosen per call by the layer's options:

``TreeAttention`` (no window that bites, no softcap, no sinks, no two-way block, one head size; CPU): a segment and the
first of its branches, the first of that one's, and so on, are contiguous and see each other causally: a run. The other
branches of a segment see the whole path from the start of its run. So a tree is a list of rectangles (queries, keys),
and each goes through the flash kernel. A causal run is cut further, since the kernel computes a causal square of up
to 512 tokens in full, twice what is seen. Rectangles of one shape at one distance are one call. The parts of one query
are merged by their log-sum-exp. The kernel's backward, given the merged output and log-sum-exp, returns each part's
exact share of the gradient (as in ring attention, arXiv:2310.01889). In the last layer, parts whose queries nobody
reads are left out, and others begin at the first query that is read.

``path_attention`` (everything else): per segment, its queries in chunks against the keys on its path, with a boolean
mask from depth; through SDPA, or an explicit softmax for a softcap or sinks.

Shapes: q [1, H, T, K], k and v [1, Hkv, T, K] -> out [1, H, T, K].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from taut.attention.layout import Call, Layout
from taut.types import IntArray

QUERY_CHUNK = 512
"""Rows of the boolean mask or of the explicit scores that exist at a time."""

RUN = 640
"""Most tokens of a causal run. A longer one is cut in halves, and its second half sees the first as a branch does."""

CHUNK = 96
"""Most queries of a run in one call: they are computed against every key up to the last one that any of them sees."""

LONG_CHUNK = 192
"""Queries of a call in a run of at least two such; from there on the kernel's blocks of queries are twice as long."""

ROWS = 32
"""The kernel's block of queries: a chunk is a multiple."""

NEAR = 32
"""Parts of one shape among which the next one of a progression is searched."""


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
        # the kernel reads heads at any strides, but takes the numbers of a row to be neighbors
        query, key, value = (
            x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value)
        )
        calls = kernel_calls(layout, query.dtype)
        has_gaps = read_of(layout) is not None
        result: Tensor = TreeAttention.apply(query, key, value, calls, call.scale, has_gaps)  # type: ignore[no-untyped-call]
        return result
    return path_attention(query, key, value, layout, call)


class Kind(Enum):
    """The place of a part in its run of tokens that see each other causally."""

    LAST = auto()
    """The run's last queries, and all its keys."""
    CHUNK = auto()
    """Earlier queries, and its keys up to them."""
    OTHER = auto()
    """All its keys, and queries of another run, which see each of them."""


class Parts(NamedTuple):
    """Parts of one shape at one distance, which a kernel takes as a batch: no query and no key is in two of them."""

    kind: Kind
    num_queries: int
    num_keys: int
    num_parts: int
    query: int
    """First query of the first part."""
    key: int
    query_step: int
    """From the first query of a part to that of the next."""
    key_step: int

    def queries(self, heads: Tensor) -> Tensor:
        """View of [1, H, T, K] or [1, H, T]: [num_parts, H, num_queries, K] or [num_parts, H, num_queries]."""
        return self._view(heads, self.query, self.query_step, self.num_queries)

    def keys(self, heads: Tensor) -> Tensor:
        """View of [1, H, T, K]: [num_parts, H, num_keys, K]."""
        return self._view(heads, self.key, self.key_step, self.num_keys)

    def _view(self, heads: Tensor, start: int, step: int, length: int) -> Tensor:
        (_, num_heads, _, *size), (_, head, row, *last) = heads.shape, heads.stride()
        offset = heads.storage_offset() + start * row
        return heads.as_strided(
            (self.num_parts, num_heads, length, *size), (step * row, head, row, *last), offset
        )


KernelCall = tuple[Parts, Tensor | None]
"""Parts, and what is added to the scores of each [num_queries, num_keys]; None: nothing, or what the kernel knows."""


def kernel_calls(layout: Layout, dtype: torch.dtype) -> list[KernelCall]:
    """The calls for a layout, derived once, in the order of their kinds."""
    calls: list[KernelCall] | None = layout.cache.get(("calls", dtype, layout.is_last))
    if calls is None:
        calls = []
        widest: dict[int, Tensor] = {}
        for part in parts(layout, is_cut=dtype.itemsize > 2):
            rows, columns = part.num_queries, part.num_keys
            if part.kind is Kind.OTHER or rows == columns:
                calls.append((part, None))
                continue
            if rows not in widest:
                widest[rows] = torch.zeros((rows, RUN), dtype=dtype)
                widest[rows][:, RUN - rows :] = torch.full((rows, rows), -torch.inf).triu(1)
            calls.append((part, widest[rows][:, RUN - columns :]))
        layout.cache["calls", dtype, layout.is_last] = calls
    return calls


def read_of(layout: Layout) -> IntArray | None:
    """The queries whose outputs are read; None: all."""
    return layout.rows_read if layout.is_last else None


def parts(layout: Layout, *, is_cut: bool) -> list[Parts]:
    """The parts of a layout: each visible pair of a query that is read and a key is in one of them. ``is_cut``: causal
    runs are cut; in 16 bits the kernel's many small products cost more than what nobody sees.
    """
    places: dict[tuple[Kind, int, int], list[tuple[int, int]]] = {}
    read = read_of(layout)

    def add(kind: Kind, queries: range, keys: range) -> None:
        if read is not None:
            queries = _from_first(read, queries, is_cut=is_cut)
        if queries:
            shape = (kind, len(queries), len(keys))
            places.setdefault(shape, []).append((queries.start, keys.start))

    start = 0
    for index, segment in enumerate(layout.segments):
        following = layout.segments[index + 1 : index + 2]
        if following and following[0].parent == index:  # its first branch continues the run
            branches = range(following[0].reach, segment.reach)
            add(Kind.OTHER, branches, range(start, segment.stop))
        else:
            run = range(start, segment.stop)
            _cut(run, add) if is_cut else add(Kind.LAST, run, run)
            start = segment.stop
    return [
        Parts(*shape, *progression)
        for shape in sorted(places, key=lambda shape: shape[0].value)
        for progression in _progressions(places[shape], shape[1], shape[2])
    ]


def _from_first(read: IntArray, queries: range, *, is_cut: bool) -> range:
    """The queries from the first that is ``read``, or a few before it: parts of one shape are one call."""
    index = int(np.searchsorted(read, queries.start))
    first = int(read[index]) if index < read.size else queries.stop
    if first >= queries.stop:
        return queries[:0]
    return queries[(first - queries.start) // ROWS * ROWS :] if is_cut else queries


def _cut(run: range, add: Callable[[Kind, range, range], None]) -> None:
    """Cut a causal run in halves until it is short enough, then its queries into chunks."""
    if len(run) > RUN:
        half = (len(run) + 1) // 2
        _cut(run[:half], add)
        _cut(run[half:], add)
        add(Kind.OTHER, run[half:], run[:half])
        return
    num_chunks = math.ceil(len(run) / CHUNK)
    if len(run) >= 2 * LONG_CHUNK:
        num_chunks = len(run) // LONG_CHUNK
    size = ROWS * math.ceil(len(run) / num_chunks / ROWS)
    for first in range(0, len(run), size):
        stop = min(first + size, len(run))
        add(Kind.LAST if stop == len(run) else Kind.CHUNK, run[first:stop], run[:stop])


def _progressions(
    places: list[tuple[int, int]], num_queries: int, num_keys: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """Sort (first query, first key) of parts into arithmetic progressions: count, first query, first key, two steps."""
    left = dict.fromkeys(sorted(places))
    while left:
        first, *others = itertools.islice(left, NEAR)
        longest, longest_step = [first], (0, 0)
        for other in others:
            step = (other[0] - first[0], other[1] - first[1])
            if step[0] < num_queries or step[1] < num_keys:
                continue  # they share queries or keys
            progression = [first]
            while (place := (progression[-1][0] + step[0], progression[-1][1] + step[1])) in left:
                progression.append(place)
            if len(progression) > len(longest):
                longest, longest_step = progression, step
        for place in longest:
            del left[place]
        yield len(longest), *first, *longest_step


class TreeAttention(torch.autograd.Function):
    """Merged flash attention over parts. q [1, H, T, K], k and v [1, Hkv, T, K]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        calls: list[KernelCall],
        scale: float,
        has_gaps: bool,
    ) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        wide = torch.promote_types(q.dtype, torch.float32)
        is_merged = any(part.kind is Kind.OTHER for part, _ in calls[-1:])
        out = _rows_first(q, wide if is_merged else q.dtype)
        lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide).transpose(1, 2)
        if has_gaps:
            out.zero_()
            lse.zero_()
        for part, mask in calls:
            some_out, some_lse = kernel(
                part.queries(q),
                part.keys(k),
                part.keys(v),
                is_causal=part.kind is not Kind.OTHER and mask is None,
                attn_mask=mask,
                scale=scale,
            )
            if part.kind is Kind.OTHER:
                merge(part.queries(out), part.queries(lse), some_out, some_lse)
            else:
                part.queries(out).copy_(some_out)
                part.queries(lse).copy_(some_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.calls, ctx.scale, ctx.has_gaps = calls, scale, has_gaps
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grad = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        wide = torch.promote_types(q.dtype, torch.float32)
        is_summed = any(part.kind is not Kind.LAST for part, _ in ctx.calls)
        sums = [_rows_first(x, wide if is_summed else x.dtype) for x in (q, k, v)]
        if ctx.has_gaps:
            for total in sums:
                total.zero_()
        # the kernel's backward has a thread for each key head of each part: where they are few, key heads are repeated
        groups, threads = q.shape[1] // k.shape[1], torch.get_num_threads()
        is_few = [groups > 1 and part.num_parts * k.shape[1] < threads for part, _ in ctx.calls]
        repeated = [_repeat(x, groups) for x in (k, v)] if any(is_few) else []
        for (part, mask), is_repeated in zip(ctx.calls, is_few, strict=True):
            some_k, some_v = repeated if is_repeated else (k, v)
            grad_q, *grads_kv = kernel(
                part.queries(grad),
                part.queries(q),
                part.keys(some_k),
                part.keys(some_v),
                part.queries(out),
                part.queries(lse),
                0.0,
                part.kind is not Kind.OTHER and mask is None,
                attn_mask=mask,
                scale=ctx.scale,
            )
            if is_repeated:
                grads_kv = [share.unflatten(1, (-1, groups)).sum(2) for share in grads_kv]
            sum_q = part.queries(sums[0])
            sum_q.add_(grad_q) if part.kind is Kind.OTHER else sum_q.copy_(grad_q)
            for total, share in zip(sums[1:], grads_kv, strict=True):
                sum_kv = part.keys(total)
                sum_kv.copy_(share) if part.kind is Kind.LAST else sum_kv.add_(share)
        return sums[0].to(q.dtype), sums[1].to(k.dtype), sums[2].to(v.dtype), *[None] * 3


def _rows_first(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor [1, H, T, K], in memory [1, T, H, K] as the kernels and the layers around have it."""
    return torch.empty_like(
        heads.transpose(1, 2), dtype=dtype, memory_format=torch.contiguous_format
    ).transpose(1, 2)


def merge(out: Tensor, lse: Tensor, some_out: Tensor, some_lse: Tensor) -> None:
    """Add one part of the keys to a running softmax average, in place."""
    some_lse = some_lse.to(lse.dtype)
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
            # the depths that these queries can see
            least = segment.depth + start - segment.start
            least = max(0, least - call.window + 1) if call.window else 0
            end = stop if layout.last_T is None else int(layout.last_T[start:stop].max()) + 1
            keys = path[least : segment.depth + end - segment.start]
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
