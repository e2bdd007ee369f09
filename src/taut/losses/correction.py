"""The difference between the engine that sampled and the trainer that learns: its weights, and how large it is.

Two programs give one token two log-probabilities. With d = old - engine, where old is the trainer's log-probability
when the roll-out was sampled, a token was drawn e^d times too seldom. The level says what a weight w is made of:

    token        w = e^d of each token
    sequence     w = e^(sum of d over the sample's targets)         the exact weight of a whole sample
    geometric    w = e^(mean of d over the sample's targets)        its geometric mean per token

    truncated    min(max(w, floor), cap)                 TIS (F. Yao et al., Your efficient RL framework secretly brings
                                                         you off-policy RL training, 2025), of tokens
    masked       w, 0 where it is not between floor and cap
                                                         MIS (J. Liu et al., When speed kills stability, 2025), of
                                                         samples; IcePop (Ring-1T, arXiv 2510.18855), of tokens

The product over a sample fades with its length n: noise of s nats a token gives its logarithm a variance of n s^2
around a mean of -n s^2 / 2. At s = 0.02 and n = 16,384 weights below a cap of 2 average 0.16, and an honest engine
teaches next to nothing. The geometric mean has a spread of s / sqrt(n) and so judges answers of any length by the same
bounds. It is not the importance weight of the sample: it rejects answers that the two programs see differently, and
leaves the others as they are.

Weights are constants of the gradient; losses/policy.py says how they enter it. A token of which the engine could not
say its log-probability (NaN) has d = 0 and is in no metric.

``engine/kl`` is KL(engine || trainer) by k3, ``engine/kl_k1`` by k1, both per token (losses/kl.py has the estimators).
``engine/weight`` and ``engine/weight_square`` are means over tokens of the weight and its square, after cap and floor:
``effective_share`` makes of them the effective sample size by the number of tokens, (sum w)^2 / (n sum w^2).

May import types, torch and its neighbours in losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from taut.losses.answers import STEEPEST, Metrics
from taut.losses.kl import estimate
from taut.losses.surrogates import mean_of_sample
from taut.types import Packed, Scores

CorrectionKind: TypeAlias = Literal["none", "truncated", "masked"]
CorrectionLevel: TypeAlias = Literal["token", "sequence", "geometric"]
FAR = 1.0
"""Nats: what ``engine/far`` counts."""


class Correction(NamedTuple):
    """How the policy term is weighted."""

    kind: CorrectionKind = "none"
    level: CorrectionLevel = "token"
    cap: float = 2.0
    floor: float = 0.0


def weights(difference_N: Tensor, packed: Packed, how: Correction) -> Tensor:
    """What each token counts for, [N]: constants."""
    return _acted(_raw(difference_N.detach(), packed, how), how)


def _raw(difference_N: Tensor, packed: Packed, how: Correction) -> Tensor:
    difference_N = difference_N.nan_to_num(nan=0.0)
    match how.level:
        case "token":
            pass
        case "sequence":
            difference_N = packed.by_sample(difference_N).index_select(0, packed.row_N)
        case "geometric":
            difference_N = mean_of_sample(difference_N, packed)
    return difference_N.clamp(max=STEEPEST).exp()


def _acted(weight_N: Tensor, how: Correction) -> Tensor:
    match how.kind:
        case "none":
            return weight_N
        case "truncated":
            return weight_N.clamp(how.floor, how.cap)
        case "masked":
            is_out_N = (weight_N < how.floor) | (weight_N > how.cap)
            return weight_N.masked_fill(is_out_N, 0.0)


@torch.no_grad()
def engine_metrics(difference_N: Tensor, packed: Packed, how: Correction) -> Metrics:
    """How far engine and trainer are apart, over the tokens of which both have said something."""
    is_known_N = ~difference_N.isnan()
    raw_N = _raw(difference_N.double(), packed, how)
    used_N = _acted(raw_N, how)
    d = difference_N[is_known_N].double()
    count = torch.tensor(float(d.numel()))
    sums = {
        "difference": d.abs().sum(),
        "difference_square": (d**2).sum(),
        "far": (d.abs() > FAR).sum(),
        "kl": estimate(-d, "k3").sum(),
        "kl_k1": -d.sum(),
        "weight": used_N[is_known_N].sum(),
        "weight_square": (used_N[is_known_N] ** 2).sum(),
    }
    if how.kind != "none":
        sums["corrected"] = (used_N != raw_N)[is_known_N].sum()
    return {f"engine/{name}": (total, count) for name, total in sums.items()}


def effective_share(metrics: Mapping[str, float]) -> float | None:
    """The effective sample size by the number of tokens, 0 (every one is masked) to 1, of a step's metrics; None where
    there are none.
    """
    square = metrics.get("engine/weight_square")
    if square is None:
        return None
    return metrics["engine/weight"] ** 2 / square if square > 0 else 0.0


def largest_difference(scores: Scores, packed: Packed) -> float:
    """The largest |old - engine| of a micro-batch, in nats; 0 where nothing is known. A maximum is no metric: those are
    sums.
    """
    old_N = packed.streams.get("old_logp_N", scores.logp_N.detach()).to(scores.logp_N)
    engine_N = packed.streams["engine_logp_N"].to(scores.logp_N)
    gap_N = (old_N - engine_N).abs().nan_to_num(nan=0.0)
    return float(gap_N.max()) if gap_N.numel() else 0.0
