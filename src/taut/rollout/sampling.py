"""Logits -> the next token of every completion, and its log-probability twice over.

    z = logits of the model               logp_one = log_softmax(z)[id]
    y = truncate(penalise(z) / temperature)   logp = log_softmax(y)[id]
    id = the first v with  sum_{w <= v} softmax(y)_w > u

One number u per token decides, drawn from the completion's own stream: what else is in the batch changes a token only
where u lies within rounding of the boundary between two. The sum is taken in float64. Temperature 0: argmax y, logp 0.

Shapes: logits [B, V] of B completions. May import engine.py. Imported by local.py only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from taut.rollout.engine import Sampling

BLOCK = 256
"""Tokens whose probabilities are summed together before the block with the drawn one is searched."""


class Drawn(NamedTuple):
    """The tokens of one step."""

    ids_B: Tensor
    logp_B: Tensor
    """Under the policy they were drawn from."""
    logp_one_B: Tensor
    """Under the model at temperature 1."""


def draw(
    logits_BV: Tensor, sampling: Sampling, history: Sequence[Sequence[int]], uniform_B: Tensor
) -> Drawn:
    """The next token of each row. ``history``: the ids so far, read where there is a repetition penalty;
    ``uniform_B``: float64 in [0, 1)."""
    policy_BV = policy_logits(logits_BV, sampling, history)
    if sampling.temperature == 0:
        ids_B = policy_BV.argmax(-1)
        logp_B = torch.zeros_like(policy_BV[:, 0])
    else:
        ids_B, logp_B = _invert(policy_BV, uniform_B)
    if sampling.is_plain:
        return Drawn(ids_B, logp_B, logp_B)
    picked_B = logits_BV.gather(1, ids_B[:, None]).squeeze(1)
    return Drawn(ids_B, logp_B, picked_B - logits_BV.logsumexp(-1))


def policy_logits(
    logits_BV: Tensor, sampling: Sampling, history: Sequence[Sequence[int]]
) -> Tensor:
    """Logits of the policy: -inf for what cannot be drawn. The argument is left as it is."""
    z = logits_BV
    if sampling.repetition_penalty != 1:
        z = _penalise(z, sampling.repetition_penalty, history)
    if sampling.temperature not in (0, 1):
        z = z / sampling.temperature
    if sampling.temperature == 0:
        return z
    if 0 < sampling.top_k < z.shape[1]:
        kth = z.topk(sampling.top_k, dim=-1).values[:, -1:]
        z = z.masked_fill(z < kth, -torch.inf)
    if sampling.top_p < 1:
        z = _nucleus(z, sampling.top_p)
    if sampling.min_p > 0:
        p = z.softmax(-1)
        z = z.masked_fill(p < sampling.min_p * p.amax(-1, keepdim=True), -torch.inf)
    return z


def _penalise(z: Tensor, penalty: float, history: Sequence[Sequence[int]]) -> Tensor:
    z = z.clone()
    for row, ids in zip(z, history, strict=True):
        seen = torch.tensor(sorted(set(ids)), device=z.device)
        some = row[seen]
        row[seen] = torch.where(some > 0, some / penalty, some * penalty)
    return z


def _nucleus(z: Tensor, top_p: float) -> Tensor:
    """Keep the most likely tokens until they reach ``top_p``; the one that crosses it is kept."""
    ordered, order = z.sort(stable=True, dim=-1, descending=True)
    p = ordered.softmax(-1)
    is_left_out = p.cumsum(-1) - p >= top_p
    is_left_out[:, 0] = False
    return z.masked_fill(torch.zeros_like(is_left_out).scatter(1, order, is_left_out), -torch.inf)


def _invert(z: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of the distribution function at ``uniform_B``, and the log-probabilities of what it gives."""
    top = z.amax(-1, keepdim=True)
    weights = (z - top).exp_()
    num_rows, size = weights.shape
    whole = -(-size // BLOCK) * BLOCK
    if whole != size:
        weights = torch.nn.functional.pad(weights, (0, whole - size))
    blocks = weights.view(num_rows, -1, BLOCK)
    until = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    goal = uniform_B.to(until)[:, None] * until[:, -1:]
    block = torch.searchsorted(until, goal, right=True).clamp_(max=until.shape[1] - 1)
    before = torch.where(block > 0, until.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inside = blocks[torch.arange(num_rows, device=z.device), block.squeeze(1)]
    at = torch.searchsorted(inside.cumsum(-1, dtype=torch.float64), goal - before, right=True)
    last = inside.ne(0).cumsum(-1).argmax(-1, keepdim=True)  # rounding must not step past the end
    ids_B = (block * BLOCK + torch.minimum(at, last)).squeeze(1)
    logp_B = z.gather(1, ids_B[:, None]) - top - until[:, -1:].log().to(z.dtype)
    return ids_B, logp_B.squeeze(1)
