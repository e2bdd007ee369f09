"""Preference optimisation on pairs: DPO and its family, with or without a reference.

    sum over terms of  weight * mean over pairs of f(r_w, r_l)
        + sft_weight * mean over the tokens of preferred answers of -logp

The functions f and their papers are in losses/margins.py. A sum of several is MPO (arXiv 2411.10442), with the term on
good answers it is RPO's (2404.19733). The score r of an answer is its log-ratio u = log pi(y|x) - log ref(y|x), divided
by its length where ``length_normalised`` (Tulu 3, 2411.15124), and then what the divergence makes of it (f-DPO, arXiv
2309.16240, table 1: f' of e^u):

    reverse_kl    u                              forward_kl   1 - e^-u
    js            log 2 + log sigmoid(u)         alpha        (1 - e^(-alpha u)) / alpha: 0 is reverse_kl, 1 forward_kl

e^-u goes on along its tangent beyond e^30 (losses/answers.py). The constant beta log Z(x) of f-DPO leaves differences
alone, so a divergence is for functions of x. TRL divides by the length after the divergence, not before, and its alpha
is 1 - alpha.

``reference_free``: u = log pi(y|x), no reference is read. CPO, SimPO and AlphaPO are made of this in
losses/reference_free.py.

Pairs are all of a group's whose preference differs, each counted once; metrics of chosen and rejected are means over
pairs. rewards are beta * r. An accuracy counts ties half (TRL: not at all), so it begins at 0.5, where policy and
reference are one. logps and kl are explained in losses/answers.py.

It does not weight pairs (WPO), nor tokens beyond those of the shorter answer (LD-DPO).

May import types, errors, torch and its neighbours in losses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor
from torch.nn.functional import logsigmoid

from taut.errors import ConfigError
from taut.losses.answers import (
    Answers,
    Metrics,
    answers,
    nll_of_best,
    pair_metrics,
    relative_power,
    sequence_metrics,
)
from taut.losses.loss import Loss, Unit
from taut.losses.margins import VARIANTS, Compared, Observed
from taut.types import LossSum, Packed, Scores, Wants

Divergence: TypeAlias = Literal["reverse_kl", "forward_kl", "js", "alpha"]


@dataclass(frozen=True)
class Preference(Loss):
    """See the module docstring."""

    beta: float = 0.1
    """How much a nat of log-ratio counts: larger keeps the policy closer to the reference."""
    terms: tuple[tuple[str, float], ...] = (("sigmoid", 1.0),)
    """Names of ``VARIANTS`` and their weights."""
    label_smoothing: float = 0.0
    """How often a pair is thought to be the wrong way round."""
    sft_weight: float = 0.0
    length_normalised: bool = False
    divergence: Divergence = "reverse_kl"
    alpha: float = 0.5
    """Of the divergence alpha."""
    margin: float = 0.0
    """How much of the data's margin is taken off x."""
    gamma: float = 0.0
    """A margin that is the same for all."""
    tau: float = 0.05
    """Of discopop: how sharply it goes from one branch to the other."""
    reference_free: bool = False
    entropy: bool = False
    """Whether the entropy is among the metrics."""

    def __post_init__(self) -> None:
        _require_sound(self)

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
    def wants(self) -> Wants:
        return Wants(entropy=self.entropy)

    @property
    def observes(self) -> bool:
        return any(VARIANTS[name].statistics is not None for name, _ in self.terms)

    @property
    def may_be_satisfied(self) -> bool:
        return all(name == "hinge" for name, _ in self.terms) and not self.sft_weight

    @property
    def best_by(self) -> tuple[str, ...]:
        return ("rewards/accuracy", "rewards/margin")

    def __call__(self, scores: Scores, packed: Packed) -> LossSum:
        found = answers(scores, packed, has_reference=not self.reference_free)
        terms = {}
        for name, weight in self.terms:
            variant = VARIANTS[name]
            is_averaged = self.length_normalised or variant.is_averaged
            score_S = self._score(found, is_averaged=is_averaged)
            terms[name] = weight * variant.value(self._compare(score_S, packed)).sum()
        if self.sft_weight:
            terms["sft"] = self.sft_weight * nll_of_best(scores.logp_N, packed)
        return LossSum(terms, self._metrics(scores, packed, found))

    def observe(self, scores: Scores, packed: Packed) -> dict[str, Tensor]:
        found = answers(scores, packed, has_reference=not self.reference_free)
        score_S = self._score(found, is_averaged=self.length_normalised)
        reference_S = found.logp_S - found.log_ratio_S
        if self.length_normalised:
            reference_S = reference_S / found.length_S
        better_P, worse_P = packed.better_P, packed.worse_P
        return {
            "better_P": score_S[better_P],
            "worse_P": score_S[worse_P],
            "reference_P": reference_S[better_P] - reference_S[worse_P],
        }

    def statistics(self, observed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        step = Observed(**observed, beta=self.beta)
        made = [VARIANTS[name].statistics for name, _ in self.terms]
        return {name: stat for make in made if make for name, stat in make(step).items()}

    def _score(self, found: Answers, *, is_averaged: bool) -> Tensor:
        """r of each answer."""
        log_ratio_S = found.log_ratio_S
        if is_averaged:
            log_ratio_S = log_ratio_S / found.length_S
        match self.divergence:
            case "reverse_kl":
                return log_ratio_S
            case "forward_kl":
                return relative_power(log_ratio_S, -1.0)
            case "js":
                return math.log(2) + logsigmoid(log_ratio_S)
            case "alpha":
                return relative_power(log_ratio_S, -self.alpha)

    def _compare(self, score_S: Tensor, packed: Packed) -> Compared:
        better_P, worse_P = packed.better_P, packed.worse_P
        margin_P = score_S.new_full(better_P.shape, self.gamma)
        if self.margin:
            margin_S = packed.values["margin"].to(score_S)
            margin_P = margin_P + self.margin * (margin_S[better_P] - margin_S[worse_P])
        return Compared(
            score_S.index_select(0, better_P),
            score_S.index_select(0, worse_P),
            margin_P,
            self.beta,
            self.label_smoothing,
            self.tau,
            packed.stats,
        )

    def _metrics(self, scores: Scores, packed: Packed, found: Answers) -> Metrics:
        score_S = self._score(found, is_averaged=self.length_normalised)
        metrics = pair_metrics(self.beta * score_S, found, packed)
        return metrics | sequence_metrics(scores, found, kl=not self.reference_free)


def _require_sound(loss: Preference) -> None:
    """Refuse what no function reads, and values without a meaning. Keys are named as the configs have them."""
    names = [name for name, _ in loss.terms]
    unknown = [name for name in names if name not in VARIANTS]
    if unknown or not names or len(set(names)) < len(names):
        raise ConfigError(
            f"found loss={names}; expected one or more of {', '.join(VARIANTS)}, each once; name those"
        )
    others = [name for name in names if not VARIANTS[name].is_of_x]
    for field, reads in {
        "margin": loss.margin != 0,
        "gamma": loss.gamma != 0,
        "divergence": loss.divergence != "reverse_kl",
        "reference_free": loss.reference_free,
    }.items():
        if reads and others:
            raise ConfigError(
                f"found {field}={getattr(loss, field)} with loss={others[0]}, which takes the two answers one by one; "
                f"expected a function of their difference ({', '.join(_named('is_of_x'))}); leave {field} out, or "
                "name one of those"
            )
    if loss.reference_free and loss.divergence not in ("reverse_kl", "alpha"):
        raise ConfigError(
            f"found divergence={loss.divergence} with reference_free; expected a reference to diverge from; "
            "leave one out"
        )
    _require_sound_smoothing(loss, names)
    if "discopop" in names and not 0 < loss.tau <= 1:
        raise ConfigError(
            f"found discopop_tau={loss.tau:g}; expected more than 0 and at most 1 (larger, and exp(-x) is no longer "
            "held down where x is negative); set it to the paper's 0.05"
        )


def _require_sound_smoothing(loss: Preference, names: list[str]) -> None:
    smoothing = loss.label_smoothing
    if not 0 <= smoothing < 0.5:
        raise ConfigError(
            f"found label_smoothing={smoothing:g}; expected at least 0 and less than 0.5: how often a pair is the "
            "wrong way round; more would turn all of them; lower it"
        )
    if "exo" in names and smoothing == 0:
        raise ConfigError(
            "found loss=exo with label_smoothing=0, where it is infinite; expected more than 0; set "
            "label_smoothing=0.001, the paper's"
        )
    if smoothing and not any(VARIANTS[name].is_smoothed for name in names):
        raise ConfigError(
            f"found label_smoothing={smoothing:g} with loss={', '.join(names)}, which does not read it; expected "
            f"{', '.join(_named('is_smoothed'))}; leave it out"
        )


def _named(trait: str) -> list[str]:
    return [name for name, variant in VARIANTS.items() if getattr(variant, trait)]
