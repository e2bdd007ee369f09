"""Loss on held-out data: the training loss's own sums, without gradient, over every sample of a set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch

from taut import losses
from taut.loop import Job, microbatches_of, padded
from taut.types import Sample, Tree

SAMPLES_AT_A_TIME = 512
"""Samples planned together; bounds what is laid out in memory."""


@dataclass(frozen=True)
class HeldOut:
    """Evaluates ``job.method.loss`` on ``samples`` and emits an ``eval`` event."""

    samples: Sequence[Sample]
    job: Job

    def __call__(self, step: int) -> float:
        """The loss: each term's sum by its count; every sample counts once, whatever the number of ranks."""
        job = self.job
        units = job.method.loss.units
        sums = [0.0] * (2 * len(units) + 1)
        job.scorer.eval()
        with torch.no_grad(), job.compute():
            for start in range(0, len(self.samples), SAMPLES_AT_A_TIME):
                stop = min(start + SAMPLES_AT_A_TIME, len(self.samples))
                trees = [Tree((self.samples[index],)) for index in range(start, stop)]
                for some in self._sums(trees, f"held-out loss after step {step}"):
                    sums = [left + right for left, right in zip(sums, some, strict=True)]
        *pairs, tokens = job.ranks.sum(sums)
        loss = sum(total / count for total, count in zip(pairs[::2], pairs[1::2], strict=True))
        job.emit(
            "eval", step=step, loss=loss, num_samples=len(self.samples), num_tokens=int(tokens)
        )
        return loss

    def _sums(self, trees: list[Tree], where: str) -> list[list[float]]:
        """Sum and count of each term, then tokens, of each micro-batch; all ranks run equally many forwards."""
        job = self.job
        sums = []
        for packed, is_real in padded(microbatches_of(trees, job), trees, job):
            scores = job.fit.attempt(partial(job.scorer, packed), packed, trees, where)
            if not is_real:
                continue
            terms = job.method.loss(scores, packed.to(scores.logp_N.device)).terms
            pairs = [
                (float(terms[term]), losses.count(unit, packed))
                for term, unit in job.method.loss.units.items()
            ]
            sums.append([*chain.from_iterable(pairs), float(packed.num_tokens)])
        return sums
