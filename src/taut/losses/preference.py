"""Preference optimization: DPO and its family on pairs, with or without a reference, and KTO on single answers.

    DpoLoss               pairs: a weighted sum of functions of the DPO family, one function and one entry of
                          ``VARIANTS`` each
    SimpoLoss, CpoLoss    the same without a reference: SimPO, AlphaPO, CPO
    OrpoLoss              pairs: an odds ratio with a supervised term
    KtoLoss               single answers labeled good or bad: KTO, BCO, APO-zero

The keys of a loss, with what they exclude, are in its base class in settings.py. ``PairLoss`` is what the losses on the
DPO family's functions have in common.

A target's weight counts: log pi(y|x) is the sum of weight_N * logp_N over the answer's targets, and its length the sum
of the weights, which are 1 unless the data say otherwise.

The functions of the DPO family. With r = the score of an answer (its log-ratio log pi(y|x) - log ref(y|x), or its
transform by a divergence), w the better and l the worse answer, d = r_w - r_l, m the margin, s the logistic function, e
the label smoothing:

    x = beta * d - m        m: a target margin (SimPO's gamma) or the data's (ODPO, arXiv 2402.10571)

    sigmoid       -(1 - e) log s(x) - e log s(-x)           DPO, arXiv 2305.18290, eq. 7; e > 0: cDPO (E. Mitchell, A
                                                            note on DPO with noisy preferences, 2023)
    ipo           ((x - 1/2) / beta)^2 = (d - m / beta - 1 / (2 beta))^2 on log-ratios per token
                                                            IPO, arXiv 2310.12036, eq. 17, with beta for tau. The paper
                                                            writes sums; its results are of means per token, as TRL's
    hinge         max(0, 1 - x)                             SLiC, arXiv 2305.10425, on log-ratios (RSO, 2309.06657)
    robust        (-(1 - e) log s(x) + e log s(-x)) / (1 - 2e)
                                                            rDPO, arXiv 2403.00409. Not bounded from below
    exo           KL([s(x), s(-x)] || [1 - e, e])           EXO, arXiv 2402.00856, eq. 16 with two answers
    discopop      (1 - s(x / tau)) * -log s(x) + s(x / tau) * exp(-x)
                                                            DiscoPOP, arXiv 2406.08414, eq. 5 (log-ratio modulated)
    nca           -log s(beta r_w) - (log s(-beta r_w) + log s(-beta r_l)) / 2
                                                            NCA, arXiv 2402.05369, two answers labeled 1 and 0
    bco           -log s(beta r_w - c) - log s(c - beta r_l)
                                                            BCO, arXiv 2404.04656; c = the mean of beta r over all
                                                            answers of the step, a constant (the paper: a running one)
    sppo          (r_w - 1 / (2 beta))^2 + (r_l + 1 / (2 beta))^2
                                                            SPPO, arXiv 2405.00675, eq. 4.7 where the better answer
                                                            wins for sure
    apo_zero      s(-beta r_w) + s(beta r_l)                APO, arXiv 2408.06266, eq. 7
    apo_down      s(beta r_w) + s(-beta d)                  APO, arXiv 2408.06266, eq. 8
    aot           sigmoid's, of beta * (a_(i) - b_(i)): the differences log pi(w) - log pi(l) of the step, sorted,
                  against the reference's, sorted           AOT, arXiv 2406.05882, paired
    aot_unpaired  sigmoid's, of beta * (r_w(i) - r_l(i)): the better answers of the step, sorted, against the worse
                                                            AOT, arXiv 2406.05882, unpaired

The order of AOT is over the whole step: a pair's partner reaches it as a constant (``Variant.statistics``). Unpaired,
both partners move, so a pair is charged for its better answer against a constant, and for its worse one against
another: the gradients add, and half of the sum is the value.

Finite, with finite gradients, for log-ratios of any size that float32 holds the square of.

Metrics: chosen and rejected are means over pairs (or over the answers of a kind). rewards are beta * r. An accuracy
counts ties half (TRL: not at all), so it starts at 0.5, where policy and reference are equal. ``kl`` is the mean over
all answers of log pi(y|x) - log ref(y|x), one number per answer: the answers are the data's, not the policy's own, so
it shows how far the policy has moved on them, and can be negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from taut.config import configclass
from taut.losses.loss import Loss, Metrics, Unit, accuracy, mean, relative_power
from taut.losses.settings import (
    CpoConfig,
    DpoConfig,
    DpoVariant,
    KtoConfig,
    OrpoConfig,
    SimpoConfig,
)
from taut.types import LossSum, Packed, Scores, Wants

# -- sums over answers -----------------------------------------------------------------------------


class AnswerLoss(Loss):
    """The base of losses on answers, with a key ``log_entropy``."""

    log_entropy: bool

    @property
    def wants(self) -> Wants:
        return Wants(entropy=self.log_entropy)


class Answers(NamedTuple):
    """Sums over the targets of each sample."""

    logp_S: Tensor
    """log pi(y|x)"""
    log_ratio_S: Tensor
    """log pi(y|x) - log ref(y|x), or log pi(y|x) without a reference."""
    length_S: Tensor


def answers(scores: Scores, packed: Packed, *, has_reference: bool) -> Answers:
    """The sums for every sample of a micro-batch."""
    weight_N = packed.weight_N.to(scores.logp_N)
    logp_S = packed.by_sample(weight_N * scores.logp_N)
    log_ratio_S = logp_S
    if has_reference:
        ref_logp_N = packed.streams["ref_logp_N"].to(scores.logp_N)
        log_ratio_S = packed.by_sample(weight_N * (scores.logp_N - ref_logp_N))
    return Answers(logp_S, log_ratio_S, packed.by_sample(weight_N))


def nll_of_best(logp_N: Tensor, packed: Packed) -> Tensor:
    """sum of -weight * logp over the targets of preferred answers: a term of unit better_token."""
    is_best_N = packed.best_S[packed.row_N]
    return -(packed.weight_N.to(logp_N) * logp_N * is_best_N).sum()


def sequence_metrics(scores: Scores, sums: Answers, *, kl: bool) -> Metrics:
    """Metrics that do not depend on which answer is better."""
    metrics: Metrics = {}
    if kl:
        metrics["kl"] = mean(sums.log_ratio_S)
    if scores.entropy_N is not None:
        metrics["entropy"] = mean(scores.entropy_N)
    return metrics


def pair_metrics(reward_S: Tensor, sums: Answers, packed: Packed) -> Metrics:
    """Means over pairs of what the better and the worse answers have."""
    margin_P = (reward_S[packed.better_P] - reward_S[packed.worse_P]).detach()
    metrics = {"rewards/margin": mean(margin_P), "rewards/accuracy": accuracy(margin_P)}
    kinds = {"chosen": packed.better_P, "rejected": packed.worse_P}
    return metrics | {
        f"{name}/{kind}": mean(value_S[index_P])
        for name, value_S in values_of_answers(reward_S, sums, packed).items()
        for kind, index_P in kinds.items()
    }


def kind_metrics(reward_S: Tensor, sums: Answers, packed: Packed, is_good_S: Tensor) -> Metrics:
    """Average the metrics over the good answers and over the others."""
    kinds = {"chosen": is_good_S.double(), "rejected": (~is_good_S).double()}
    return {
        f"{name}/{kind}": ((value_S.detach() * is_kind_S).sum(), is_kind_S.sum())
        for name, value_S in values_of_answers(reward_S, sums, packed).items()
        for kind, is_kind_S in kinds.items()
    }


def values_of_answers(reward_S: Tensor, sums: Answers, packed: Packed) -> dict[str, Tensor]:
    """Each answer's reward, log-probability and number of targets."""
    length_S = packed.by_sample(torch.ones_like(packed.weight_N))
    return {"rewards": reward_S, "logps": sums.logp_S, "length": length_S}


