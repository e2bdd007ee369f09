"""Policy gradients: PPO, GRPO and their family, on the tokens sampled in a rollout.

    PolicyGradient   the loss: policy term, KL term, entropy term, value term
    SURROGATES       the policy term's cost of a token, one function and one entry each
    Kl, estimate     the divergence from the reference
    Correction       weights for the difference between the engine that sampled and the trainer
    Critic           the value term

The surrogates. With a sampled token's log-ratio u = log pi - log old, its ratio r = e^u, its advantage A, the bounds
low and high, and clip(x) = x held between 1 - low and 1 + high, the cost, to be minimized:

    clip         -min(r A, clip(r) A)                       PPO, arXiv 1707.06347, eq. 7; high apart from low: DAPO's
                                                            clip-higher, 2503.14476. With a dual clip c, not below c A
                                                            where A < 0: 1912.09729 (TRL's delta)
    gspo         the same of s = e^(mean of u over the sample's targets)
                                                            GSPO, arXiv 2507.18071, eq. 5 to 7
    gspo_token   the same of sg(s) r / sg(r): the sequence's ratio, with each token's own gradient
                                                            GSPO-token, eq. 13 to 14
    cispo        -sg(clip(r)) A log pi                      CISPO, MiniMax-M1, arXiv 2506.13585, eq. 4 to 5. low = 1 is
                                                            no lower bound; 1 + high is TRL's epsilon_high
    sapo         -(4 / t) sigmoid(t (r - 1)) A, with one t where A > 0 and another elsewhere
                                                            SAPO, arXiv 2511.20347
    gmpo         -e^(mean of v over the sample's targets) A, v = u held between -low and high on the side on which clip
                 would hold it: min(u, held u) where A > 0, else max
                                                            GMPO, arXiv 2507.20673: bounds of log-ratios
    reinforce    -A log pi                                  REINFORCE (Williams, 1992): reads no ratio

sg: a constant of the gradient. Where the policy is the old one, u = 0, all have the gradient of reinforce; gspo and
gmpo that of the mean of A over the sample, which equals A where all of a sample's tokens have one advantage.

r is e^u up to e^30 and continues along its tangent from there: values and gradients are finite for any log-ratio.

Groups and rewards are unknown here: losses/advantages.py computes advantages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from taut.errors import ConfigError
from taut.losses.loss import STEEPEST, Loss, Metrics, Unit, mean, relative_power
from taut.losses.settings import Average, CorrectionKind, CorrectionLevel, KlGradient, KlValue
from taut.types import LossSum, Packed, Sample, Scores, Wants

# -- surrogates ------------------------------------------------------------------------------------


class Bounds(NamedTuple):
    """Constants of the surrogates."""

    low: float
    high: float
    dual: float | None = None
    """Dual clip of clip, gspo and gspo_token: the largest ratio that counts where the advantage is negative."""
    warm_positive: float = 1.0
    """sapo's temperature where the advantage is positive."""
    warm_negative: float = 1.05
    """sapo's temperature elsewhere."""


class Choices(NamedTuple):
    """The sampled tokens of a micro-batch."""

    logp_N: Tensor
    log_ratio_N: Tensor
    """u: log pi - log old."""
    advantage_N: Tensor
    packed: Packed
    bounds: Bounds

    def weighted(self, weight_N: Tensor) -> Choices:
        """Keep the values, and multiply the gradient that reaches each token's log-probability by its weight."""
        step_N = self.logp_N - self.logp_N.detach()
        return self._replace(
            logp_N=self.logp_N.detach() + weight_N * step_N,
            log_ratio_N=self.log_ratio_N.detach() + weight_N * step_N,
        )


class Cost(NamedTuple):
    """The cost of each token, and where its ratio was clipped."""

    cost_N: Tensor
    ratio_N: Tensor | None = None
    """The ratio that was compared with the bounds, without gradient; None for a surrogate without a ratio."""
    low_N: Tensor | None = None
    """Tokens whose ratio is held by the lower bound."""
    high_N: Tensor | None = None
    """Tokens whose ratio is held by the upper bound."""


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
    """An entry of ``SURROGATES``."""

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
"""name -> surrogate. Every entry is held to tests/invariants and tests/unit/losses."""


# -- divergence from the reference -----------------------------------------------------------------


