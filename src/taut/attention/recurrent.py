"""Layers that carry state from token to token, along the paths of a layout.

    convolution     y_t = sum over j < W of w_j x_(the token j before t on its path), then an activation
    gated delta     S_t = exp(g_t) S_(t-1) + beta_t k_t (v_t - exp(g_t) S_(t-1)^T k_t)^T,   o_t = S_t^T q_t / sqrt(K)
                    S [K, V] is the state of one head (arXiv 2412.06464)

The first token of a sample starts from zeros. The first token of a branch goes on from the last token of the segment
that it branches from, so a shared prefix is computed once and samples of a pack do not see each other.

The gated delta rule is computed in chunks of at most ``CHUNK`` tokens of one segment (arXiv 2406.06484). With c_i the
sum of g up to token i of the chunk, D_ij = exp(c_i - c_j) and S the state before the chunk:

    u = A^-1 (beta v - beta exp(c) k S),   A_ij = beta_i (k_i . k_j) D_ij for j < i, 1 on the diagonal
    o = exp(c) q S + (q_i . k_j D_ij for j <= i) u
    S after the chunk = exp(c_last) S + sum_j exp(c_last - c_j) k_j u_j^T

All that does not read S is computed for all chunks of a micro-batch together. The states are then computed for all
chunks of one depth together: a chunk's depth is the number of chunks before it on its path. The last chunk of a segment
is filled up with zero rows, which change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from taut.attention.layout import Layout
from taut.attention.running_sums import running_sums
from taut.types import IntArray, to_device

CHUNK = 64
"""Most tokens of a chunk of the gated delta rule."""
L2_EPS = 1e-6
"""Added to the squared length of a query or key before it is divided by its length."""


# -- short convolution -----------------------------------------------------------------------------


def convolution(x_TD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, layout: Layout) -> Tensor:
    """[T, D]: each channel's convolution with the W tokens that end at each token of a path, in the dtype of the
    weights (float32 or wider).
    """
    x_TD = x_TD.to(torch.promote_types(weight_DW.dtype, torch.float32))
    out_TD = x_TD * weight_DW[:, -1] if bias_D is None else x_TD * weight_DW[:, -1] + bias_D
    for back, (rows, sources, firsts) in enumerate(_predecessors(layout, weight_DW.shape[1]), 1):
        earlier_TD = F.pad(x_TD, (0, 0, back, 0))[: x_TD.shape[0]]  # as if all were one sample
        earlier_TD = earlier_TD.index_copy(0, rows, x_TD.index_select(0, sources))
        earlier_TD = earlier_TD.index_fill(0, firsts, 0.0)
        out_TD = out_TD + earlier_TD * weight_DW[:, -1 - back]
    return out_TD


def _predecessors(layout: Layout, width: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For j = 1 .. width - 1: the tokens whose j-th predecessor on their path is not j places before them, those
    predecessors, and the tokens that have none.
    """
    found: list[tuple[Tensor, Tensor, Tensor]] | None = layout.cache.get(("predecessors", width))
    if found is None:
        every_T = np.arange(layout.num_tokens)
        one_back_T = every_T - 1
        for segment in layout.segments:
            above = layout.segments[segment.parent].stop - 1 if segment.parent >= 0 else -1
            one_back_T[segment.start] = above
        parts: list[IntArray] = []
        back_T = every_T
        for back in range(1, width):
            back_T = np.where(back_T < 0, -1, one_back_T[back_T])
            rows = np.flatnonzero((back_T >= 0) & (back_T != every_T - back))
            parts += [rows, back_T[rows], np.flatnonzero(back_T < 0)]
        tensors = to_device([torch.from_numpy(part) for part in parts], layout.device)
        found = list(zip(tensors[::3], tensors[1::3], tensors[2::3], strict=True))
        layout.cache["predecessors", width] = found
    return found


# -- the gated delta rule --------------------------------------------------------------------------


