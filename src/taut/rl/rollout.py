"""Rollouts: how they are configured, what a rollout is, where it comes from, and how the trainer's models score it.

``RolloutSource`` is where rollouts come from. The base sources are ``RolloutWorker`` (worker.py), which samples from
the policy, ``AsyncRollouts`` (async_rollouts.py), which takes what was sampled while the model trained, and
``RecordedRollouts`` (recorded.py), which reads the rollouts of another run. Each feature is a source that wraps another
one, in a file of its own; ``Online.rollouts`` (online.py) puts them together.

The prompts of a rollout are a pure function of the seed and the rollout's number (``Order`` in data/order.py), so a
restart needs no memory of them.

``score_trees`` runs the trainer's own models: logprobs of the current policy and of the reference, values of the
critic. Trajectories are packed, shared and dealt out to ranks as in a training step, without gradient; every rank gets
all results, by sample.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import (
    TYPE_CHECKING,
    NamedTuple,
    TypeAlias,
    TypeVar,
    cast,
)

import numpy as np
import torch
from torch import Tensor

from taut.config import Decision
from taut.data.order import Order
from taut.data.rows.prompts import PromptRow
from taut.losses.advantages import are_alike
from taut.models.scorer import evaluating
from taut.rl.sampler import Trajectory
from taut.train.trainer import Role, Trainer, on_device, plan_microbatches
from taut.types import FloatArray, Packed, Sample, Scores, Tree, Wants, to_host

if TYPE_CHECKING:
    from taut.rl.advantages import TrainSample
    from taut.rl.async_rollouts import DrawState
    from taut.rl.difficulty import Record

RESERVED = ("shaped", "kept")
"""Names of other metrics of a rollout, which no reward may have."""

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Group:
    """The trajectories of one prompt, each with its reward."""

    trajectories: tuple[Trajectory, ...]

    @property
    def row(self) -> PromptRow:
        return self.trajectories[0].row

    @property
    def rewarded(self) -> list[Trajectory]:
        """The trajectories that have a reward."""
        return [trajectory for trajectory in self.trajectories if trajectory.has_reward]

    @property
    def has_signal(self) -> bool:
        """Whether its rewards differ."""
        return not are_alike([trajectory.reward for trajectory in self.rewarded])


class Oversampled(NamedTuple):
    """The groups that ``rollout.oversample`` cancelled."""

    num_groups: int
    num_tokens: float
    """Estimated mean number of tokens that their answers had (``RolloutQueue.sizes``)."""


@dataclass(frozen=True)
class Rollout:
    """The groups of a rollout, and the seconds that they took."""

    groups: Sequence[Group]
    left_out: Sequence[Group] = ()
    """Groups without a signal, which others replace."""
    seconds_generating: float = 0.0
    """With rollout.lag: seconds that training waited for the groups."""
    seconds_judging: float = 0.0
    """Seconds after the last trajectory was finished."""
    prompts: Sequence[int] = ()
    """Indices of the prompts that were asked, in one round."""
    draws: Sequence[int] = ()
    """With rollout.lag: the draws of ``all_groups``, in the order in which they were taken."""
    num_stale: int = 0
    """With rollout.lag: number of groups that were dropped because of their age."""
    oversampled: Oversampled | None = None
    num_replaced: int = 0
    """Number of prompts that rollout.difficulty_filter replaced."""
    from_data: Sequence[Group] = ()
    """Answers of the data, which were not generated."""
    replayed: Sequence[TrainSample] = ()
    """Groups of earlier rollouts to train on again."""
    lost: tuple[int, int] = 0, 0
    """``LocalEngine.take_lost``: tokens that were computed again, and bytes that would have been enough."""

    @property
    def all_groups(self) -> list[Group]:
        return [*self.groups, *self.left_out]

    @property
    def rewarded(self) -> list[Group]:
        """The groups to learn from, with their trajectories that have a reward."""
        every = (*self.groups, *self.from_data)
        groups = [Group(tuple(group.rewarded)) for group in every]
        return [group for group in groups if group.trajectories]


@dataclass(frozen=True, eq=False)
class RolloutRequest:
    """The rollout that a source is asked for. Wrappers pass it on with other prompts.

    A draw is a place in the endless order of prompts; each rollout has ``order.samples_per_step`` of them.
    """

    number: int
    """Number of the rollout, from 0."""
    order: Order
    """The order of prompts; its step ``number + 1`` has the prompts of this rollout."""
    version: int = 0
    """Version of the weights that train on the rollout first."""
    num_left: int = 1
    """Number of rollouts until the end of the run, this one included."""
    is_asked: Callable[[int], bool] = lambda draw: True
    """Whether the policy answers a draw."""
    choose: Callable[[int, int, Collection[int]], int] = lambda draw, index, taken: index
    """Choose the prompt of a draw, given its prompt by the order and the prompts that are asked at the same time."""
    prompts: Sequence[int] | None = None
    """Indices of the prompts to ask; None: the prompts of the rollout's draws (``resolved``)."""
    num_replaced: int = 0
    """Number of ``prompts`` that ``choose`` replaced."""
    round: int = 0
    """Round of dynamic sampling. Each round has random streams of its own."""
    num_wanted: int | None = None
    """Finish as many groups, and cancel the others; None: finish all."""
    is_wanted: Callable[[Group], bool] = lambda group: True
    """Whether a finished group counts as one of them."""

    def num_asked(self, number: int) -> int:
        """Return how many draws of a rollout the policy answers."""
        size = self.order.samples_per_step
        return sum(map(self.is_asked, range(number * size, (number + 1) * size)))

    def resolved(self) -> tuple[RolloutRequest, Sequence[int]]:
        """Return the request with its prompts chosen, and the prompts."""
        if self.prompts is not None:
            return self, self.prompts
        planned, first = self.order.step(self.number + 1), self.number * self.order.samples_per_step
        taken, chosen, num_replaced = set(planned), list[int](), 0
        for draw, index in enumerate(planned, first):
            if self.is_asked(draw):
                chosen.append(self.choose(draw, index, taken))
                taken.add(chosen[-1])
                num_replaced += chosen[-1] != index
        return replace(self, prompts=chosen, num_replaced=num_replaced), chosen