# -- the functions of the DPO family ---------------------------------------------------------------


class Compared(NamedTuple):
    """Pairs of answers, and the constants of the DPO family's functions."""

    better_P: Tensor
    """Scores of the better answers: log-ratios, or their transform by a divergence."""
    worse_P: Tensor
    margin_P: Tensor
    beta: float
    smoothing: float
    tau: float
    stats: Mapping[str, Tensor]

    @property
    def x_P(self) -> Tensor:
        return self.beta * (self.better_P - self.worse_P) - self.margin_P


class Observed(NamedTuple):
    """All pairs of a step, without gradient."""

    better_P: Tensor
    worse_P: Tensor
    reference_P: Tensor
    """log ref(w) - log ref(l)"""
    beta: float


def _smoothed(x_P: Tensor, smoothing: float) -> Tensor:
    if smoothing == 0:
        return -logsigmoid(x_P)
    return -(1 - smoothing) * logsigmoid(x_P) - smoothing * logsigmoid(-x_P)


def sigmoid(pairs: Compared) -> Tensor:
    return _smoothed(pairs.x_P, pairs.smoothing)


def ipo(pairs: Compared) -> Tensor:
    return ((pairs.x_P - 0.5) / pairs.beta) ** 2


def hinge(pairs: Compared) -> Tensor:
    return torch.relu(1 - pairs.x_P)


