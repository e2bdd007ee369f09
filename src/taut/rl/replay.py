"""Replay: groups of earlier rollouts are trained on again with each new rollout. ``rollout.replay_groups``.

Only groups whose advantages are not all 0 are kept, newest first, with the advantages that they had. ``max_staleness``
bounds the updates between the weights that sampled a group and the weights that train on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from taut.rl.advantages import TrainSample
from taut.rl.rollout import Rollout, RolloutRequest, RolloutState, WrappedSource
from taut.rl.settings import RolloutConfig


@dataclass(eq=False)
class ReplayGroups(WrappedSource):
    """Adds kept groups to the rollouts of the inner source."""

    config: RolloutConfig
    state: RolloutState

    def take(self, request: RolloutRequest) -> Rollout:
        rollout = self.inner.take(request)
        kept, most = self.state.replayed, self.config.max_staleness
        if most is not None:
            # version of the weights that the last update on the rollout trains
            last = request.version + self.config.updates - 1
            kept = [sample for sample in kept if last - sample.version <= most]
        return replace(rollout, replayed=kept)

    def commit(self, rollout: Rollout, samples: Sequence[TrainSample]) -> None:
        self.inner.commit(rollout, samples)
        new = [sample for sample in samples if sample.has_gradient]
        self.state.replayed = [*new, *rollout.replayed][: self.config.replay_groups]
