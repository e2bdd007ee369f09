"""Loss on held-out data: the training loss's own sums and metrics, without gradient, over every row of a set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from taut import losses
from taut.data.groups import Rows
from taut.evals.calibration import Calibration, calibrate
from taut.loop import Job, made_ready
from taut.losses import Loss
from taut.parallel import Ranks
from taut.types import Packed, Scores, Tree
from taut.wholestep import Planned, Sums

ROWS_AT_A_TIME = 512
"""Rows planned together; bounds what is laid out in memory. What a loss takes over a whole step it takes over so many.
"""


@dataclass
class Found:
    """What some rows gave."""

    terms: Sums = field(default_factory=Sums)
    metrics: Sums = field(default_factory=Sums)
    num_tokens: int = 0
    predictions: list[tuple[list[float], list[float]]] = field(default_factory=list)
    """Probabilities, and what they came to."""
    lowest: float = 0.0

    def add(self, loss: Loss, scores: Scores, packed: Packed) -> None:
        """Add a micro-batch."""
        sums = loss(scores, packed)
        for term, unit in loss.units.items():
            self.terms.add(term, sums.terms[term], losses.count(unit, packed))
        for name, (total, count) in sums.metrics.items():
            self.metrics.add(name, total, count)
        self.num_tokens += packed.num_tokens
        predicted = loss.predictions(scores, packed)
        if predicted is not None:
            self.predictions.append((predicted.probability.tolist(), predicted.outcome.tolist()))
            self.lowest = predicted.lowest

    def calibration(self, ranks: Ranks) -> Calibration | None:
        """How far the probabilities of all ranks can be believed; None where there are none."""
        every = [one for rank in ranks.gather(self.predictions) for one in rank]
        lowest = max(ranks.gather(self.lowest))
        probability, outcome = (
            np.array([value for some in every for value in some[part]]) for part in (0, 1)
        )
        return calibrate(probability, outcome, lowest) if probability.size else None


@dataclass(frozen=True)
class HeldOut:
    """Evaluates ``job.method.loss`` on ``rows`` and emits an ``eval`` event."""

    rows: Rows
    job: Job

    def __call__(self, step: int) -> dict[str, float]:
        """``loss`` (each term's sum by its count) and the loss's metrics; every row counts once, whatever the number of
        ranks.
        """
        job, method, found = self.job, self.job.method, Found()
        job.scorer.eval()
        for start in range(0, len(self.rows), ROWS_AT_A_TIME):
            indices = list(range(start, min(start + ROWS_AT_A_TIME, len(self.rows))))
            trees, observed = self.rows.trees(indices), method.observed_of(self.rows, indices)
            planned = made_ready(job, trees, observed, f"held-out loss after step {step}")
            self._add(planned, trees, found, step)
        ranks = job.ranks
        metrics = {"loss": sum(found.terms.means(ranks).values()), **found.metrics.means(ranks)}
        fields: dict[str, Any] = {"num_tokens": int(ranks.sum([found.num_tokens])[0])}
        calibration = found.calibration(ranks)
        if calibration is not None:
            metrics["calibration_error"] = calibration.error
            fields["calibration"] = calibration.as_dict()["bins"]
        job.emit("eval", step=step, num_samples=len(self.rows), **fields, **metrics)
        return metrics

    def _add(self, planned: Planned, trees: Sequence[Tree], found: Found, step: int) -> None:
        """Add what counts. All ranks run equally many forwards."""
        job, loss = self.job, self.job.method.loss
        for packed, is_real in planned:
            with torch.no_grad(), job.compute():
                score = partial(job.scorer, packed, wants=loss.wants)
                where = f"held-out loss after step {step}"
                scores = job.fit.attempt(score, packed, trees, where)
            if is_real:
                found.add(loss, scores, packed.to(scores.device))