class Kl(NamedTuple):
    """The term that keeps the policy close to the reference."""

    coef: float
    gradient: KlGradient = "k2"
    """The estimator of the term."""
    value: KlValue = "k3"
    """The estimator of the metric."""


def estimate(log_ratio: Tensor, kind: KlValue) -> Tensor:
    """An estimate of KL(pi || ref) from u = log pi - log ref of tokens drawn from pi (J. Schulman, Approximating KL
    divergence, 2020):

        k1    u                   its mean is the KL; can be negative; the largest variance
        k2    u^2 / 2             never negative; its mean is the KL to second order only
        k3    e^-u - 1 + u        never negative; its mean is the KL; less variance than k1 where the two are near

    An estimator's value does not determine its gradient, because tokens are drawn from the policy that is
    differentiated (arXiv 2506.09477, 2512.21852). The gradient of KL is E[u g], g the gradient of log pi. That of each
    estimator as a term of the loss:

        k1    g                   mean 0: noise alone, so no term of the loss uses it
        k2    u g                 the gradient of KL, token by token
        k3    (1 - e^-u) g        biased: the gradient of KL(ref || pi), near u g where u is small. GRPO's
                                  (DeepSeekMath, arXiv 2402.03300, eq. 4) and TRL's

    Tokens drawn from an older policy are weighted by r = pi / old, a constant: the term of k2 is r k2, of gradient r u
    g, unbiased for them too. (r k3 with r differentiated has the same gradient, also where r is 1: DeepSeek-V3.2, arXiv
    2512.02556; TRL's use_bias_correction_kl.) The term of k3 is unweighted, as in GRPO.

    "Token by token": each token is charged for its own divergence, given its prefix. Its effect on the divergence of
    later tokens is not in a term of the loss but in the reward: there the penalty -coef * u of every token
    (``penalty``) becomes part of the return, and the gradient of the policy term is that of the divergence of whole
    sequences (Ziegler et al., arXiv 1909.08593). A divergence of whole distributions is distillation
    (models/teacher.py).
    """
    match kind:
        case "k1":
            return log_ratio
        case "k2":
            return log_ratio**2 / 2
        case "k3":
            return relative_power(-log_ratio, 1.0) + log_ratio


def penalty(logp_N: Tensor, ref_logp_N: Tensor, coef: float) -> Tensor:
    """The reward penalty of each token for its divergence: -coef * (log pi - log ref)."""
    return -coef * (logp_N - ref_logp_N)


