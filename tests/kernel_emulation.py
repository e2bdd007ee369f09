"""``varlen_attn`` in plain torch, so that every index path of the CUDA backend runs on the CPU, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """q [T_q, H, K], k and v [T_k, Hkv, K] -> [T_q, H, K]; causal from the bottom right, as the kernel documents."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert window_size[1] == 0
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    outs = []
    for q0, q1, k0, k1 in zip(
        cu_seq_q.tolist()[:-1],
        cu_seq_q.tolist()[1:],
        cu_seq_k.tolist()[:-1],
        cu_seq_k.tolist()[1:],
        strict=True,
    ):
        assert q1 - q0 <= max_q
        assert k1 - k0 <= max_k
        distance = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0) - torch.arange(k1 - k0)
        hidden = distance < 0
        if window_size[0] >= 0:
            hidden |= distance > window_size[0]
        scores = torch.einsum("qhd,khd->hqk", query[q0:q1], key[k0:k1]) * scale
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, value[k0:k1]))
    return torch.cat(outs)
