"""Teachers that score the completions of a rollout before it is trained on.

A teacher gives a completion streams of its targets (types.py): its logprob of each, and its likeliest tokens there.
They are computed once, however many steps train on the rollout. A teacher is

    ServerTeacher    behind a server, which is asked
    ModelTeacher     a model in this process, the policy among them. It may see a completion after another prompt than
                     the student (``view``), and with other weights (``active``). The completions of a group are a tree
                     in its layout too: their prompt is computed once

Metrics of each teacher, over the tokens that it scored: ``teacher/kl``, the mean of the engine's logprob less the
teacher's, which estimates KL(student || teacher) where the student sampled them at temperature 1; ``teacher/listed``,
the mean probability of its likeliest tokens; ``teacher/tokens``. Of several teachers each has its own,
``teacher/NAME/kl``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from taut.config import Decision
from taut.inference.teacher_server import TeacherServer
from taut.models.scorer import Scorer
from taut.models.teacher import teacher_streams
from taut.rl.rollout import Group, ModelScores, sample_of, score_trees
from taut.rl.sampler import Trajectory
from taut.train.distributed import outcome_of
from taut.train.trainer import Trainer
from taut.types import TEACHER_LOGP, TOP_LOGP, FloatArray, Packed, Sample, Tree, Wants


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
        with trainer.interrupts.at_once(ranks):
            outcome = outcome_of(lambda: self.server.score(samples[ranks.rank :: ranks.size]))
        return {name: scores for share in ranks.agree(outcome) for name, scores in share.items()}

    def close(self) -> None:
        self.server.close()


@dataclass(frozen=True)
class ModelTeacher:
    """A teacher in this process: a role of the trainer, for the trees of its groups."""

    scorer: Scorer
    top: int
    """Likeliest tokens of each target; 0: none."""
    num_rows: int
    """Rows of the student's vocabulary: what is listed is among them."""
    temperature: float = 1.0
    """Divides the logits of the logprob; the list is at temperature 1."""
    active: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The context of its forwards: the weights that it has."""
    view: Callable[[Trajectory], Sample] = sample_of
    """Its view of a trajectory: other tokens before the same targets."""
    gives = TEACHER_LOGP

    def score(self, trainer: Trainer, groups: Sequence[Group], step: int) -> ModelScores:
        trees = [Tree(tuple(map(self.view, group.trajectories))) for group in groups]
        return score_trees(trainer, trees, Wants(logp=False), [self], step)

    def streams(self, packed: Packed) -> dict[str, Tensor]:
        return teacher_streams(self.scorer, packed, self.top, self.num_rows, self.temperature)

    def tensors(self) -> list[Tensor]:
        return list(self.scorer.parameters())

    def follow(self, step: int) -> None:
        """Whoever owns the weights moves them."""

    def close(self) -> None:
        """Nothing to close: the model is the run's."""


@dataclass(frozen=True)
class Teachers:
    """The teachers of a run, by name."""

    by_name: Mapping[str, RolloutTeacher]
    column: str | None = None
    """The column with the name of a row's teacher; None: one teacher, named "", for all."""
    decisions: Sequence[Decision] = ()
    """The settings that were chosen when they were opened, with reasons."""

    def score(
        self, trainer: Trainer, groups: Sequence[Group], step: int
    ) -> tuple[ModelScores, dict[str, float]]:
        """The streams of every trajectory of these groups, and metrics."""
        scores: ModelScores = {}
        metrics: dict[str, float] = {}
        for name, teacher in self.by_name.items():
            own = list(groups)
            if self.column is not None:
                own = [group for group in groups if str(group.row.columns[self.column]) == name]
            if own:
                of_teacher = teacher.score(trainer, own, step)
                metrics |= _metrics(f"teacher/{name}" if name else "teacher", own, of_teacher)
                scores |= of_teacher
        return scores, metrics

    def close(self) -> None:
        """Close what was opened."""
        for teacher in self.by_name.values():
            teacher.close()


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