def adapted(coef: float, *, observed: float, target: float) -> float:
    """The KL coefficient after a rollout that diverged by ``observed`` nats (arXiv 1909.08593, 2.2):

        coef * (1 + e / 10),    e = observed / target - 1, held between -0.2 and 0.2

    Ten rollouts that are far off change it by a fifth.
    """
    error = min(max(observed / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error / 10.0)


def entropy_coefs(
    coef: float, *, observed: float, target: float, step: float
) -> tuple[float, float]:
    """(the entropy coefficient of a rollout of which ``observed`` nats a token were sampled, the state after it), from
    the state c before it: Skywork-OR1, arXiv 2505.22312, 3.2.3:

        coefficient = c where observed <= target, else 0
        c afterwards = c + step where observed < target, else c - step, at least 0
    """
    return coef if observed <= target else 0.0, max(
        0.0, coef + (step if observed < target else -step)
    )


# -- difference between engine and trainer ---------------------------------------------------------

FAR = 1.0
"""Nats: the threshold of ``engine/far``."""


class Correction(NamedTuple):
    """Weights of the policy term for the difference between the engine that sampled and the trainer that learns.

    Two programs give one token two log-probabilities. With d = old - engine, old being the trainer's log-probability
    when the rollout was sampled, a token was drawn e^d times too seldom. The level defines the weight w:

        token        w = e^d of each token
        sequence     w = e^(sum of d over the sample's targets)         the exact weight of a whole sample
        geometric    w = e^(mean of d over the sample's targets)        its geometric mean per token

    The kind defines how it is used:

        truncated    min(max(w, floor), cap)                 TIS (F. Yao et al., Your efficient RL framework secretly
                                                             brings you off-policy RL training, 2025), of tokens
        masked       w, 0 where it is not between floor and cap
                                                             MIS (J. Liu et al., When speed kills stability, 2025), of
                                                             samples; IcePop (Ring-1T, arXiv 2510.18855), of tokens

    With a veto all weights of a sample are 0 where e^d of one of its tokens is below it: the engine drew a token that
    the trainer all but excludes, and what follows it is an answer to a mistake (verl's rollout_token_veto_threshold,
    1e-4). A mean over the sample does not see a single such token.

    The product over a sample fades with its length n: noise of s nats a token gives its logarithm a variance of n s^2
    around a mean of -n s^2 / 2. At s = 0.02 and n = 16,384 weights below a cap of 2 average 0.16, and an exact engine
    teaches next to nothing. The geometric mean has a spread of s / sqrt(n) and so judges answers of any length by the
    same bounds. It is not the importance weight of the sample: it rejects answers that the two programs see
    differently, and leaves the others as they are.

    Weights are constants of the gradient; ``PolicyGradient`` defines how they enter it. A token without an engine
    log-probability (NaN) has d = 0 and is in no metric.
    """

    kind: CorrectionKind = "none"
    level: CorrectionLevel = "token"
    cap: float = 2.0
    floor: float = 0.0
    veto: float = 0.0
    """0: none."""


def weights(difference_N: Tensor, packed: Packed, correction: Correction) -> Tensor:
    """The weight of each token, [N], a constant."""
    difference_N = difference_N.detach()
    weight_N = _bounded(_raw(difference_N, packed, correction), correction)
    return weight_N.masked_fill(vetoed(difference_N, packed, correction), 0.0)


def vetoed(difference_N: Tensor, packed: Packed, correction: Correction) -> Tensor:
    """bool [N]: the tokens of samples with a token below the veto."""
    is_below_N = difference_N.nan_to_num(nan=0.0).exp() < correction.veto
    return (packed.by_sample(is_below_N.to(packed.weight_N)) > 0)[packed.row_N]


def _raw(difference_N: Tensor, packed: Packed, correction: Correction) -> Tensor:
    """The weight of each token before cap, floor and veto."""
    difference_N = difference_N.nan_to_num(nan=0.0)
    match correction.level:
        case "token":
            pass
        case "sequence":
            difference_N = packed.by_sample(difference_N).index_select(0, packed.row_N)
        case "geometric":
            difference_N = mean_of_sample(difference_N, packed)
    return difference_N.clamp(max=STEEPEST).exp()


def _bounded(weight_N: Tensor, correction: Correction) -> Tensor:
    """The weights within cap and floor, as the kind of correction treats the others."""
    match correction.kind:
        case "none":
            return weight_N
        case "truncated":
            return weight_N.clamp(correction.floor, correction.cap)
        case "masked":
            is_out_N = (weight_N < correction.floor) | (weight_N > correction.cap)
            return weight_N.masked_fill(is_out_N, 0.0)


@torch.no_grad()
def engine_metrics(difference_N: Tensor, packed: Packed, correction: Correction) -> Metrics:
    """The difference between engine and trainer, over the tokens with both log-probabilities.

    ``engine/kl`` is KL(engine || trainer) by k3, ``engine/kl_k1`` by k1, both per token. ``engine/weight`` and
    ``engine/weight_square`` are means over tokens of the weight and its square, after cap and floor.
    """
    is_known_N = ~difference_N.isnan()
    raw_N = _raw(difference_N.double(), packed, correction)
    used_N = weights(difference_N.double(), packed, correction) * is_known_N
    d = difference_N.masked_fill(~is_known_N, 0.0).double()
    count = is_known_N.sum().double()
    sums = {
        "difference": d.abs().sum(),
        "difference_square": (d**2).sum(),
        "far": (d.abs() > FAR).sum(),
        "kl": estimate(-d, "k3").sum(),
        "kl_k1": -d.sum(),
        "weight": used_N.sum(),
        "weight_square": (used_N**2).sum(),
    }
    if correction.kind != "none":
        sums["corrected"] = ((used_N != raw_N) & is_known_N).sum()
    if correction.veto:
        sums["vetoed"] = (vetoed(difference_N, packed, correction) & is_known_N).sum()
    return {f"engine/{name}": (total, count) for name, total in sums.items()}


def largest_difference(difference_N: Tensor) -> Tensor:
    """The largest |old - engine| in nats; 0 where none is known. It is no metric: those are sums."""
    if not difference_N.numel():
        return difference_N.new_zeros(())
    return difference_N.detach().abs().masked_fill(difference_N.isnan(), 0.0).max()


def effective_share(metrics: Mapping[str, float]) -> float | None:
    """The effective sample size per token, (sum w)^2 / (n sum w^2), from 0 (all are masked) to 1, from a step's
    metrics; None where these have no weights.
    """
    square = metrics.get("engine/weight_square")
    if square is None:
        return None
    return metrics["engine/weight"] ** 2 / square if square > 0 else 0.0


# -- value term ------------------------------------------------------------------------------------


class Critic(NamedTuple):
    """The critic's term: V against the return R at each read of the scalar head, a state in which a token was chosen.

        1/2 (V - R)^2
        1/2 max((V - R)^2, (V' - R)^2),    V' = V held within clip of V_old    with a clip: PPO's code, arXiv 1707.06347

    V_old is the critic's value when training on the rollout began. The sum is divided by the number of reads.
    """

    coef: float = 0.1
    clip: float | None = None


def value_cost(scores: Scores, packed: Packed, critic: Critic) -> tuple[Tensor, Metrics]:
    """coef times the sum over reads, and the metrics."""
    assert scores.scalar_R is not None, "the loss needs the scalar head"
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
    wide_return_R, wide_error_R = packed.read_values["return"].double(), error_R.double()
    metrics |= {
        "value/mean": mean(value_R),
        "value/error": mean(wide_error_R),
        "value/error_square": mean(wide_error_R**2),
        "return/mean": mean(wide_return_R),
        "return/square": mean(wide_return_R**2),
    }
    return critic.coef * 0.5 * square_R.sum(), metrics


def explained_variance(metrics: Mapping[str, float]) -> float | None:
    """1 - Var(R - V) / Var(R), from a step's metrics: 1 for a perfect critic, 0 for a useless one, below 0 for a
    misleading one. None without a critic, or where all returns are equal but for rounding.
    """
    if "return/square" not in metrics:
        return None
    square = metrics["return/square"]
    spread = square - metrics["return/mean"] ** 2
    unexplained = metrics["value/error_square"] - metrics["value/error"] ** 2
    return 1.0 - unexplained / spread if spread > 1e-9 * square else None


# -- the loss --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicyGradient(Loss):
    """The policy-gradient loss:

        sum over targets of  share * c * cost                    cost: a surrogate
            + kl_coef * sum of share * divergence estimate
            - entropy_coef * sum of weight_N * entropy           divided by the step's sum of weight_N; with
                                                                 ``adapts_entropy`` each sample's value entropy_coef
            + the value term

    c is the correction's weight, 1 without a correction. It multiplies the value of a token's
    cost, and every gradient that reaches this token's log-probability. Where a token's cost depends on its own
    log-probability alone, that is the product c * cost. With gspo all costs of a sample depend on all of its
    log-probabilities, and the product would give every token the sample's mean weight. Here a token of weight 0 gets no
    gradient from the policy term. It still counts in the sample's length and in the ratio s, as a constant: so it has a
    part in how large the gradient of the other tokens is, and in whether the sample is clipped. gmpo refuses weights of
    tokens: its ratio is a product, which one weight of 0 would make 0.

    ``average`` defines a token's share, and the divisor of the sums:

        token       weight_N, by the step's sum of weight_N      all tokens count alike: DAPO, arXiv 2503.14476, eq. 8
        sequence    weight_N / (sum of weight_N over the sample), by the number of samples
                                                                 all samples count alike: GRPO, arXiv 2402.03300, eq. 3
        constant    weight_N / constant_length, by the number of samples
                                                                 no sample's length counts: Dr. GRPO, arXiv 2503.20783

    Streams: ``advantage_N``; ``old_logp_N``, the trainer's log-probabilities when training on the rollout began;
    ``engine_logp_N``, the engine's (NaN: unknown); ``ref_logp_N``, the reference's.

    ``is_fresh``: the rollout is the policy's own, and trained on once: old is the policy itself, held constant, so
    that every ratio is 1, nothing is clipped and the gradient is REINFORCE's. The policy term is then linear in logp
    with weights known in advance; without other terms, correction and entropy metric its gradient is formed in the
    forward (``linear_weights``).

    ``is_bypassed``: old is the engine: its log-probabilities are those of the ratio, and the trainer's own at the start
    are neither computed nor read. Then a ratio is 1 where engine and trainer agree and the policy has not moved; the
    surrogate's bounds hold both. The metrics of the difference compare the policy with the engine, so that the monitor
    of that difference (rl/monitors.py) guards what is taken for granted. A weight for it would count it twice.

    Metrics are means over tokens. ``entropy_estimate`` is the mean of -log pi, which on a policy's own tokens estimates
    its entropy at no cost. Tokens that an earlier policy q drew are weighted by w = pi / q, or the mean would
    be the cross entropy of q and pi, which rises as the two part:

        entropy_estimate = sum of w * (-log pi) / sum of w

    Both sums are unbiased, n times the entropy and n; their quotient has a bias of order 1 / n and a smaller variance
    than the first sum over n. q is the engine's log-probability of the token, else old. It is the entropy after the
    prefixes that q drew. ``ratio`` is the surrogate's (a sample's where it has one), ``clip/low`` and ``clip/high`` are
    the shares of tokens that it clips; ``old/kl`` and ``old/kl_k1`` are KL(old || pi), by k3 and k1.
    """

    is_cost: ClassVar[bool] = False

    surrogate: str = "clip"
    """A name of ``SURROGATES``."""
    bounds: Bounds = Bounds(0.2, 0.28)  # noqa: RUF009 (a NamedTuple)
    average: Average = "token"
    constant_length: int | None = None
    """Divisor of average="constant"."""
    is_fresh: bool = True
    has_engine_logp: bool = False
    is_bypassed: bool = False
    correction: Correction = Correction()  # noqa: RUF009 (a NamedTuple)
    kl: Kl | None = None
    entropy_coef: float = 0.0
    adapts_entropy: bool = False
    entropy: bool = False
    """Report the entropy as a metric; always on where it has a coefficient."""
    critic: Critic | None = None
    temperature: float = 1.0
    """Temperature at which the tokens were sampled."""

    def __post_init__(self) -> None:
        """Values without a meaning, which the section of a run refuses (methods/policy.py)."""
        low, high, dual = self.bounds[:3]
        surrogate, name = SURROGATES[self.surrogate], self.surrogate
        if surrogate.is_held:
            assert min(low, high) > 0, f"bounds {low:g} and {high:g}"
            assert low <= 1 or name == "gmpo", f"a ratio is not below 0: bound {low:g}"
        if dual is not None:
            assert surrogate.is_dual and dual > 1 + high, f"{name} with dual clip {dual:g}"
        assert (self.average == "constant") == (self.constant_length is not None), "a length"
        correction, kind = self.correction, self.correction.kind
        if self.is_bypassed:
            assert self.has_engine_logp and not self.is_fresh, "the ratio is to the engine's"
            assert kind == "none", "ratios are of policy to engine already"
        if kind != "none":
            if not self.has_engine_logp:
                raise ConfigError(
                    f"found rollout_correction={kind} with an engine that gives no log-probabilities; expected an "
                    "engine that does; set rollout_correction=none, or use another engine"
                )
            assert 0 <= correction.floor <= 1 <= correction.cap, "1 is no difference"
            # one token of weight 0 would make gmpo's product over the answer 0
            assert name != "gmpo" or correction.level != "token", "gmpo with weights of tokens"

    @property
    def units(self) -> Mapping[str, Unit]:
        averaged: Unit = "token" if self.average == "token" else "sequence"
        units: dict[str, Unit] = {"policy": averaged}
        if self.kl:
            units["kl"] = averaged
        if self.entropy_coef or self.adapts_entropy:
            units["entropy"] = "token"
        if self.critic:
            units["value"] = "read"
        return units

    @property
    def needs(self) -> tuple[str, ...]:
        streams = {
            "advantage_N": True,
            "old_logp_N": not self.is_fresh and not self.is_bypassed,
            "engine_logp_N": self.has_engine_logp,
            "ref_logp_N": self.kl is not None,
        }
        return tuple(name for name, is_read in streams.items() if is_read)

    @property
    def needs_values(self) -> tuple[str, ...]:
        return ("entropy_coef",) if self.adapts_entropy else ()

    @property
    def wants(self) -> Wants:
        return Wants(
            entropy=self.entropy or self.adapts_entropy or self.entropy_coef != 0,
            scalar=self.critic is not None,
            temperature=self.temperature,
        )

    @property
    def _surrogate(self) -> Surrogate:
        return SURROGATES[self.surrogate]

    def _choices(self, scores: Scores, packed: Packed) -> tuple[Choices, Tensor]:
        """The sampled tokens, and the old policy's log-probabilities."""
        logp_N = scores.logp_N
        old = "engine_logp_N" if self.is_bypassed else "old_logp_N"
        old_N = logp_N.detach() if self.is_fresh else packed.streams[old].to(logp_N)
        advantage_N = packed.streams["advantage_N"].to(logp_N)
        return Choices(logp_N, logp_N - old_N, advantage_N, packed, self.bounds), old_N

    @torch.no_grad()
    def token_values(self, scores: Scores, packed: Packed) -> Mapping[str, Tensor]:
        """``ratio_N``, and ``clipped_N``: -1 where the lower bound holds it, 1 where the upper one does, else 0."""
        if self.is_fresh:
            return {}
        cost = self._surrogate.cost(self._choices(scores, packed)[0])
        if cost.ratio_N is None:
            return {}
        values = {"ratio_N": cost.ratio_N}
        if cost.low_N is not None and cost.high_N is not None:
            values["clipped_N"] = cost.high_N.float() - cost.low_N.float()
        return values

    def __call__(self, scores: Scores, packed: Packed) -> LossSum:
        # the policy term, weighted where engine and trainer differ
        logp_N = scores.logp_N
        chosen, old_N = self._choices(scores, packed)
        difference_N = None  # of the trainer's and the engine's log-probabilities
        if self.has_engine_logp:
            trainer_N = logp_N.detach() if self.is_bypassed else old_N
            difference_N = trainer_N - packed.streams["engine_logp_N"].to(logp_N)
        share_N = self._share(packed).to(logp_N)
        if difference_N is None or self.correction.kind == "none":
            cost = self._surrogate.cost(chosen)
            cost_N = cost.cost_N
        else:
            weight_N = weights(difference_N, packed, self.correction)
            cost = self._surrogate.cost(chosen.weighted(weight_N))
            cost_N = cost.cost_N + (weight_N - 1.0) * cost.cost_N.detach()
        metrics, largest = self._metrics(chosen, cost, difference_N), {}
        if difference_N is not None:
            metrics |= engine_metrics(difference_N, packed, self.correction)
            largest["engine/largest"] = largest_difference(difference_N)
        terms = {"policy": (share_N * cost_N).sum()}

        # the divergence from the reference
        if self.kl:
            log_ratio_N = logp_N - packed.streams["ref_logp_N"].to(logp_N)
            cost_N = estimate(log_ratio_N, self.kl.gradient)
            if self.kl.gradient == "k2":
                cost_N = ratio_of(chosen.log_ratio_N.detach()) * cost_N
            terms["kl"] = self.kl.coef * (share_N * cost_N).sum()
            metrics["kl"] = mean(estimate(log_ratio_N.detach(), self.kl.value))

        # the entropy, and the critic's term
        if self.wants.entropy:
            assert scores.entropy_N is not None, "the loss needs the entropy"
            metrics["entropy"] = mean(scores.entropy_N)
            entropy_N = (packed.weight_N * scores.entropy_N).to(logp_N)
            if self.adapts_entropy:
                coef_N = packed.values["entropy_coef"].to(logp_N)[packed.row_N]
                terms["entropy"] = -(coef_N * entropy_N).sum()
            elif self.entropy_coef:
                terms["entropy"] = -self.entropy_coef * entropy_N.sum()
        if self.critic:
            terms["value"], value_metrics = value_cost(scores, packed, self.critic)
            metrics |= value_metrics
        return LossSum(terms, metrics, largest)

    def derived(self, metrics: Mapping[str, float]) -> dict[str, float]:
        values = {
            "engine/effective": effective_share(metrics),
            "value/explained": explained_variance(metrics),
        }
        return {name: value for name, value in values.items() if value is not None}

    def is_silent(self, sample: Sample) -> bool:
        """Samples whose advantages are all 0, if no other term or metric needs the forward."""
        if self.kl or self.critic or self.wants.entropy:
            return False
        return not sample.streams["advantage_N"].any()

    def linear_weights(self, packed: Packed) -> dict[str, Tensor] | None:
        is_corrected = self.correction.kind != "none"
        if not self.is_fresh or is_corrected or self.kl or self.critic or self.wants.entropy:
            return None
        advantage_N = packed.streams["advantage_N"]
        if self._surrogate.is_of_sample:
            advantage_N = mean_of_sample(advantage_N, packed)
        return {"policy": -self._share(packed) * advantage_N}

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
        if difference_N is not None and not self.is_bypassed:
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