def robust(pairs: Compared) -> Tensor:
    x_P, flipped = pairs.x_P, pairs.smoothing
    return (flipped * logsigmoid(-x_P) - (1 - flipped) * logsigmoid(x_P)) / (1 - 2 * flipped)


def exo(pairs: Compared) -> Tensor:
    x_P = pairs.x_P
    for_better_P = torch.sigmoid(x_P) * (logsigmoid(x_P) - math.log1p(-pairs.smoothing))
    for_worse_P = torch.sigmoid(-x_P) * (logsigmoid(-x_P) - math.log(pairs.smoothing))
    return for_better_P + for_worse_P


def discopop(pairs: Compared) -> Tensor:
    """s(x / tau) * exp(-x) is formed in the exponent: one factor is 0 where the other overflows."""
    x_P, tau = pairs.x_P, pairs.tau
    logistic_P = torch.sigmoid(-x_P / tau) * -logsigmoid(x_P)
    return logistic_P + (logsigmoid(x_P / tau) - x_P).exp()


def nca(pairs: Compared) -> Tensor:
    better_P, worse_P = pairs.beta * pairs.better_P, pairs.beta * pairs.worse_P
    return -logsigmoid(better_P) - 0.5 * (logsigmoid(-better_P) + logsigmoid(-worse_P))


def bco(pairs: Compared) -> Tensor:
    shift = pairs.stats["bco_shift"].to(pairs.better_P)
    better_P, worse_P = pairs.beta * pairs.better_P, pairs.beta * pairs.worse_P
    return -logsigmoid(better_P - shift) - logsigmoid(shift - worse_P)


def sppo(pairs: Compared) -> Tensor:
    half = 0.5 / pairs.beta
    return (pairs.better_P - half) ** 2 + (pairs.worse_P + half) ** 2


def apo_zero(pairs: Compared) -> Tensor:
    return torch.sigmoid(-pairs.beta * pairs.better_P) + torch.sigmoid(pairs.beta * pairs.worse_P)


def apo_down(pairs: Compared) -> Tensor:
    falls_P = torch.sigmoid(-pairs.beta * (pairs.better_P - pairs.worse_P))
    return torch.sigmoid(pairs.beta * pairs.better_P) + falls_P


def aot(pairs: Compared) -> Tensor:
    moved_P = pairs.better_P - pairs.worse_P + pairs.stats["aot_offset_P"].to(pairs.better_P)
    return _smoothed(pairs.beta * moved_P, pairs.smoothing)


