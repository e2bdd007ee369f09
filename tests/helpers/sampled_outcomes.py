"""Outcomes of a rollout, as estimators of advantages read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from taut.losses.advantages import Outcomes


def outcomes_of(
    reward_S: Tensor,
    group_S: Tensor,
    sizes: Sequence[int] | None = None,
    *,
    parts: Mapping[str, Tensor] | None = None,
    weights: Mapping[str, float] | None = None,
    turns: Sequence[Sequence[tuple[int, float]]] | None = None,
) -> Outcomes:
    """Samples that have no token in common. ``sizes``: how many tokens each has; 1 if None. ``turns``: (tokens, reward)
    of each turn of each sample."""
    if turns is None:
        sizes = [1] * reward_S.numel() if sizes is None else sizes
        turns = [[(size, 0.0)] for size in sizes]
    ends = [np.cumsum([size for size, _ in of_sample]) for of_sample in turns]
    length_S = torch.tensor([int(end_U[-1]) for end_U in ends])
    return Outcomes(
        reward_S=reward_S,
        group_S=group_S,
        length_S=length_S,
        parts={"r": reward_S} if parts is None else parts,
        weights=weights or {},
        turn_ends=[torch.from_numpy(end_U - 1) for end_U in ends],
        turn_rewards=[torch.tensor([r for _, r in of], dtype=torch.float64) for of in turns],
        ids=[torch.full((1 + size,), n) for n, size in enumerate(length_S.tolist())],
        sampled_at=[1 + torch.arange(size) for size in length_S.tolist()],
        branches=[()] * reward_S.numel(),
        forks=[()] * reward_S.numel(),
    )
