"""Loss on held-out data: the training loss's own sums, without gradient, over every sample of a set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from taut.data.plan import assign, layouts
from taut.loop import Job
from taut.types import Sample, Tree

SAMPLES_AT_A_TIME = 512
"""Samples planned together; bounds what is laid out in memory."""


@dataclass(frozen=True)
class HeldOut:
    """Evaluates ``job.method.loss`` on ``samples`` and emits an ``eval`` event."""

    samples: Sequence[Sample]
    job: Job

    def __call__(self, step: int) -> float:
        """The mean loss per unit of weight; every sample counts once, whatever the number of ranks."""
        job = self.job
        total = weight = tokens = 0.0
        job.scorer.eval()
        with torch.no_grad(), job.compute():
            for start in range(0, len(self.samples), SAMPLES_AT_A_TIME):
                stop = min(start + SAMPLES_AT_A_TIME, len(self.samples))
                trees = [Tree((self.samples[index],)) for index in range(start, stop)]
                for loss_sum, weight_sum, num_tokens in self._sums(trees):
                    total, weight, tokens = (
                        total + loss_sum,
                        weight + weight_sum,
                        tokens + num_tokens,
                    )
        total, weight, tokens = job.ranks.sum([total, weight, tokens])
        loss = total / weight
        job.emit(
            "eval", step=step, loss=loss, num_samples=len(self.samples), num_tokens=int(tokens)
        )
        return loss

    def _sums(self, trees: list[Tree]) -> list[tuple[float, float, int]]:
        """(loss sum, weight sum, tokens) of each micro-batch; all ranks run equally many forwards."""
        job = self.job
        mine = [
            packed
            for planned in assign(trees, job.budget)[job.ranks.rank]
            for packed in layouts(planned, job.policy, job.budget.tokens_per_microbatch)
        ]
        most = int(job.ranks.max([len(mine)])[0])
        sums = []
        for packed in mine:
            scores = job.scorer(packed)
            terms = job.method.loss(scores, packed.to(scores.logp_N.device)).terms
            sums.append(
                (
                    sum(float(t) for t in terms.values()),
                    float(packed.weight_N.sum()),
                    packed.num_tokens,
                )
            )
        for _ in range(most - len(mine)):
            job.scorer(layouts((trees[0],), job.policy, job.budget.tokens_per_microbatch)[0])
        return sums
