"""What a sampled token costs: the surrogates of policy gradients. One function and one entry for each.

With a sampled token's log-ratio u = log pi - log old, its ratio r = e^u, its advantage A, the bounds low and high, and
clip(x) = x held between 1 - low and 1 + high. The cost, whose gradient goes down:

    clip         -min(r A, clip(r) A)                       PPO, arXiv 1707.06347, eq. 7; high apart from low: DAPO's
                                                            clip-higher, 2503.14476. With a dual clip c, not below c A
                                                            where A < 0: 1912.09729 (TRL's delta)
    gspo         the same of s = e^(mean of u over the sample's targets)
                                                            GSPO, arXiv 2507.18071, eq. 5 to 7
    gspo_token   the same of sg(s) r / sg(r): the sequence's ratio, with each token's own gradient
                                                            GSPO-token, eq. 13 to 14
    cispo        -sg(clip(r)) A log pi                      CISPO, MiniMax-M1, arXiv 2506.13585, eq. 4 to 5. low = 1 is
                                                            no lower bound; 1 + high is TRL's epsilon_high
    sapo         -(4 / t) sigmoid(t (r - 1)) A, t another one where A > 0 than elsewhere
                                                            SAPO, arXiv 2511.20347
    gmpo         -e^(mean of v over the sample's targets) A, v = u held between -low and high on the side on which clip
                 would hold it: min(u, held u) where A > 0, else max
                                                            GMPO, arXiv 2507.20673: bounds of log-ratios
    reinforce    -A log pi                                  REINFORCE (Williams, 1992): reads no ratio

sg: a constant of the gradient. Where the policy is the old one, u = 0, every one has the gradient of reinforce; gspo
and gmpo have it of the mean of A over the sample, which is A where it is one number a sample.

r is e^u up to e^30 and goes on along its tangent from there: values and gradients are finite for any log-ratio.

May import types, torch and losses.answers. losses.policy imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from taut.losses.answers import relative_power
from taut.types import Packed


class Bounds(NamedTuple):
    """The constants of the surrogates."""

    low: float
    high: float
    dual: float | None = None
    """Of clip, gspo and gspo_token: the largest ratio that counts where the advantage is negative."""
    warm_positive: float = 1.0
    """Of sapo: its temperature where the advantage is positive."""
    warm_negative: float = 1.05
    """Of sapo: its temperature elsewhere."""


class Choices(NamedTuple):
    """The sampled tokens of a micro-batch."""

    logp_N: Tensor
    log_ratio_N: Tensor
    """u: log pi - log old."""
    advantage_N: Tensor
    packed: Packed
    bounds: Bounds

    def weighted(self, weight_N: Tensor) -> Choices:
        """The same values; the gradient that reaches each token's log-probability is multiplied by its weight."""
        step_N = self.logp_N - self.logp_N.detach()
        return self._replace(
            logp_N=self.logp_N.detach() + weight_N * step_N,
            log_ratio_N=self.log_ratio_N.detach() + weight_N * step_N,
        )


class Cost(NamedTuple):
    """What the tokens cost, and what was held."""

    cost_N: Tensor
    ratio_N: Tensor | None = None
    """The ratio that was compared with the bounds, without gradient; None where there are none."""
    low_N: Tensor | None = None
    """Where it was held from below."""
    high_N: Tensor | None = None


def ratio_of(log_ratio: Tensor) -> Tensor:
    """e^u, along its tangent beyond e^30."""
    return relative_power(log_ratio, 1.0) + 1.0


def mean_of_sample(value_N: Tensor, packed: Packed) -> Tensor:
    """The weighted mean over each sample's targets, at each of them."""
    weight_N = packed.weight_N.to(value_N)
    total_S = packed.by_sample(weight_N * value_N)
    return (total_S / packed.by_sample(weight_N)).index_select(0, packed.row_N)