def aot_unpaired(pairs: Compared) -> Tensor:
    against_P = pairs.stats["aot_worse_P"].to(pairs.better_P)
    for_better_P = _smoothed(pairs.beta * (pairs.better_P - against_P), pairs.smoothing)
    against_P = pairs.stats["aot_better_P"].to(pairs.better_P)
    for_worse_P = _smoothed(pairs.beta * (against_P - pairs.worse_P), pairs.smoothing)
    both_P = for_better_P + for_worse_P
    return both_P - 0.5 * both_P.detach()


def _mean_reward(step: Observed) -> dict[str, Tensor]:
    return {"bco_shift": step.beta * torch.cat([step.better_P, step.worse_P]).mean()}


def _partner(value_P: Tensor, other_P: Tensor) -> Tensor:
    """For each value the entry of ``other_P`` of the same rank."""
    partner_P = torch.empty_like(other_P)
    partner_P[value_P.argsort(stable=True)] = other_P.sort().values
    return partner_P


def _offset_of_rank(step: Observed) -> dict[str, Tensor]:
    """The constant that turns a pair's r_w - r_l into log pi(w) - log pi(l) - b_(i)."""
    policy_P = step.better_P - step.worse_P + step.reference_P
    return {"aot_offset_P": step.reference_P - _partner(policy_P, step.reference_P)}


def _partners(step: Observed) -> dict[str, Tensor]:
    return {
        "aot_worse_P": _partner(step.better_P, step.worse_P),
        "aot_better_P": _partner(step.worse_P, step.better_P),
    }


class Variant(NamedTuple):
    """A function of the DPO family."""

    value: Callable[[Compared], Tensor]
    """The cost of each pair, [P]."""
    is_averaged: bool = False
    """It takes log-ratios per token."""
    statistics: Callable[[Observed], dict[str, Tensor]] | None = None
    """The statistics of the whole step that it needs."""


VARIANTS: dict[DpoVariant, Variant] = {
    "sigmoid": Variant(sigmoid),
    "ipo": Variant(ipo, is_averaged=True),
    "hinge": Variant(hinge),
    "robust": Variant(robust),
    "exo": Variant(exo),
    "discopop": Variant(discopop),
    "nca": Variant(nca),
    "bco": Variant(bco, statistics=_mean_reward),
    "sppo": Variant(sppo),
    "apo_zero": Variant(apo_zero),
    "apo_down": Variant(apo_down),
    "aot": Variant(aot, statistics=_offset_of_rank),
    "aot_unpaired": Variant(aot_unpaired, statistics=_partners),
}
"""name -> function; the formulas are in the module's docstring.

A new one has its name in ``DpoVariant`` (settings.py) and in the rules there of ``DpoConfig``, by which margins,
divergences and reference_free are for functions of x; its value where policy and reference are one in THEORY of
checks/loss.py, its formula a second time in tests/oracle/test_preference_formulas.py, and a row in docs/preference.md.
"""


# -- losses on pairs -------------------------------------------------------------------------------


