"""The critic's term: what a state is said to be worth against what it came to.

    1/2 (V - R)^2
    1/2 max((V - R)^2, (V' - R)^2),    V' = V held within clip of V_old    with a clip: PPO's code, arXiv 1707.06347

at each read of the scalar head, a state in which a token was chosen: R its return, V_old what the critic said of it
when the roll-out began to be trained on. The sum is divided by the number of reads.

``explained_variance`` makes of the metrics 1 - Var(R - V) / Var(R): 1 is a critic that knows, 0 one that says nothing,
less than 0 one that misleads.

May import types, torch and losses.answers. losses.policy imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from taut.losses.answers import Metrics, mean
from taut.types import Packed, Scores


class Critic(NamedTuple):
    """The term's constants."""

    coef: float = 0.1
    clip: float | None = None


def value_cost(scores: Scores, packed: Packed, critic: Critic) -> tuple[Tensor, Metrics]:
    """coef times the sum over reads, and the metrics."""
    assert scores.scalar_R is not None, "the model was not asked for its scalar head"
    value_R = scores.scalar_R
    return_R = packed.read_values["return"].to(value_R)
    error_R = value_R - return_R
    square_R, metrics = error_R**2, {}
    if critic.clip is not None:
        old_R = packed.read_values["value"].to(value_R)
        held_R = old_R + (value_R - old_R).clamp(-critic.clip, critic.clip)
        held_square_R = (held_R - return_R) ** 2
        metrics["value/clipped"] = mean((held_square_R > square_R).double())
        square_R = torch.maximum(square_R, held_square_R)
    of_R, off_R = packed.read_values["return"].double(), error_R.double()
    metrics |= {
        "value/mean": mean(value_R),
        "value/error": mean(off_R),
        "value/error_square": mean(off_R**2),
        "return/mean": mean(of_R),
        "return/square": mean(of_R**2),
    }
    return critic.coef * 0.5 * square_R.sum(), metrics


def explained_variance(metrics: Mapping[str, float]) -> float | None:
    """Of a step's metrics; None where there is no critic, or all returns are one but for rounding."""
    if "return/square" not in metrics:
        return None
    square = metrics["return/square"]
    spread = square - metrics["return/mean"] ** 2
    left = metrics["value/error_square"] - metrics["value/error"] ** 2
    return 1.0 - left / spread if spread > 1e-9 * square else None
