"""FlashAttention's operators in plain torch, so that every index path of the CUDA backends runs on the CPU, in float64.

They take the operators' place in torch's dispatcher: the calls are checked against torch's own schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor


@contextmanager
def flash_on_cpu() -> Iterator[None]:
    """The operators run on the CPU inside the block."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """q [T_q, H, K], k and v [T_k, Hkv, K] -> [T_q, H, K] and [H, T_q]; without ``cum_seq`` both with a batch in front.

    Causal from the bottom right, as the kernel documents.
    """
    assert not dropout_p
    assert not return_debug_mask
    seed = torch.zeros(2, dtype=torch.uint64)
    windows = (window_size_left, window_size_right)
    if cum_seq_q is None:
        parts = [
            _part(*heads, is_causal, windows, scale)
            for heads in zip(query, key, value, strict=True)
        ]
        outs, lses = zip(*parts, strict=True)
        assert max_q == query.shape[1]
        assert max_k == key.shape[1]
        return torch.stack(outs), torch.stack(lses), seed, seed, seed
    assert cum_seq_k is not None
    out = torch.full_like(query, torch.nan)
    lse = torch.full((query.shape[1], query.shape[0]), torch.nan, dtype=_wide(query))
    for queries, keys in _spans(cum_seq_q, cum_seq_k, max_q, max_k):
        heads = query[queries], key[keys], value[keys]
        out[queries], lse[:, queries] = _part(*heads, is_causal, windows, scale)
    return out, lse, seed, seed, seed


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the kernel: weights from ``logsumexp``, and the softmax's own gradient from ``out``, whatever they are."""
    assert not dropout_p
    assert grad_out.is_contiguous()
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    groups = query.shape[1] // key.shape[1]
    wide = _wide(query)
    for queries, keys in _spans(cum_seq_q, cum_seq_k, max_q, max_k):
        q, o, g = (x[queries].to(wide) for x in (query, out, grad_out))
        k, v = (x[keys].to(wide).repeat_interleave(groups, 1) for x in (key, value))
        scores = _scores(q, k, is_causal, (window_size_left, window_size_right), scale)
        weights = (scores - logsumexp[:, queries, None]).exp()
        weight_grads = torch.einsum("qhd,khd->hqk", g, v)
        score_grads = weights * (weight_grads - (g * o).sum(-1).T.unsqueeze(-1)) * scale
        grads[0][queries] = torch.einsum("hqk,khd->qhd", score_grads, k).to(query.dtype)
        for total, shares in (
            (grads[1], torch.einsum("hqk,qhd->khd", score_grads, q)),
            (grads[2], torch.einsum("hqk,qhd->khd", weights, g)),
        ):
            total[keys] = shares.unflatten(1, (-1, groups)).sum(2).to(total.dtype)
    return grads


def _spans(
    cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int
) -> Iterator[tuple[slice, slice]]:
    assert cum_seq_q.dtype == cum_seq_k.dtype == torch.int32
    assert max_q > 1, "for one query the kernel orders the log-sum-exp of grouped heads differently"
    bounds = [x.tolist() for x in (cum_seq_q, cum_seq_k)]
    entries = [[slice(*pair) for pair in pairwise(some)] for some in bounds]
    for queries, keys in zip(*entries, strict=True):
        assert 0 < queries.stop - queries.start <= max_q
        assert 0 < keys.stop - keys.start <= max_k
        yield queries, keys


def _part(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    windows: tuple[int | None, int | None],
    scale: float,
) -> tuple[Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    q = query.to(_wide(query))
    k, v = (x.to(q.dtype).repeat_interleave(groups, 1) for x in (key, value))
    scores = _scores(q, k, is_causal, windows, scale)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return out.to(query.dtype), scores.logsumexp(-1)


def _scores(
    q: Tensor, k: Tensor, is_causal: bool, windows: tuple[int | None, int | None], scale: float
) -> Tensor:
    num_q, num_k = q.shape[0], k.shape[0]
    distance = torch.arange(num_q)[:, None] + num_k - num_q - torch.arange(num_k)
    left, right = (-1 if window is None else window for window in windows)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if is_causal or right >= 0:
        hidden |= distance < -max(0, 0 if is_causal else right)
    if left >= 0:
        hidden |= distance > left
    return torch.einsum("qhd,khd->hqk", q, k).mul(scale).masked_fill(hidden, -torch.inf)


def _wide(heads: Tensor) -> torch.dtype:
    return torch.promote_types(heads.dtype, torch.float32)
