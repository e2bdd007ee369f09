"""Losses on a scalar head: reward models of pairs, of scores, of steps.

    bradley_terry   mean over pairs of -log s(r_w - r_l - margin * m) + centering_coef * (r_w + r_l)^2
                    Bradley-Terry as in InstructGPT (arXiv 2203.02155, eq. 1), the margin as in Llama 2 (2307.09288,
                    eq. 2), the centering of 2312.09244. r: the head at a sample's last token
    regression      mean over samples of (r - score)^2
    process         mean over reads of -(y log s(r) + (1 - y) log s(-r)), y in [0, 1] the step's label and r the head
                    at the step's end: a process reward model, arXiv 2305.20050

Metrics are means over pairs (those of chosen and rejected), samples or reads; score/mean_square with score/mean
gives the spread. An accuracy counts ties half.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from taut.config import configclass
from taut.losses.loss import Loss, Metrics, Predictions, Unit, accuracy, mean
from taut.losses.settings import RewardConfig
from taut.types import LossSum, Packed, Scores, Wants


@dataclass(frozen=True)
class ScalarLoss(Loss):
    """The base of losses on a scalar head: no log-probabilities are needed."""

    wants: ClassVar[Wants] = Wants(logp=False, scalar=True)


@configclass
class BradleyTerry(RewardConfig, ScalarLoss):
    """The better of two answers has the higher score."""

    best_by: ClassVar[tuple[str, ...]] = ("accuracy", "score/margin")

    @property
    def units(self) -> Mapping[str, Unit]:
        units: dict[str, Unit] = {"bradley_terry": "pair"}
        return {**units, "centring": "pair"} if self.centering_coef else units

    @property
    def needs_values(self) -> tuple[str, ...]:
        return ("preference", "margin") if self.margin else ("preference",)

    def __call__(self, scores: Scores, packed: Packed) -> LossSum:
        score_S = score_of_samples(scores, packed)
        chosen_P = score_S.index_select(0, packed.better_P)
        rejected_P = score_S.index_select(0, packed.worse_P)
        gap_P = chosen_P - rejected_P
        wanted_P = gap_P
        if self.margin:
            margin_S = packed.values["margin"].to(score_S)
            margin_P = margin_S[packed.better_P] - margin_S[packed.worse_P]
            wanted_P = gap_P - self.margin * margin_P
        terms = {"bradley_terry": -logsigmoid(wanted_P).sum()}
        if self.centering_coef:
            terms["centring"] = self.centering_coef * ((chosen_P + rejected_P) ** 2).sum()
        metrics: Metrics = {
            "accuracy": accuracy(gap_P),
            "score/margin": mean(gap_P),
            "score/chosen": mean(chosen_P),
            "score/rejected": mean(rejected_P),
        }
        return LossSum(terms, metrics | spread(score_S))

    def predictions(self, scores: Scores, packed: Packed) -> Predictions:
        """The answer with the higher score is the better one, with probability s(|r_w - r_l|)."""
        score_S = score_of_samples(scores, packed)
        gap_P = score_S[packed.better_P] - score_S[packed.worse_P]
        return Predictions(gap_P.abs().sigmoid(), (gap_P.sign() + 1) / 2, 0.5)


@dataclass(frozen=True)
class Regression(ScalarLoss):
    """The head predicts the data's score."""

    units: ClassVar[Mapping[str, Unit]] = {"regression": "sequence"}
    needs_values: ClassVar[tuple[str, ...]] = ("score",)

    def __call__(self, scores: Scores, packed: Packed) -> LossSum:
        score_S = score_of_samples(scores, packed)
        target_S = packed.values["score"].to(score_S)
        error_S = score_S - target_S
        metrics: Metrics = {"score/error": mean(error_S.abs()), "score/target": mean(target_S)}
        return LossSum({"regression": (error_S**2).sum()}, metrics | spread(score_S))


@dataclass(frozen=True)
class Process(ScalarLoss):
    """The head predicts at the end of each step whether it was right. Reads ``read_values["label"]``."""

    units: ClassVar[Mapping[str, Unit]] = {"process": "read"}
    best_by: ClassVar[tuple[str, ...]] = ("accuracy",)

    def predictions(self, scores: Scores, packed: Packed) -> Predictions:
        """A step is right, with probability s(r)."""
        return Predictions(_scalar(scores).sigmoid(), packed.read_values["label"], 0.0)

    def __call__(self, scores: Scores, packed: Packed) -> LossSum:
        score_R = _scalar(scores)
        label_R = packed.read_values["label"].to(score_R)
        total = binary_cross_entropy_with_logits(score_R, label_R, reduction="sum")
        side_R = (label_R - 0.5).sign() * score_R
        metrics: Metrics = {"accuracy": accuracy(side_R), "label/mean": mean(label_R)}
        return LossSum({"process": total}, metrics | spread(score_R))


def score_of_samples(scores: Scores, packed: Packed) -> Tensor:
    """The head's value for each sample, [S]; each sample is read at one token."""
    score_R = _scalar(scores)
    assert packed.num_reads == packed.num_samples, (
        f"{packed.num_reads} reads of {packed.num_samples} samples: expected one each"
    )
    return score_R.new_zeros(packed.num_samples).index_add(0, packed.row_R, score_R)


def spread(score: Tensor) -> Metrics:
    """Mean and mean square of scores."""
    return {"score/mean": mean(score), "score/mean_square": mean(score**2)}


def _scalar(scores: Scores) -> Tensor:
    assert scores.scalar_R is not None, "the loss needs the scalar head"
    return scores.scalar_R
