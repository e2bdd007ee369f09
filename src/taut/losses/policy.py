"""Policy gradients: PPO, GRPO and their family, on the tokens that a roll-out sampled.

    sum over targets of  share * c * cost                    cost: a surrogate, losses/surrogates.py
        + kl_coef * sum of share * divergence estimate       losses/kl.py
        - entropy_coef * sum of weight_N * entropy           divided by the step's sum of weight_N
        + value                                              losses/value.py

c is the correction's weight (losses/correction.py), 1 where there is none. It multiplies the value of a token's cost,
and every gradient that reaches this token's log-probability. Where a token's cost depends on its own log-probability
alone, that is the product c * cost. With gspo all costs of a sample depend on all of its log-probabilities, and the
product would give every token the sample's mean weight. Here a token of weight 0 gets no gradient from the policy term.
It still counts in the sample's length and in the ratio s, as a constant: so it has a part in how large the gradient of
the other tokens is, and in whether the sample is clipped. gmpo refuses weights of tokens: its ratio is a product, which
one weight of 0 would make 0.

``average`` says what a token's share is, and what the sums are divided by:

    token       weight_N, by the step's sum of weight_N      every token counts alike: DAPO, arXiv 2503.14476, eq. 8
    sequence    weight_N / (sum of weight_N over the sample), by the number of samples
                                                             every sample counts alike: GRPO, arXiv 2402.03300, eq. 3
    constant    weight_N / constant_length, by the number of samples
                                                             no sample's length counts: Dr. GRPO, arXiv 2503.20783

Streams: ``advantage_N``; ``old_logp_N``, what the trainer said of the tokens when the roll-out began to be trained on;
``engine_logp_N``, what the engine said (NaN: nothing); ``ref_logp_N``, the reference's.

``is_fresh``: the roll-out is the policy's own, and trained on once: old is the policy itself, held constant, so that
every ratio is 1, nothing is clipped and the gradient is REINFORCE's. The policy term is then linear in logp with
weights known beforehand; where there is no other term, no correction and no entropy to report, its gradient is formed
in the forward (``linear_weights``).

Metrics are means over tokens. ``entropy_estimate`` is the mean of -log pi, of a policy's own tokens an estimate of its
entropy that costs nothing. Tokens that an earlier policy q drew are weighted by w = pi / q, or the mean would be the
cross entropy of q and pi, which rises as the two part:

    entropy_estimate = sum of w * (-log pi) / sum of w

Both sums are unbiased, n times the entropy and n; their quotient has a bias of order 1 / n and a smaller spread than
the first sum over n. q is what the engine said of the token, else old. It is the entropy after the prefixes that q
drew. ``ratio`` is the surrogate's (a sample's where it has one), ``clip/low`` and ``clip/high``
say how many tokens it held; ``old/kl`` and ``old/kl_k1`` are KL(old || pi), by k3 and k1.

It knows no groups and no rewards: losses/advantages.py makes the advantages.

May import types, errors, torch and its neighbours in losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from taut.errors import ConfigError
from taut.losses.answers import Metrics, mean
from taut.losses.correction import Correction, effective_share, engine_metrics, weights
from taut.losses.kl import KlGradient, KlValue, estimate
from taut.losses.loss import Loss, Unit
from taut.losses.surrogates import (
    SURROGATES,
    Bounds,
    Choices,
    Cost,
    Surrogate,
    mean_of_sample,
    ratio_of,
)
from taut.losses.value import Critic, explained_variance, value_cost
from taut.types import LossSum, Packed, Scores, Wants

Average: TypeAlias = Literal["token", "sequence", "constant"]


class Kl(NamedTuple):
    """The term that ties the policy to the reference."""

    coef: float
    gradient: KlGradient = "k2"
    """The estimator the term is made of."""
    value: KlValue = "k3"
    """The estimator of the metric."""


@dataclass(frozen=True)
class PolicyGradient(Loss):
    """See the module docstring."""

    surrogate: str = "clip"
    """A name of ``SURROGATES``."""
    bounds: Bounds = Bounds(0.2, 0.28)  # noqa: RUF009 (a NamedTuple)
    average: Average = "token"
    constant_length: int | None = None
    """Of average=constant."""
    is_fresh: bool = True
    has_engine_logp: bool = False
    correction: Correction = Correction()  # noqa: RUF009 (a NamedTuple)
    kl: Kl | None = None
    entropy_coef: float = 0.0
    entropy: bool = False
    """Whether the entropy is among the metrics; it is where it has a coefficient."""
    critic: Critic | None = None
    temperature: float = 1.0
    """What the tokens were sampled at."""

    def __post_init__(self) -> None:
        _require_sound(self)

    @property
    def units(self) -> Mapping[str, Unit]:
        averaged: Unit = "token" if self.average == "token" else "sequence"
        units: dict[str, Unit] = {"policy": averaged}
        if self.kl:
            units["kl"] = averaged
        if self.entropy_coef:
            units["entropy"] = "token"
        if self.critic:
            units["value"] = "read"
        return units

    @property
    def needs(self) -> tuple[str, ...]:
        asked = {
            "advantage_N": True,
            "old_logp_N": not self.is_fresh,
            "engine_logp_N": self.has_engine_logp,
            "ref_logp_N": self.kl is not None,
        }
        return tuple(name for name, is_read in asked.items() if is_read)

    @property
    def wants(self) -> Wants:
        return Wants(
            entropy=self.entropy or self.entropy_coef != 0,
            scalar=self.critic is not None,
            temperature=self.temperature,
        )

    @property
    def is_cost(self) -> bool:
        return False

    @property
    def _made(self) -> Surrogate:
        return SURROGATES[self.surrogate]

    def __call__(self, scores: Scores, packed: Packed) -> LossSum:
        chosen, difference_N = self._choices(scores, packed)
        share_N = self._share(packed).to(scores.logp_N)
        if difference_N is None or self.correction.kind == "none":
            cost = self._made.cost(chosen)
            cost_N = cost.cost_N
        else:
            weight_N = weights(difference_N, packed, self.correction)
            cost = self._made.cost(chosen.weighted(weight_N))
            cost_N = cost.cost_N + (weight_N - 1.0) * cost.cost_N.detach()
        metrics = self._metrics(chosen, cost, difference_N)
        if difference_N is not None:
            metrics |= engine_metrics(difference_N, packed, self.correction)
        terms = {"policy": (share_N * cost_N).sum()}
        if self.kl:
            cost_N, metrics["kl"] = _divergence(chosen, self.kl)
            terms["kl"] = self.kl.coef * (share_N * cost_N).sum()
        if self.wants.entropy:
            assert scores.entropy_N is not None, "the model was not asked for the entropy"
            metrics["entropy"] = mean(scores.entropy_N)
            if self.entropy_coef:
                entropy_N = (packed.weight_N * scores.entropy_N).to(scores.logp_N)
                terms["entropy"] = -self.entropy_coef * entropy_N.sum()
        if self.critic:
            terms["value"], of_value = value_cost(scores, packed, self.critic)
            metrics |= of_value
        return LossSum(terms, metrics)

    def derived(self, metrics: Mapping[str, float]) -> dict[str, float]:
        made = {
            "engine/effective": effective_share(metrics),
            "value/explained": explained_variance(metrics),
        }
        return {name: value for name, value in made.items() if value is not None}

    def linear_weights(self, packed: Packed) -> dict[str, Tensor] | None:
        is_corrected = self.correction.kind != "none"
        if not self.is_fresh or is_corrected or self.kl or self.critic or self.wants.entropy:
            return None
        advantage_N = packed.streams["advantage_N"]
        if self._made.is_of_sample:
            advantage_N = mean_of_sample(advantage_N, packed)
        return {"policy": -self._share(packed) * advantage_N}

    def _choices(self, scores: Scores, packed: Packed) -> tuple[Choices, Tensor | None]:
        """The sampled tokens, and what the trainer said of them less what the engine did."""
        logp_N = scores.logp_N
        old_N = logp_N.detach() if self.is_fresh else packed.streams["old_logp_N"].to(logp_N)
        advantage_N = packed.streams["advantage_N"].to(logp_N)
        chosen = Choices(logp_N, logp_N - old_N, advantage_N, packed, self.bounds)
        if not self.has_engine_logp:
            return chosen, None
        return chosen, old_N - packed.streams["engine_logp_N"].to(logp_N)

    def _share(self, packed: Packed) -> Tensor:
        weight_N = packed.weight_N
        match self.average:
            case "token":
                return weight_N
            case "sequence":
                return weight_N / packed.by_sample(weight_N).index_select(0, packed.row_N)
            case "constant":
                assert self.constant_length is not None
                return weight_N / self.constant_length

    @torch.no_grad()
    def _metrics(self, chosen: Choices, cost: Cost, difference_N: Tensor | None) -> Metrics:
        metrics: Metrics = {
            "advantage/mean": mean(chosen.advantage_N),
            "advantage/size": mean(chosen.advantage_N.abs()),
        }
        if self.is_fresh:
            return metrics | {"entropy_estimate": mean(-chosen.logp_N)}
        log_weight_N = chosen.log_ratio_N.double()
        if difference_N is not None:
            log_weight_N = log_weight_N + difference_N.nan_to_num(nan=0.0)
        weight_N = ratio_of(log_weight_N)
        metrics["entropy_estimate"] = (-weight_N * chosen.logp_N).sum(), weight_N.sum()
        backward_N = -chosen.log_ratio_N
        metrics["old/kl"] = mean(estimate(backward_N, "k3"))
        metrics["old/kl_k1"] = mean(backward_N)
        seen = {"ratio": cost.ratio_N, "clip/low": cost.low_N, "clip/high": cost.high_N}
        return metrics | {
            name: mean(value_N.double()) for name, value_N in seen.items() if value_N is not None
        }


def _divergence(chosen: Choices, kl: Kl) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The term's estimate at each token, and the metric."""
    logp_N = chosen.logp_N
    log_ratio_N = logp_N - chosen.packed.streams["ref_logp_N"].to(logp_N)
    cost_N = estimate(log_ratio_N, kl.gradient)
    if kl.gradient == "k2":
        cost_N = ratio_of(chosen.log_ratio_N.detach()) * cost_N
    return cost_N, mean(estimate(log_ratio_N.detach(), kl.value))


