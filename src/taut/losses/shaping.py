"""Shaping of rewards by facts of the path: pure functions, applied before advantages are made.

Each takes what the samples of a roll-out have, [S], and gives rewards, or what is added to them:

    unfinished      -penalty where a path did not stop of itself: its finish_reason says so, no id is searched for
    soft_overlong   0 up to limit - margin tokens, then falling to -1 at the limit       DAPO, arXiv 2503.14476, eq. 13
    length_cost     -coef * length / limit

An overlong filter (DAPO) is no shaping: samples that were cut are left out of the step, and count in no denominator.

``Scale`` is the running mean and spread of what rewards there were, merged roll-out by roll-out (Chan et al., 1979):
state of a checkpoint, three numbers.

May import types and torch only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from taut.types import FinishReason

NO_SPREAD = 1e-9
"""A spread that is less than this part of the mean (of 1 where that is smaller) is of rounding."""


def stopped(finish_reasons: Sequence[FinishReason]) -> Tensor:
    """bool [S]: which paths ended of themselves."""
    return torch.tensor([reason == "stop" for reason in finish_reasons], dtype=torch.bool)


def unfinished(finish_reasons: Sequence[FinishReason], penalty: float) -> Tensor:
    """What is added to the rewards of paths that were cut."""
    return -penalty * (~stopped(finish_reasons)).double()


def soft_overlong(length_S: Tensor, *, limit: int, margin: int) -> Tensor:
    """What is added for lengths that come near the limit: 0 to -1."""
    over_S = (length_S.double() - (limit - margin)) / margin
    return -over_S.clamp(0.0, 1.0)


def length_cost(length_S: Tensor, *, limit: int, coef: float) -> Tensor:
    """What is added for lengths, in proportion."""
    return -coef * length_S.double() / limit


def clip(reward_S: Tensor, size: float) -> Tensor:
    """Rewards held between -size and size."""
    return reward_S.clamp(-size, size)


@dataclass(frozen=True)
class Scale:
    """Mean and spread of rewards so far."""

    count: int = 0
    mean: float = 0.0
    square: float = 0.0
    """The sum of squared distances from the mean."""

    def merged(self, reward_S: Tensor) -> Scale:
        """With these rewards, too."""
        count, mean = reward_S.numel(), float(reward_S.mean()) if reward_S.numel() else 0.0
        square = float(((reward_S - mean) ** 2).sum())
        total, gap = self.count + count, mean - self.mean
        if total == 0:
            return self
        return Scale(
            total,
            self.mean + gap * count / total,
            self.square + square + gap**2 * self.count * count / total,
        )

    @property
    def deviation(self) -> float:
        """The standard deviation, with count - 1; 0 of fewer than two."""
        return math.sqrt(self.square / (self.count - 1)) if self.count > 1 else 0.0

    def scaled(self, reward_S: Tensor) -> Tensor:
        """The rewards by the spread; none, or one of rounding alone, divides nothing."""
        is_spread = self.deviation > NO_SPREAD * max(1.0, abs(self.mean))
        return reward_S / self.deviation if is_spread else reward_S