def _held(ratio_N: Tensor, advantage_N: Tensor, bounds: Bounds) -> Cost:
    """PPO's pessimistic minimum."""
    low, high = 1.0 - bounds.low, 1.0 + bounds.high
    free_N = ratio_N if bounds.dual is None else ratio_N.clamp(max=bounds.dual)
    gain_N = torch.minimum(free_N * advantage_N, ratio_N.clamp(low, high) * advantage_N)
    seen_N = ratio_N.detach()
    is_low_N = (seen_N < low) & (advantage_N < 0)
    return Cost(-gain_N, seen_N, is_low_N, (seen_N > high) & (advantage_N > 0))


def _clip(chosen: Choices) -> Cost:
    return _held(ratio_of(chosen.log_ratio_N), chosen.advantage_N, chosen.bounds)


def _gspo(chosen: Choices) -> Cost:
    ratio_N = ratio_of(mean_of_sample(chosen.log_ratio_N, chosen.packed))
    return _held(ratio_N, chosen.advantage_N, chosen.bounds)


def _gspo_token(chosen: Choices) -> Cost:
    ratio_N = ratio_of(mean_of_sample(chosen.log_ratio_N.detach(), chosen.packed))
    own_N = (chosen.logp_N - chosen.logp_N.detach()).exp()
    return _held(ratio_N * own_N, chosen.advantage_N, chosen.bounds)


def _cispo(chosen: Choices) -> Cost:
    low, high = 1.0 - chosen.bounds.low, 1.0 + chosen.bounds.high
    ratio_N = ratio_of(chosen.log_ratio_N.detach())
    cost_N = -ratio_N.clamp(low, high) * chosen.advantage_N * chosen.logp_N
    return Cost(cost_N, ratio_N, ratio_N < low, ratio_N > high)


def _sapo(chosen: Choices) -> Cost:
    ratio_N, bounds = ratio_of(chosen.log_ratio_N), chosen.bounds
    warm_N = torch.full_like(ratio_N, bounds.warm_negative)
    warm_N = warm_N.masked_fill(chosen.advantage_N > 0, bounds.warm_positive)
    gain_N = torch.sigmoid(warm_N * (ratio_N - 1.0)) * (4.0 / warm_N) * chosen.advantage_N
    return Cost(-gain_N, ratio_N.detach())


def _gmpo(chosen: Choices) -> Cost:
    log_ratio_N, is_good_N = chosen.log_ratio_N, chosen.advantage_N > 0
    low, high = -chosen.bounds.low, chosen.bounds.high
    held_N = torch.where(is_good_N, log_ratio_N.clamp(max=high), log_ratio_N.clamp(min=low))
    ratio_N = ratio_of(mean_of_sample(held_N, chosen.packed))
    seen_N = log_ratio_N.detach()
    is_high_N = (seen_N > high) & is_good_N
    is_low_N = (seen_N < low) & (chosen.advantage_N < 0)
    return Cost(-ratio_N * chosen.advantage_N, ratio_N.detach(), is_low_N, is_high_N)


def _reinforce(chosen: Choices) -> Cost:
    return Cost(-chosen.advantage_N * chosen.logp_N)


class Surrogate(NamedTuple):
    """One of them."""

    cost: Callable[[Choices], Cost]
    is_of_sample: bool = False
    """Whether a sample has one ratio, with a gradient to all of its tokens."""
    is_held: bool = True
    """Whether it reads low and high."""
    is_dual: bool = False
    """Whether it reads the dual clip."""


SURROGATES: dict[str, Surrogate] = {
    "clip": Surrogate(_clip, is_dual=True),
    "gspo": Surrogate(_gspo, is_of_sample=True, is_dual=True),
    "gspo_token": Surrogate(_gspo_token, is_dual=True),
    "cispo": Surrogate(_cispo),
    "sapo": Surrogate(_sapo, is_held=False),
    "gmpo": Surrogate(_gmpo, is_of_sample=True),
    "reinforce": Surrogate(_reinforce, is_held=False),
}
"""name -> what it is. Every entry is held to tests/invariants and tests/unit/losses."""