def gated_delta_rule(
    query_THK: Tensor,
    key_THK: Tensor,
    value_THV: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    layout: Layout,
    *,
    normalize: bool,
) -> Tensor:
    """o [T, H, V] in the dtype of ``value_THV``; computed in float32, or in float64 where that is its dtype.

    ``decay_TH``: g, at most 0. ``normalize``: whether each query and key is divided by its length. Where queries and
    keys have fewer heads than values, each serves as many neighboring ones.
    """
    wide, num_heads = torch.promote_types(value_THV.dtype, torch.float32), value_THV.shape[1]
    chunks = _chunks(layout)

    def split(x_THX: Tensor) -> Tensor:
        repeated = x_THX.to(wide).repeat_interleave(num_heads // x_THX.shape[1], dim=1)
        return chunks.split(repeated)

    with torch.autocast(value_THV.device.type, enabled=False):
        query, key, value = map(split, (query_THK, key_THK, value_THV))  # [M, H, C, K or V]
        decay, beta = split(decay_TH[..., None]), split(beta_TH[..., None])  # [M, H, C, 1]
        if normalize:
            query, key = _unit(query), _unit(key)
        query = query * query.shape[-1] ** -0.5
        total = running_sums(decay.squeeze(-1))[..., None]  # c
        between = total - total.transpose(2, 3)
        between = between.masked_fill(chunks.is_later, -torch.inf).exp()  # D
        system = (beta * key) @ key.transpose(2, 3) * between  # below the diagonal: A
        wanted = torch.cat([beta * value, beta * total.exp() * key], dim=-1)
        solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        own, read = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
        within = query @ key.transpose(2, 3) * between
        query, last = query * total.exp(), total[:, :, -1:]
        key = key * (last - total).exp()
        out = chunks.join(_scan(chunks, query, key, last.exp(), own, read, within))
    return out.to(value_THV.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + L2_EPS)


@dataclass(frozen=True, eq=False, slots=True)
class _Level:
    """The chunks of one depth."""

    size: int
    """How many there are."""
    parent: Tensor | None
    """For each the place of the chunk before it among those that the level above goes on from; None: depth 0."""
    goes_on: Tensor
    """Places in this level of the chunks that another chunk follows."""


@dataclass(frozen=True, eq=False, slots=True)
class _Chunks:
    """The chunks of a micro-batch, M of C rows, level by level."""

    size: int
    """C."""
    levels: tuple[_Level, ...]
    token_of_row: Tensor
    """int64 [M * C]: the token of each row; T for a row that fills up."""
    row_of_token: Tensor
    """int64 [T]."""
    is_later: Tensor
    """bool [C, C]: whether column j comes after row i."""

    def split(self, x_THX: Tensor) -> Tensor:
        """[T, H, X] -> [M, H, C, X]."""
        filled = F.pad(x_THX, (0, 0, 0, 0, 0, 1)).index_select(0, self.token_of_row)
        return filled.view(-1, self.size, *x_THX.shape[1:]).transpose(1, 2)

    def join(self, x_MHCX: Tensor) -> Tensor:
        """[M, H, C, X] -> [T, H, X]."""
        return x_MHCX.transpose(1, 2).flatten(0, 1).index_select(0, self.row_of_token)

    def by_level(self, x: Tensor) -> tuple[Tensor, ...]:
        """[M, ...] -> a part for each level."""
        return torch.split(x, [level.size for level in self.levels])


def _scan(
    chunks: _Chunks,
    query: Tensor,
    key: Tensor,
    left: Tensor,
    own: Tensor,
    read: Tensor,
    within: Tensor,
) -> Tensor:
    """o [M, H, C, V] of all chunks, level by level. ``left``: the share of the state that is left after a chunk."""
    outs: list[Tensor] = []
    states = own.new_empty(0)  # [chunks that are followed, H, K, V]
    parts = zip(*map(chunks.by_level, (query, key, left, own, read, within)), strict=True)
    for level, (q, k, share, u, reads, sees) in zip(chunks.levels, parts, strict=True):
        followed = level.goes_on
        if level.parent is None:
            outs.append(sees @ u)
            states = k[followed].transpose(2, 3) @ u[followed]
            continue
        before = states.index_select(0, level.parent)
        u = u - reads @ before
        outs.append(q @ before + sees @ u)
        added = k[followed].transpose(2, 3) @ u[followed]
        states = before[followed] * share[followed] + added
    return torch.cat(outs)


def _chunks(layout: Layout) -> _Chunks:
    """The chunks of a layout, made once for a micro-batch."""
    chunks: _Chunks | None = layout.cache.get("chunks")
    if chunks is None:
        chunks = layout.cache["chunks"] = _make_chunks(layout)
    return chunks


def _make_chunks(layout: Layout) -> _Chunks:
    # chunks by depth: start, stop, place of the one before in the level above
    levels: list[list[tuple[int, int, int]]] = []
    lasts: list[tuple[int, int]] = []  # of each segment its last chunk: level, place in it
    for segment in layout.segments:
        depth, place = lasts[segment.parent] if segment.parent >= 0 else (-1, -1)
        for start in range(segment.start, segment.stop, CHUNK):
            depth += 1
            if depth == len(levels):
                levels.append([])
            levels[depth].append((start, min(start + CHUNK, segment.stop), place))
            place = len(levels[depth]) - 1
        lasts.append((depth, place))
    # rows of equal length, and the row of each token
    start_M, stop_M, _ = np.concatenate([np.array(level) for level in levels]).T
    size = int((stop_M - start_M).max())
    rows_MC = start_M[:, None] + np.arange(size)
    is_token_MC = rows_MC < stop_M[:, None]
    row_of_token = np.empty(layout.num_tokens, dtype=np.int64)
    row_of_token[rows_MC[is_token_MC]] = np.flatnonzero(is_token_MC)
    indices: list[IntArray] = [
        np.where(is_token_MC, rows_MC, layout.num_tokens).ravel(),
        row_of_token,
    ]
    # which chunks of a level go on below it, and where their parents are
    for below in [*levels[1:], []]:
        above = np.array([place for _, _, place in below], dtype=np.int64)
        indices += np.unique(above, return_inverse=True)
    # on the device, in one copy
    tokens, rows, *others = to_device([torch.from_numpy(part) for part in indices], layout.device)
    parents = [None, *others[1::2]]  # the last is of no level
    levels_on_device = tuple(
        _Level(len(level), parent, goes_on)
        for level, parent, goes_on in zip(levels, parents, others[::2], strict=False)
    )
    is_later = torch.ones(size, size, dtype=torch.bool, device=layout.device).triu(1)
    return _Chunks(size, levels_on_device, tokens, rows, is_later)
