"""Running sums that are the same bits each time, on every device.

CUDA has no reproducible cumulative sum of floats and refuses it with torch.use_deterministic_algorithms
(deterministic=true). There the sum is a product with a triangle of ones, by spans: exact order, no atomics.
"""

from __future__ import annotations

import torch
from torch import Tensor

SPAN = 512
"""Numbers that one product sums."""


def running_sums(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``x.cumsum(-1, dtype=dtype)`` of floats."""
    if x.device.type != "cuda" or not torch.are_deterministic_algorithms_enabled():
        return x.cumsum(-1, dtype=dtype)
    # in float64, which neither autocast nor TF32 narrows
    return _by_spans(x.double()).to(dtype or x.dtype)


def _by_spans(x: Tensor) -> Tensor:
    size = x.shape[-1]
    span = min(size, SPAN)
    padded = torch.nn.functional.pad(x, (0, -size % span))
    sums: Tensor = (
        padded.reshape(*x.shape[:-1], -1, span)
        @ torch.ones(span, span, dtype=x.dtype, device=x.device).triu()
    )
    if size > span:
        ends = sums[..., -1]
        sums = sums + (_by_spans(ends) - ends)[..., None]
    return sums.flatten(-2)[..., :size]
