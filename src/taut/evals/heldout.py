"""Loss on held-out data: the training loss's own sums and metrics, without gradient, over every row of a set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from taut import losses
from taut.data.groups import Rows
from taut.loop import Job, made_ready
from taut.types import Tree
from taut.wholestep import Planned, Sums

ROWS_AT_A_TIME = 512
"""Rows planned together; bounds what is laid out in memory. What a loss takes over a whole step it takes over so many.
"""


@dataclass(frozen=True)
class HeldOut:
    """Evaluates ``job.method.loss`` on ``rows`` and emits an ``eval`` event."""

    rows: Rows
    job: Job

    def __call__(self, step: int) -> dict[str, float]:
        """``loss`` (each term's sum by its count) and the loss's metrics; every row counts once, whatever the number of
        ranks.
        """
        job, method = self.job, self.job.method
        terms, metrics, num_tokens = Sums(), Sums(), 0
        job.scorer.eval()
        for start in range(0, len(self.rows), ROWS_AT_A_TIME):
            indices = list(range(start, min(start + ROWS_AT_A_TIME, len(self.rows))))
            trees, observed = self.rows.trees(indices), method.observed_of(self.rows, indices)
            planned = made_ready(job, trees, observed, f"held-out loss after step {step}")
            num_tokens += self._add(planned, trees, (terms, metrics), step)
        found = {"loss": sum(terms.means(job.ranks).values()), **metrics.means(job.ranks)}
        total = int(job.ranks.sum([num_tokens])[0])
        job.emit("eval", step=step, num_samples=len(self.rows), num_tokens=total, **found)
        return found

    def _add(
        self, planned: Planned, trees: Sequence[Tree], sums: tuple[Sums, Sums], step: int
    ) -> int:
        """Add the terms and metrics of what counts; its tokens. All ranks run equally many forwards."""
        job, loss = self.job, self.job.method.loss
        terms, metrics = sums
        num_tokens = 0
        for packed, is_real in planned:
            with torch.no_grad(), job.compute():
                score = partial(job.scorer, packed, wants=loss.wants)
                where = f"held-out loss after step {step}"
                scores = job.fit.attempt(score, packed, trees, where)
            if not is_real:
                continue
            found = loss(scores, packed.to(scores.device))
            for term, unit in loss.units.items():
                terms.add(term, found.terms[term], losses.count(unit, packed))
            for name, (total, count) in found.metrics.items():
                metrics.add(name, total, count)
            num_tokens += packed.num_tokens
        return num_tokens