def _require_sound(loss: PolicyGradient) -> None:
    """Refuse values without a meaning. Keys are named as the configs have them."""
    low, high, dual = loss.bounds[:3]
    made, name = SURROGATES[loss.surrogate], loss.surrogate
    if made.is_held and min(low, high) <= 0:
        raise ConfigError(
            f"found clip_low={low:g} and clip_high={high:g}; expected more than 0; raise them"
        )
    if made.is_held and low > 1 and name != "gmpo":
        raise ConfigError(
            f"found clip_low={low:g} with loss={name}; expected at most 1: a ratio is not below 0; lower it"
        )
    if dual is not None and not made.is_dual:
        raise ConfigError(
            f"found dual_clip={dual:g} with loss={name}, which does not read it; expected one of "
            f"{', '.join(n for n, s in SURROGATES.items() if s.is_dual)}; leave it out, or name one of those"
        )
    if dual is not None and dual <= 1 + high:
        raise ConfigError(
            f"found dual_clip={dual:g} with clip_high={high:g}; expected more than 1 + clip_high: the largest "
            "ratio that counts against a bad answer; raise it"
        )
    if (loss.average == "constant") != (loss.constant_length is not None):
        raise ConfigError(
            f"found average={loss.average} with constant_length={loss.constant_length}; expected a length with "
            "average=constant and only there; set both, or neither"
        )
    _require_sound_correction(loss.correction, has_engine_logp=loss.has_engine_logp)
    if name == "gmpo" and loss.correction.kind != "none" and loss.correction.level == "token":
        raise ConfigError(
            "found correction_level=token with loss=gmpo, whose ratio is a product over the answer: one token of "
            "weight 0 would make it 0; expected geometric or sequence; set one, or leave correction_level out"
        )


def _require_sound_correction(how: Correction, *, has_engine_logp: bool) -> None:
    if how.kind == "none":
        return
    if not has_engine_logp:
        raise ConfigError(
            f"found correction={how.kind} with an engine that gives no log-probabilities; expected an engine "
            "that does; set correction=none, or use another engine"
        )
    if not 0 <= how.floor <= 1 <= how.cap:
        raise ConfigError(
            f"found correction_floor={how.floor:g} and correction_cap={how.cap:g}; expected 1, which is no "
            "difference, between them; set them so"
        )