@dataclass(eq=False)
class RolloutState:
    """The state of the sources of a run, which a checkpoint keeps. Values are replaced, never changed in place."""

    replayed: Sequence[TrainSample] = ()
    """Groups that may be trained on again, newest first (replay.py)."""
    draws: DrawState = field(default_factory=lambda: cast("DrawState", {"next": 0, "open": []}))
    """Draws that are open after the last rollout that was accepted (async_rollouts.py)."""
    difficulty: Mapping[int, Record] = field(default_factory=dict)
    """Records of prompts, by index (difficulty.py)."""


class RolloutSource:
    """Where rollouts come from. Every rank has one; all ranks call it in step and get equal rollouts."""

    decisions: Sequence[Decision] = ()
    """The settings that were chosen when it was opened, with reasons."""

    def take(self, request: RolloutRequest) -> Rollout:
        """Return a rollout with its rewards. Taking does not change the ``RolloutState``."""
        raise NotImplementedError

    def commit(self, rollout: Rollout, samples: Sequence[TrainSample]) -> None:
        """Update the state by the last rollout that was taken, once it is accepted. ``samples``: made of its groups."""

    def close(self) -> None:
        """Release engines, processes and threads."""


@dataclass(eq=False)
class WrappedSource(RolloutSource):
    """A source that adds something to another one; the base of features."""

    inner: RolloutSource

    @property
    def decisions(self) -> Sequence[Decision]:  # type: ignore[override]  # of the instance
        return self.inner.decisions

    def commit(self, rollout: Rollout, samples: Sequence[TrainSample]) -> None:
        self.inner.commit(rollout, samples)

    def close(self) -> None:
        self.inner.close()


