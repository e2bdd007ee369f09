"""Answers that are good or bad by themselves: KTO and its neighbours. One answer is one sample, ``label`` 1 or 0.

With r = beta * (log pi(y|x) - log ref(y|x)), s the logistic function, y = +1 for desirable answers and -1 for others,
and w the weight of the answer's kind, the mean over all answers of

    kto        w * s(-y (r - beta z))       KTO, arXiv 2402.01306, eq. 7 (with the constant w - v as w * (1 - s))
    bco        w * -log s(y (r - c))        BCO, arXiv 2404.04656, without its weights for a shift of prompts
    apo_zero   w * s(-y r)                  APO, arXiv 2408.06266, eq. 7, answer by answer

    z = max(0, mean of log pi(y'|x) - log ref(y'|x)) over prompts with the answers of others: ``mismatched``
    c = the mean of the two kinds' mean r in the step (or the one kind's); the paper's are running ones

z and c are of the whole step, and constants. They are the mean of a step, where TRL takes z of a micro-batch.

The metric z0 is z; rewards/accuracy counts answers on their own side of beta z, c or 0, ties half; kl is explained in
losses/answers.py.

May import types, errors, torch and its neighbours in losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from taut.losses.answers import (
    Answers,
    Metrics,
    answers,
    kind_metrics,
    mean,
    sequence_metrics,
    share_above,
)
from taut.losses.loss import Loss, Unit
from taut.types import LossSum, Packed, Scores, Wants

UnpairedVariant: TypeAlias = Literal["kto", "bco", "apo_zero"]


@dataclass(frozen=True)
class Unpaired(Loss):
    """See the module docstring."""

    variant: UnpairedVariant = "kto"
    beta: float = 0.1
    """How much a nat of log-ratio counts: larger keeps the policy closer to the reference."""
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    entropy: bool = False
    """Whether the entropy is among the metrics."""

    @property
    def units(self) -> Mapping[str, Unit]:
        return {self.variant: "sequence"}

    @property
    def needs(self) -> tuple[str, ...]:
        return ("ref_logp_N",)

    @property
    def needs_values(self) -> tuple[str, ...]:
        return ("label",)

    @property
    def wants(self) -> Wants:
        return Wants(entropy=self.entropy)

    @property
    def observes(self) -> bool:
        return self.variant != "apo_zero"

    @property
    def best_by(self) -> tuple[str, ...]:
        return ("rewards/accuracy",)

    @property
    def mismatched(self) -> bool:
        """Whether what is observed is not the step's samples but each prompt with another one's answer."""
        return self.variant == "kto"

    def __call__(self, scores: Scores, packed: Packed) -> LossSum:
        found = answers(scores, packed, has_reference=True)
        is_good_S = packed.values["label"] > 0.5
        signed_S = self.beta * found.log_ratio_S - self._shift(found, packed)
        signed_S = torch.where(is_good_S, signed_S, -signed_S)
        if self.variant == "bco":
            cost_S = -logsigmoid(signed_S)
        else:
            cost_S = torch.sigmoid(-signed_S)
        good_S, bad_S = self.desirable_weight * cost_S, self.undesirable_weight * cost_S
        total = torch.where(is_good_S, good_S, bad_S).sum()
        return LossSum({self.variant: total}, self._metrics(scores, packed, found))

    def observe(self, scores: Scores, packed: Packed) -> dict[str, Tensor]:
        log_ratio_S = answers(scores, packed, has_reference=True).log_ratio_S
        return {"log_ratio_S": log_ratio_S, "label_S": packed.values["label"].to(log_ratio_S)}

    def statistics(self, observed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        log_ratio_S = observed["log_ratio_S"]
        if self.variant == "kto":
            return {"z0": log_ratio_S.mean().clamp_min(0)}
        is_good_S = observed["label_S"] > 0.5
        kinds = [log_ratio_S[is_good_S], log_ratio_S[~is_good_S]]
        means = [kind.mean() for kind in kinds if kind.numel()]
        return {"bco_shift": self.beta * torch.stack(means).mean()}

    def _shift(self, found: Answers, packed: Packed) -> Tensor:
        match self.variant:
            case "kto":
                return self.beta * packed.stats["z0"].to(found.log_ratio_S)
            case "bco":
                return packed.stats["bco_shift"].to(found.log_ratio_S)
            case "apo_zero":
                return found.log_ratio_S.new_zeros(())

    def _metrics(self, scores: Scores, packed: Packed, found: Answers) -> Metrics:
        is_good_S = packed.values["label"] > 0.5
        reward_S = self.beta * found.log_ratio_S.detach()
        above_S = reward_S - self._shift(found, packed)
        right = share_above(torch.where(is_good_S, above_S, -above_S))
        metrics = kind_metrics(reward_S, found, packed, chosen=is_good_S, rejected=~is_good_S)
        metrics["rewards/accuracy"] = (right, mean(reward_S)[1])
        if self.variant == "kto":
            metrics["z0"] = mean(packed.stats["z0"].expand(packed.num_samples))
        return metrics | sequence_metrics(scores, found, kl=True)
