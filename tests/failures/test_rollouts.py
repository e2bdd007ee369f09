"""What rollouts may not hide: a truncated distribution, a wrong token, ends that fail to come, old weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.helpers.chat_runs import QUIET
from tests.unit.rl.test_advantages import assign, paths, policy

from taut.config import from_mapping
from taut.data.order import Order
from taut.errors import ConfigError
from taut.methods.grpo import Grpo
from taut.rl.advantages import Gae, TrainSample
from taut.rl.monitors import BEGINNING, RECENT, RolloutMonitor
from taut.rl.replay import ReplayGroups
from taut.rl.rollout import VALUE, Rollout, RolloutRequest, RolloutSource, RolloutState
from taut.rl.settings import RolloutConfig, RolloutMonitorConfig, ShapingConfig
from taut.types import Tree

RUN = {**QUIET, "model": "m", "data.train": "d.jsonl", "method": "grpo", "rewards": "exact_match"}


@pytest.mark.parametrize("key", ["top_p", "top_k", "min_p", "repetition_penalty"])
def test_a_truncated_distribution_cannot_be_asked_for(key: str) -> None:
    with pytest.raises(ConfigError, match=f"rollout.{key}"):
        from_mapping(Grpo, {**RUN, f"rollout.{key}": 0.9})


def test_roll_outs_are_drawn_from_all_tokens_at_the_temperature_that_is_trained_on() -> None:
    run = from_mapping(Grpo, {**RUN, "rollout.temperature": 0.7})
    sampling = run.rollout.sampling(seed=1)
    assert sampling.is_untruncated and sampling.repetition_penalty == 1
    assert run.loss().wants.temperature == sampling.temperature == 0.7


def test_a_missing_end_is_punished_where_the_answer_was_cut_and_nowhere_else() -> None:
    shaping = ShapingConfig(missing_eos_penalty=0.5)
    credit = policy(estimate=Gae(gamma=1.0, lam=1.0, is_whitened=False), shaping=shaping)
    cut, ended = paths([[1.0, 1.0]], a0="length")
    sizes = {path.name: path.sampled_at_N.size for path in (cut, ended)}
    said = {name: {VALUE: np.zeros(size)} for name, size in sizes.items()}
    given = assign(credit, [cut, ended], said)
    # without a discount every token answers for what the last one gets
    assert given.advantages[cut.name].tolist() == [0.5] * sizes[cut.name]
    assert given.advantages[ended.name].tolist() == [1.0] * sizes[ended.name]
    last = {s.id: int(s.target_at_N[-1]) for tree in given.trees for s in tree.samples}
    assert last[cut.name] == cut.ids_T.size - 1


def test_answers_that_cease_to_end_are_told_once() -> None:
    monitor, told = RolloutMonitor(RolloutMonitorConfig()), list[tuple[Any, ...]]()

    def look(share: float) -> None:
        fields = {"stopped": share, "errors": 0, "completions": 8, "groups_with_signal": 1}
        monitor.look(1, fields, lambda *kind, **said: told.append((*kind, said["name"])))

    for share in [0.9] * (BEGINNING + RECENT):
        look(share)
    assert not told
    for share in [0.3] * (2 * RECENT):
        look(share)
    assert told == [("warning", "stops")]


class Nothing(RolloutSource):
    """Rollouts without groups."""

    def take(self, request: RolloutRequest) -> Rollout:
        return Rollout([])


@pytest.mark.parametrize(("version", "is_young"), [(0, True), (1, True), (2, False)])
def test_what_is_older_than_allowed_is_not_trained_on(version: int, *, is_young: bool) -> None:
    config = RolloutConfig(replay_groups=4, max_staleness=3, minibatches=2)
    drawn_at = 4
    kept = TrainSample(drawn_at, Tree(()))
    source = ReplayGroups(Nothing(), config, RolloutState(replayed=[kept]))
    # its second update is one further from the weights it was drawn from
    request = RolloutRequest(1, Order((4,), (1.0,), 0, 2), drawn_at + 1 + version)
    assert source.take(request).replayed == ([kept] if is_young else [])


def test_a_roll_out_that_would_be_too_old_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"rollout.max_staleness=1 .* is 3 behind; expected 3 or more",
    ):
        from_mapping(
            Grpo,
            {
                **RUN,
                "rollout.replay_groups": 1,
                "rollout.max_staleness": 1,
                "rollout.minibatches": 4,
            },
        )