class PairLoss(AnswerLoss):
    """The loss of the DPO family's functions f:

        sum over terms of  weight * mean over pairs of f(r_w, r_l)
            + sft_weight * mean over the tokens of preferred answers of -logp

    The score r of an answer is its log-ratio u = log pi(y|x) - log ref(y|x), or log pi(y|x) where ``reference_free``,
    divided by its length where ``length_normalized``, and then ``transformed``.

    Pairs are all of a group's whose preference differs, each counted once. Pairs are not weighted (WPO), nor are tokens
    beyond those of the shorter answer (LD-DPO).
    """

    best_by: ClassVar[tuple[str, ...]] = ("rewards/accuracy", "rewards/margin")

    beta: float
    label_smoothing: float
    sft_weight: float
    # keys that some losses lack: without them nothing is added, and no reference is read
    margin: float = 0.0
    gamma: float = 0.0
    length_normalized: bool = False
    reference_free: bool = True

    @property
    def terms(self) -> tuple[tuple[DpoVariant, float], ...]:
        """Names of ``VARIANTS`` and their weights."""
        return (("sigmoid", 1.0),)

    @property
    def tau(self) -> float:
        """discopop's temperature: how sharply it switches between its branches."""
        return 0.05

    def transformed(self, log_ratio_S: Tensor) -> Tensor:
        """r of each answer, from its u."""
        return log_ratio_S

    @property
    def units(self) -> Mapping[str, Unit]:
        units: dict[str, Unit] = dict.fromkeys((name for name, _ in self.terms), "pair")
        return {**units, "sft": "better_token"} if self.sft_weight else units

    @property
    def needs(self) -> tuple[str, ...]:
        return () if self.reference_free else ("ref_logp_N",)

    @property
    def needs_values(self) -> tuple[str, ...]:
        return ("preference", "margin") if self.margin else ("preference",)

    @property
    def observes(self) -> bool:
        return any(VARIANTS[name].statistics is not None for name, _ in self.terms)

    @property
    def may_be_satisfied(self) -> bool:
        return all(name == "hinge" for name, _ in self.terms) and not self.sft_weight

    def __call__(self, scores: Scores, packed: Packed) -> LossSum:
        sums = answers(scores, packed, has_reference=not self.reference_free)
        better_P, worse_P = packed.better_P, packed.worse_P
        margin_P = sums.logp_S.new_full(better_P.shape, self.gamma)
        if self.margin:
            margin_S = packed.values["margin"].to(sums.logp_S)
            margin_P = margin_P + self.margin * (margin_S[better_P] - margin_S[worse_P])
        terms: dict[str, Tensor] = {}
        for name, weight in self.terms:
            variant = VARIANTS[name]
            is_averaged = self.length_normalized or variant.is_averaged
            score_S = self._score(sums, is_averaged=is_averaged)
            pairs = Compared(
                score_S.index_select(0, better_P),
                score_S.index_select(0, worse_P),
                margin_P,
                self.beta,
                self.label_smoothing,
                self.tau,
                packed.stats,
            )
            terms[name] = weight * variant.value(pairs).sum()
        if self.sft_weight:
            terms["sft"] = self.sft_weight * nll_of_best(scores.logp_N, packed)
        score_S = self._score(sums, is_averaged=self.length_normalized)
        metrics = pair_metrics(self.beta * score_S, sums, packed)
        metrics |= sequence_metrics(scores, sums, kl=not self.reference_free)
        return LossSum(terms, metrics)

    def observe(self, scores: Scores, packed: Packed) -> dict[str, Tensor]:
        sums = answers(scores, packed, has_reference=not self.reference_free)
        score_S = self._score(sums, is_averaged=self.length_normalized)
        reference_S = sums.logp_S - sums.log_ratio_S
        if self.length_normalized:
            reference_S = reference_S / sums.length_S
        better_P, worse_P = packed.better_P, packed.worse_P
        return {
            "better_P": score_S[better_P],
            "worse_P": score_S[worse_P],
            "reference_P": reference_S[better_P] - reference_S[worse_P],
        }

    def statistics(self, observed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        step = Observed(**observed, beta=self.beta)
        makers = [VARIANTS[name].statistics for name, _ in self.terms]
        return {name: stat for make in makers if make for name, stat in make(step).items()}

    def _score(self, sums: Answers, *, is_averaged: bool) -> Tensor:
        log_ratio_S = sums.log_ratio_S
        return self.transformed(log_ratio_S / sums.length_S if is_averaged else log_ratio_S)


@configclass
class DpoLoss(DpoConfig, PairLoss):
    """DPO and its family. A sum of several functions f is MPO (arXiv 2411.10442), with the supervised term it is RPO's
    (2404.19733); divided by lengths it is Tulu 3's (2411.15124). The divergence transforms u (f-DPO, arXiv 2309.16240,
    table 1: f' of e^u):

        reverse_kl    u                          forward_kl   1 - e^-u
        js            log 2 + log sigmoid(u)     alpha        (1 - e^(-alpha u)) / alpha: 0 is reverse_kl, 1 forward_kl

    e^-u continues along its tangent beyond e^30 (``relative_power``). The constant beta log Z(x) of f-DPO leaves
    differences unchanged, so a divergence is for functions of x. TRL divides by the length after the divergence, not
    before, and its alpha is 1 - alpha.
    """

    @property
    def terms(self) -> tuple[tuple[DpoVariant, float], ...]:
        weights = self.loss_weights or [1.0] * len(self.names)
        return tuple(zip(self.names, weights, strict=True))

    @property
    def tau(self) -> float:
        return super().tau if self.discopop_tau is None else self.discopop_tau

    def transformed(self, log_ratio_S: Tensor) -> Tensor:
        match self.divergence:
            case "reverse_kl":
                return log_ratio_S
            case "forward_kl":
                return relative_power(log_ratio_S, -1.0)
            case "js":
                return math.log(2) + logsigmoid(log_ratio_S)
            case "alpha":
                return relative_power(log_ratio_S, -0.5 if self.alpha is None else -self.alpha)


@configclass
class SimpoLoss(SimpoConfig, PairLoss):
    """SimPO, arXiv 2405.14734, eq. 6: -log s(beta * (q_w - q_l) - gamma) with q = log pi(y|x) / |y|, an answer's mean
    log-probability. With ``alpha`` AlphaPO, arXiv 2501.03884: (1 - e^(-alpha q)) / alpha in place of q.
    """

    length_normalized = True

    def transformed(self, log_ratio_S: Tensor) -> Tensor:
        return relative_power(log_ratio_S, -self.alpha)


@configclass
class CpoLoss(CpoConfig, PairLoss):
    """CPO, arXiv 2401.08417, eq. 3: f(log pi(w|x) - log pi(l|x)) + sft_weight * the mean of -logp over the tokens of
    preferred answers.
    """

    @property
    def terms(self) -> tuple[tuple[DpoVariant, float], ...]:
        return ((self.loss, 1.0),)


@configclass
class OrpoLoss(OrpoConfig, AnswerLoss):
    """ORPO, arXiv 2403.07691, eq. 6 and 7, with beta for lambda. With q = log pi(y|x) / |y|:

        sft + beta * -log s(log odds(w) - log odds(l)),        log odds = q - log(1 - e^q)

    sft is the mean of -logp over the tokens of preferred answers (TRL takes their prompts, too). The odds are finite
    where q is 0: -q is at least what the dtype can tell from 0.
    """

    units: ClassVar[Mapping[str, Unit]] = {"odds_ratio": "pair", "sft": "better_token"}
    needs_values: ClassVar[tuple[str, ...]] = ("preference",)
    best_by: ClassVar[tuple[str, ...]] = ("rewards/accuracy", "rewards/margin")

    def __call__(self, scores: Scores, packed: Packed) -> LossSum:
        sums = answers(scores, packed, has_reference=False)
        mean_logp_S = sums.logp_S / sums.length_S
        odds_S = log_odds(mean_logp_S)
        ratio_P = odds_S.index_select(0, packed.better_P) - odds_S.index_select(0, packed.worse_P)
        terms = {
            "odds_ratio": -self.beta * logsigmoid(ratio_P).sum(),
            "sft": nll_of_best(scores.logp_N, packed),
        }
        metrics = pair_metrics(self.beta * mean_logp_S, sums, packed)
        metrics["log_odds_ratio"] = mean(ratio_P)
        return LossSum(terms, metrics | sequence_metrics(scores, sums, kl=False))


def log_odds(logp_S: Tensor) -> Tensor:
    """log(p / (1 - p)) of p = e^logp: -(a + log(1 - e^-a)) with a = -logp, a form without cancellation."""
    unlikely_S = (-logp_S).clamp_min(torch.finfo(logp_S.dtype).eps)
    return -(unlikely_S + (-torch.expm1(-unlikely_S)).log())


# -- losses on single answers ----------------------------------------------------------------------


@configclass
class KtoLoss(KtoConfig, AnswerLoss):
    """KTO and its neighbors, on single answers, each a sample with ``label`` 1 (good) or 0 (bad).

    With r = beta * (log pi(y|x) - log ref(y|x)), s the logistic function, y = +1 for desirable answers and -1 for
    others, and w the weight of the answer's kind, the mean over all answers of

        kto        w * s(-y (r - beta z))       KTO, arXiv 2402.01306, eq. 7 (with the constant w - v as w * (1 - s))
        bco        w * -log s(y (r - c))        BCO, arXiv 2404.04656, without its weights for a shift of prompts
        apo_zero   w * s(-y r)                  APO, arXiv 2408.06266, eq. 7, answer by answer

        z = max(0, mean of log pi(y'|x) - log ref(y'|x)) over prompts with the answers of others: ``mismatched``
        c = the mean of the two kinds' mean r in the step (or the one kind's); the paper's are running ones

    z and c are constants, over the whole step (TRL takes z of a micro-batch). The metric z0 is z; rewards/accuracy
    counts answers on their own side of beta z, c or 0, ties half.
    """

    needs: ClassVar[tuple[str, ...]] = ("ref_logp_N",)
    needs_values: ClassVar[tuple[str, ...]] = ("label",)
    best_by: ClassVar[tuple[str, ...]] = ("rewards/accuracy",)

    @property
    def units(self) -> Mapping[str, Unit]:
        return {self.loss: "sequence"}

    @property
    def observes(self) -> bool:
        return self.loss != "apo_zero"

    @property
    def mismatched(self) -> bool:
        return self.loss == "kto"

    def __call__(self, scores: Scores, packed: Packed) -> LossSum:
        sums = answers(scores, packed, has_reference=True)
        is_good_S = packed.values["label"] > 0.5
        match self.loss:
            case "kto":
                shift = self.beta * packed.stats["z0"].to(sums.log_ratio_S)
            case "bco":
                shift = packed.stats["bco_shift"].to(sums.log_ratio_S)
            case "apo_zero":
                shift = sums.log_ratio_S.new_zeros(())
        reward_S = self.beta * sums.log_ratio_S
        above_S = reward_S - shift
        signed_S = torch.where(is_good_S, above_S, -above_S)
        if self.loss == "bco":
            cost_S = -logsigmoid(signed_S)
        else:
            cost_S = torch.sigmoid(-signed_S)
        good_S, bad_S = self.desirable_weight * cost_S, self.undesirable_weight * cost_S
        total = torch.where(is_good_S, good_S, bad_S).sum()
        metrics = kind_metrics(reward_S, sums, packed, is_good_S)
        metrics["rewards/accuracy"] = accuracy(signed_S)
        if self.loss == "kto":
            metrics["z0"] = mean(packed.stats["z0"].expand(packed.num_samples))
        return LossSum({self.loss: total}, metrics | sequence_metrics(scores, sums, kl=True))

    def observe(self, scores: Scores, packed: Packed) -> dict[str, Tensor]:
        log_ratio_S = answers(scores, packed, has_reference=True).log_ratio_S
        return {"log_ratio_S": log_ratio_S, "label_S": packed.values["label"].to(log_ratio_S)}

    def statistics(self, observed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        log_ratio_S = observed["log_ratio_S"]
        if self.loss == "kto":
            return {"z0": log_ratio_S.mean().clamp_min(0)}
        is_good_S = observed["label_S"] > 0.5
        kinds = [log_ratio_S[is_good_S], log_ratio_S[~is_good_S]]
        means = [kind.mean() for kind in kinds if kind.numel()]
        return {"bco_shift": self.beta * torch.stack(means).mean()}
