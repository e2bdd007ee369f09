"""Gradients of the same loss computed two ways, tensor by tensor.

    error of a tensor = |left - right| / (|left| + FLOOR * |whole gradient| / sqrt(number of tensors))

The floor keeps a tensor whose gradient is next to nothing (a bias that softmax cancels) from being judged by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from taut.checks.loss.step import forget, norm, trained
from taut.checks.session import Session

FLOOR = 0.05
ROUNDING = {torch.float64: 1e-8, torch.float32: 2e-3, torch.bfloat16: 0.2}
"""Largest error of a tensor that is rounding, by compute dtype."""


class Worst(NamedTuple):
    """The tensor whose gradients differ most."""

    name: str
    error: float


def gradients(session: Session, act: Callable[[], object]) -> dict[str, Tensor]:
    """The gradient of every trained tensor that ``act``, a backward, leaves; taken out of ``.grad``."""
    was_training = session.scorer.training
    try:
        act()
        return {name: p.grad for name, p in trained(session).items() if p.grad is not None}
    finally:
        forget(session)
        session.scorer.train(was_training)


def worst(left: dict[str, Tensor], right: dict[str, Tensor]) -> Worst:
    """Where two gradients differ most. A tensor that only one of them has differs infinitely."""
    norms = {name: norm(gradient) for name, gradient in left.items()}
    floor = FLOOR * math.hypot(*norms.values()) / math.sqrt(max(1, len(norms)))
    found = Worst("no tensor", 0.0)
    for name in dict.fromkeys([*left, *right]):
        error = math.inf
        if name in left and name in right:
            error = norm(left[name] - right[name]) / max(norms[name] + floor, 1e-300)
        if not error <= found.error:
            found = Worst(name, error)
    return found
