"""Teachers that score the completions of a rollout before it is trained on.

What a teacher gives a completion are streams of its targets (types.py): its logprob of each, and its likeliest tokens
there. They are computed once, however many steps train on the rollout. A teacher is a server (``ServerTeacher``).

Metrics of each teacher, over the tokens that it scored: ``teacher/kl``, the mean of the engine's logprob less the
teacher's, which estimates KL(student || teacher) where the student sampled them at temperature 1; ``teacher/listed``,
the mean probability of its likeliest tokens; ``teacher/tokens``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from taut.config import Decision
from taut.errors import TautError
from taut.inference.teacher_server import TeacherServer
from taut.rl.rollout import Group, ModelScores, sample_of
from taut.train.trainer import Trainer
from taut.types import TEACHER_LOGP, TOP_LOGP, FloatArray


class RolloutTeacher(Protocol):
    """Scores the completions of groups."""

    def score(self, trainer: Trainer, groups: Sequence[Group], step: int) -> ModelScores:
        """Streams of each trajectory, by its name. Every rank calls it, and all get all of them."""

    def close(self) -> None:
        """Release its resources."""


@dataclass(frozen=True)
class ServerTeacher:
    """A teacher behind a server. The ranks share the requests."""

    server: TeacherServer

    def score(self, trainer: Trainer, groups: Sequence[Group], step: int) -> ModelScores:
        samples = [sample_of(t) for group in groups for t in group.trajectories]
        ranks = trainer.ranks
        outcome: ModelScores | TautError
        with trainer.interrupts.at_once(ranks):
            try:
                outcome = self.server.score(samples[ranks.rank :: ranks.size])
            except TautError as error:
                outcome = error
        scores: ModelScores = {}
        for share in ranks.gather(outcome):
            if isinstance(share, TautError):
                raise share
            scores |= share
        return scores

    def close(self) -> None:
        self.server.close()


@dataclass(frozen=True)
class Teachers:
    """The teachers of a run."""

    teacher: RolloutTeacher
    settled: Sequence[Decision] = ()
    """What was decided for the user when they were opened."""

    def score(
        self, trainer: Trainer, groups: Sequence[Group], step: int
    ) -> tuple[ModelScores, dict[str, float]]:
        """The streams of every trajectory of these groups, and metrics."""
        scores = self.teacher.score(trainer, groups, step)
        return scores, _metrics("teacher", groups, scores)

    def close(self) -> None:
        """Close what was opened."""
        self.teacher.close()


def _metrics(name: str, groups: Sequence[Group], scores: ModelScores) -> dict[str, float]:
    """The metrics of a teacher of these groups."""
    trajectories = [t for group in groups for t in group.trajectories]
    gaps: list[FloatArray] = [t.logp_N - scores[t.name][TEACHER_LOGP] for t in trajectories]
    gap_N = np.concatenate(gaps)
    metrics = {f"{name}/tokens": float(gap_N.size)}
    if not np.isnan(gap_N).all():
        metrics[f"{name}/kl"] = float(np.nanmean(gap_N))
    listed = [np.exp(own[TOP_LOGP]).sum(axis=1) for own in scores.values() if TOP_LOGP in own]
    if listed:
        metrics[f"{name}/listed"] = float(np.concatenate(listed).mean())
    return metrics