def distinct(rows: Sequence[PromptRow]) -> list[PromptRow]:
    """Return the rows, each with an id of its own where a row occurs more than once."""
    times: dict[str, int] = {}
    named = []
    for row in rows:
        again = times[row.id] = times.get(row.id, -1) + 1
        named.append(replace(row, id=f"{row.id} again {again}") if again else row)
    return named


# -- scores of the trainer's own models

POLICY, REFERENCE, VALUE = "old_logp_N", "ref_logp_N", "value_R"
ModelScores: TypeAlias = dict[str, dict[str, FloatArray]]
"""Sample id -> name -> a model's scores of it, [N] or [R]."""


def sample_of(
    trajectory: Trajectory, *, has_reads: bool = False, has_bootstrap: bool = False
) -> Sample:
    """Return a trajectory as a sample, whose targets are its sampled tokens. ``has_reads``: a critic is read before
    each target. ``has_bootstrap``: and after the last target where the trajectory was cut.
    """
    at_N, size = trajectory.sampled_at_N, trajectory.ids_T.size
    sample = Sample(trajectory.name, trajectory.ids_T, at_N, np.ones(at_N.size), trajectory.media)
    if not has_reads:
        return sample
    after = [size - 1] if has_bootstrap and trajectory.is_cut else []
    return replace(sample, read_at_R=np.concatenate([at_N - 1, after]).astype(np.int64))


def score_trees(
    trainer: Trainer, trees: Sequence[Tree], wants: Wants, roles: Sequence[Role], step: int
) -> ModelScores:
    """Return the scores of each sample of these trees by the policy, the critic and ``roles``. ``wants``: whether the
    policy's logprobs (``logp``) and the critic's values (``scalar``).
    """
    scores_of: ModelScores = {sample.id: {} for tree in trees for sample in tree.samples}
    if not trees or not (wants.logp or wants.scalar or roles):
        return scores_of

    kept: list[tuple[str, Packed, Tensor, Tensor]] = []
    """(Name of the scores, micro-batch, values on their device, sample of each value)."""

    def attempt(act: Callable[[Packed], T], packed: Packed) -> T:
        if trainer.ranks.size == 1:
            trainer.interrupts.check()
        with torch.no_grad():  # outside the attempt: what fits a forward is not what fits a step
            where = f"the rollout of step {step}"
            return trainer.fit.attempt(partial(act, packed), packed, trees, where)

    def policy_and_critic(packed: Packed) -> Scores:
        with evaluating(trainer.scorer), trainer.compute():
            scores: Scores = trainer.scorer(packed, wants=wants)
        return scores

    # the policy and the critic, then each role
    planned = plan_microbatches(trees, trainer)
    if wants.logp or wants.scalar:
        for packed, is_real in on_device(trainer, planned):
            scores, host = attempt(policy_and_critic, packed), packed.on_host
            if is_real and wants.logp:
                kept.append((POLICY, host, scores.logp_N, host.row_N))
            if is_real and scores.scalar_R is not None:
                kept.append((VALUE, host, scores.scalar_R, host.row_R))
    for role in roles:
        with trainer.interrupts.held(), role.active(), trainer.compute():
            for packed, is_real in on_device(trainer, planned):
                streams, host = attempt(role.streams, packed), packed.on_host
                for name, value_N in streams.items() if is_real else ():
                    kept.append((name, host, value_N, host.row_N))
    # read from the device at once, and sorted by sample
    read = to_host([value for _, _, value, _ in kept])
    for (name, packed, _, row), value in zip(kept, read, strict=True):
        values, rows = value.double().numpy(), row.numpy()
        for number, sample_id in enumerate(packed.sample_ids):
            scores_of[sample_id][name] = values[rows == number]
    # every rank gets the scores of all
    if trainer.ranks.size == 1:
        return scores_of
    everything: ModelScores = {name: {} for name in scores_of}
    mine = {name: scores for name, scores in scores_of.items() if scores}
    for share in trainer.ranks.gather(mine):
        for name, scores_of_sample in share.items():
            everything[name] |= scores_of_sample
    return everything
