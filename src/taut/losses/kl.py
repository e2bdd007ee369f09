"""The divergence of a policy from a reference, estimated from sampled tokens: as a value, as a gradient, as a reward.

With u = log pi - log ref of a token drawn from pi (J. Schulman, Approximating KL divergence, 2020):

    k1    u                   mean KL(pi || ref), can be negative, the widest spread
    k2    u^2 / 2             never negative; its mean is KL to second order only
    k3    e^-u - 1 + u        never negative; mean KL, narrower than k1 where the two are near

A value's name says nothing of its gradient, because tokens are drawn from the policy that is differentiated
(arXiv 2506.09477, 2512.21852). The gradient of KL is E[u g], g the gradient of log pi. That of each estimator as a term
of the loss:

    k1    g                   mean 0: no force at all, only noise. No term of the loss is made of it
    k2    u g                 the gradient of KL, token by token
    k3    (1 - e^-u) g        biased: the gradient of KL(ref || pi), near u g where u is small. GRPO's (DeepSeekMath,
                              arXiv 2402.03300, eq. 4) and TRL's

Tokens drawn from an older policy are weighted by r = pi / old, a constant: the term of k2 is r k2, of gradient r u g,
right for them too. (r k3 with r differentiated has the same gradient, also where r is 1: DeepSeek-V3.2, arXiv
2512.02556; TRL's use_bias_correction_kl.) The term of k3 is as GRPO has it, without a weight.

"Token by token": each token is charged for its own divergence, the prefixes being what they are. What a token does to
the divergence of those after it is not in a term of the loss; it is in the reward. There the penalty -coef * u of every
token (``penalty``) becomes part of the return, and the gradient of the policy term is that of the divergence of whole
sequences (Ziegler et al., arXiv 1909.08593).

It does not estimate a divergence from the whole distribution: that is distillation (models/divergence.py).

May import torch and losses.answers.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import Tensor

from taut.losses.answers import relative_power

KlValue: TypeAlias = Literal["k1", "k2", "k3"]
KlGradient: TypeAlias = Literal["k2", "k3"]


def estimate(log_ratio: Tensor, kind: KlValue) -> Tensor:
    """k1, k2 or k3 of log-ratios of tokens drawn from the numerator."""
    match kind:
        case "k1":
            return log_ratio
        case "k2":
            return log_ratio**2 / 2
        case "k3":
            return relative_power(-log_ratio, 1.0) + log_ratio


def penalty(logp_N: Tensor, ref_logp_N: Tensor, coef: float) -> Tensor:
    """What a token's reward loses by its divergence: -coef * (log pi - log ref). Over a sample, its sum."""
    return -coef * (logp_N - ref_logp_N)


def adapted(coef: float, *, observed: float, target: float, horizon: float = 10.0) -> float:
    """The coefficient after a roll-out that diverged by ``observed`` nats (arXiv 1909.08593, 2.2):

        coef * (1 + e / horizon),    e = observed / target - 1, held between -0.2 and 0.2

    Ten roll-outs that are far off change it by a fifth.
    """
    error = min(max(observed / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error / horizon)
