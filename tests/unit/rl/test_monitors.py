"""What stops a run that generates, what it is warned of, and what is remembered of that."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.helpers.preference_rows import plain_pairs
from tests.unit.rl.test_advantages import trajectory

from taut.errors import CheckFailed
from taut.losses.policy import PolicyGradient
from taut.rewards.reward_set import RewardResult
from taut.rewards.verifier import Score
from taut.rl.monitors import (
    BEGINNING,
    DIFFERENCE,
    DRIFT,
    EFFECTIVE,
    ESTIMATE,
    EXACT,
    HIGH,
    LOW,
    RECENT,
    WEIGHT,
    RolloutMonitor,
)
from taut.rl.rollout import Group
from taut.rl.settings import RolloutMonitorConfig
from taut.train.distributed import Ranks
from taut.train.trainer import StepReport, Trainer
from taut.types import Scores


def group(*totals: float | None, error: str | None = None) -> Group:
    """A path for each number; None: its reward is an error, or does not apply."""
    reward_results = [
        RewardResult({"r": Score(t, None if t is not None else error)}, t) for t in totals
    ]
    return Group(
        tuple(replace(trajectory("a", i, 2), reward_result=v) for i, v in enumerate(reward_results))
    )


def told(**fields: Any) -> dict[str, Any]:
    counts = {"errors": 0, "completions": 16, "rewarded": 16}
    rewards = {"reward": 0.5, "reward_min": 0.0, "reward_max": 1.0}
    return {**counts, **rewards, "stopped": 1.0, "groups_with_signal": 1, **fields}


class Log(list[tuple[str, str]]):
    def __call__(self, kind: str, **fields: Any) -> None:
        self.append((fields["name"], fields["detail"]))


def test_errors_are_bounded_by_their_share() -> None:
    monitor = RolloutMonitor(RolloutMonitorConfig(max_errors=0.25))
    half = [group(1.0, 0.5, 0.0, None, error="late")]
    monitor.require_rewards(half, 1)
    with pytest.raises(
        CheckFailed, match=r"step 2: 2 of 4 .* at most 25% .*nothing was updated; a#"
    ):
        monitor.require_rewards([group(1.0, None, None, 0.0, error="late")], 2)
    broken = replace(trajectory("a", 0, 2), finish_reason="error", error="the server went away")
    lost = Group((broken,))
    with pytest.raises(CheckFailed, match="the server went away"):
        monitor.require_rewards([lost], 3)


def test_what_no_reward_applies_to_is_no_error_and_stops_the_run_when_it_is_all_for_long() -> None:
    monitor, log = RolloutMonitor(RolloutMonitorConfig(max_errors=0.0, max_unrewarded=3)), Log()
    monitor.require_rewards([group(None, None), group(1.0, None)], 1)
    nothing = told(completions=2, rewarded=0, groups_with_signal=0)
    for step in (2, 3):
        monitor.require_rewards([group(None, None)], step)
        monitor.look(step, nothing, log)
    before = monitor.remember()
    with pytest.raises(
        CheckFailed, match=r"step 4: in 3 rollouts in a row no completion has a reward: no reward"
    ):
        monitor.require_rewards([group(None, None)], 4)
    assert monitor.remember() == before and monitor.unrewarded == 2
    assert [name for name, _ in log] == ["unrewarded"] * 2
    assert "none of 2 completions has a reward: no reward applies to them; nothing of" in log[0][1]
    monitor.look(4, told(), log)
    assert monitor.unrewarded == 0
    with pytest.raises(CheckFailed, match="in 1 rollouts in a row"):
        RolloutMonitor(RolloutMonitorConfig(max_unrewarded=1)).require_rewards(
            [group(None, None)], 1
        )


def test_many_completions_without_a_reward_are_warned_of_once_until_they_are_few_again() -> None:
    monitor, log = RolloutMonitor(RolloutMonitorConfig(warn_unrewarded=0.2)), Log()
    for rewarded in (16, 13, 6, 6, 13, 12):
        monitor.look(1, told(rewarded=rewarded), log)
    assert [detail.partition(" have")[0] for _, detail in log] == [
        "10 of 16 completions",
        "4 of 16 completions",
    ]
    assert "the mean reward is over the other 6" in log[0][1]
    monitor.look(1, told(rewarded=6, first_error="a#0: late"), log)
    assert len(log) == 2, "still the same episode"


def test_roll_outs_without_a_signal_are_counted_in_a_row() -> None:
    monitor = RolloutMonitor(RolloutMonitorConfig(max_without_signal=2))
    log = Log()
    for signal in (0, 1, 0):
        monitor.look(1, told(groups_with_signal=signal), log)
    with pytest.raises(CheckFailed, match=r"step 9: in the last 2 rollouts .*their mean is 0\.5"):
        monitor.look(9, told(groups_with_signal=0), log)
    never = RolloutMonitor(RolloutMonitorConfig(max_without_signal=0))
    for _ in range(30):
        never.look(1, told(groups_with_signal=0), log)
    ((name, detail),) = log
    assert name == "equal_rewards" and "max_without_signal" not in detail
    assert detail.startswith("in the last 3 rollouts the rewards of every group were equal (the")


def test_answers_that_cease_to_end_are_told_once_until_they_end_again() -> None:
    monitor, log = RolloutMonitor(RolloutMonitorConfig(warn_stop_drop=0.2)), Log()

    def look(shares: Sequence[float]) -> None:
        for share in shares:
            monitor.look(1, told(stopped=share), log)

    look([0.9] * BEGINNING + [0.5] * (RECENT + 3))
    assert [name for name, _ in log] == ["stops"]
    assert "50% of the last completions ended by themselves, 90% of the first" in log[0][1]
    look([0.9] * RECENT + [0.5] * RECENT)
    assert [name for name, _ in log] == ["stops", "stops"]


def test_errors_are_told() -> None:
    monitor, log = RolloutMonitor(RolloutMonitorConfig()), Log()
    monitor.look(4, told(errors=3, first_error="a#0: late"), log)
    assert log == [("rewards", "3 completions have no reward because of an error; a#0: late")]


def report(
    found: float, effective: float = 1.0, step: int = 1, *, weight: float = 1.0
) -> StepReport:
    """A step with these metrics."""
    metrics = {DIFFERENCE: found, EFFECTIVE: effective, WEIGHT: weight}
    return StepReport(step, 0.0, metrics, 2, 2, 2, ["a"], [])


def watched(monitor: RolloutMonitor, log: Log, seen: StepReport) -> None:
    trainer = SimpleNamespace(ranks=Ranks(0, 1, torch.device("cpu")), emit=log)
    monitor(seen, cast(Trainer, trainer))


def test_an_engine_that_is_far_off_stops_the_run() -> None:
    monitor, log = RolloutMonitor(RolloutMonitorConfig()), Log()
    seen = report(0.05)
    watched(monitor, log, seen)
    assert log == []
    for step in (2, 3):
        watched(monitor, log, report(0.2, 0.1, step))
    assert [name for name, _ in log] == ["rollout_engine", "rollout_effective"]
    for value in (0.6, float("nan")):
        with pytest.raises(CheckFailed, match=r"step 7: .* nothing was updated"):
            watched(monitor, log, report(value, step=7))


def test_a_correction_that_leaves_little_weight_is_told_at_the_first_update() -> None:
    """Also where all weights are alike, so that the effective sample size is that of all tokens."""
    for effective, weight in ((0.19, 0.9), (1.0, 0.15)):
        monitor, log = RolloutMonitor(RolloutMonitorConfig()), Log()
        watched(monitor, log, report(0.016, effective, weight=weight))
        ((name, detail),) = log
        assert name == "rollout_effective" and "rollout_correction_level=geometric" in detail
    monitor, log = RolloutMonitor(RolloutMonitorConfig()), Log()
    watched(monitor, log, report(0.016, 0.99, weight=0.98))
    assert log == []


def test_a_loss_that_knows_no_engine_is_not_watched() -> None:
    monitor, log = RolloutMonitor(RolloutMonitorConfig()), Log()
    seen = report(0.9)
    seen.metrics.clear()
    watched(monitor, log, seen)
    assert seen.metrics == {} and log == []


def test_it_is_remembered() -> None:
    monitor, log = RolloutMonitor(RolloutMonitorConfig()), Log()
    for _ in range(BEGINNING + RECENT):
        monitor.look(1, told(stopped=0.9 - len(monitor.recent) / 5, groups_with_signal=0), log)
    other = RolloutMonitor(RolloutMonitorConfig())
    other.recall(json.loads(json.dumps(monitor.remember())))
    assert other == monitor and other.silent == BEGINNING + RECENT


def test_what_stops_the_run_is_not_remembered() -> None:
    """Resumed, the same rollout counts once."""
    monitor, log = RolloutMonitor(RolloutMonitorConfig(max_without_signal=2)), Log()
    monitor.look(1, told(groups_with_signal=0), log)
    before = monitor.remember()
    with pytest.raises(CheckFailed, match="last 2 rollouts"):
        monitor.look(2, told(groups_with_signal=0), log)
    assert monitor.remember() == before
    kept = monitor.remember()
    monitor.look(3, told(), log)
    assert kept == before, "a copy"


def updates(
    monitor: RolloutMonitor, log: Log, metrics: Sequence[dict[str, float]], reward: float = 0.3
) -> None:
    """Steps of a loss that knows no engine, each after a rollout with right and wrong answers."""
    for step, given in enumerate(metrics, 1):
        monitor.look(step, told(reward=reward), log)
        watched(monitor, log, replace(report(0.0, step=step), metrics=dict(given)))


def update(kl: float = 0.0, clipped: float = 0.0, entropy: float = 0.6) -> dict[str, float]:
    return {
        "old/kl_k1": kl,
        "clip/low": clipped / 2,
        "clip/high": clipped / 2,
        "entropy_estimate": entropy,
    }


HONEST = [update(kl=0.1 * (i % 4), clipped=0.1 * (i % 4), entropy=0.6 - i / 50) for i in range(20)]
"""Four updates a rollout, of whose last 30% of the tokens are clipped; the entropy falls from 0.6 to 0.22."""


@pytest.mark.parametrize(
    ("name", "bad", "detail"),
    [
        ("drift", update(kl=5.0), r"1 nats a token .* at most 0\.5 \(rollout_monitor\.warn_kl\)"),
        ("clipped", update(clipped=0.9), r"54% of the tokens .* at most 40%"),
        ("entropy", update(entropy=0.01), r"fallen from 0\.6 to 0\.01 .* at least 10%"),
    ],
)
def test_an_update_that_goes_too_far_is_warned_of_once_until_it_is_better(
    name: str, bad: dict[str, float], detail: str
) -> None:
    monitor, log = RolloutMonitor(RolloutMonitorConfig()), Log()
    updates(monitor, log, [update()] * RECENT + HONEST)
    assert log == []
    good, worse = [update()] * RECENT, [bad] * RECENT
    updates(monitor, log, good + worse)
    assert [found for found, _ in log] == [name] and "optim.learning_rate" in log[0][1]
    assert re.search(detail, log[0][1])
    updates(monitor, log, worse + good + worse)
    assert [found for found, _ in log] == [name] * 2


def test_a_run_at_two_nats_with_half_its_tokens_clipped_is_warned_of_at_its_second_update() -> None:
    monitor, log = RolloutMonitor(RolloutMonitorConfig()), Log()
    updates(monitor, log, [update(), update(kl=2.0, clipped=0.9)])
    assert [name for name, _ in log] == ["drift", "clipped"]


def test_the_numbers_it_reads_are_those_of_the_loss() -> None:
    zero_N = torch.zeros(3, dtype=torch.float64)
    names = ("advantage_N", "old_logp_N", "engine_logp_N")
    packed = replace(plain_pairs([(2, 1)]), streams=dict.fromkeys(names, zero_N))
    loss = PolicyGradient(is_fresh=False, has_engine_logp=True, entropy=True)
    metrics = loss(Scores(zero_N, entropy_N=zero_N), packed).metrics
    read = {DRIFT, LOW, HIGH, EXACT, ESTIMATE, DIFFERENCE, WEIGHT}
    assert read <= metrics.keys()
    assert EFFECTIVE in loss.derived({name: float(a / b) for name, (a, b) in metrics.items()})


def test_exact_entropy_goes_before_its_estimate() -> None:
    monitor, log = RolloutMonitor(RolloutMonitorConfig()), Log()
    first, last = update() | {"entropy": 3.0}, update() | {"entropy": 0.05}
    updates(monitor, log, [first] * BEGINNING + [last] * RECENT)
    assert [name for name, _ in log] == ["entropy"]
    never = RolloutMonitor(RolloutMonitorConfig(warn_entropy=0.0))
    updates(never, log, [first] * BEGINNING + [last | {"entropy": 0.0}] * RECENT)
    assert len(log) == 1


def test_entropy_may_go_where_answers_have_become_good() -> None:
    """80% right, as after a task is learned; at 60% the rest is no longer found. A reward that never differs says
    nothing.
    """
    learned, log = RolloutMonitor(RolloutMonitorConfig()), Log()
    begun, spent = [update()] * RECENT, [update(entropy=0.02)] * RECENT
    updates(learned, log, begun, reward=0.05)
    updates(learned, log, begun + spent, reward=0.8)
    assert log == []
    updates(learned, log, spent, reward=0.6)
    assert [name for name, _ in log] == ["entropy"]
    assert "the mean reward is 0.6" in log[0][1] and "up to 1;" in log[0][1]


def test_a_number_around_its_limit_is_one_episode() -> None:
    monitor, log = RolloutMonitor(RolloutMonitorConfig()), Log()
    updates(monitor, log, [update(kl=kl) for kl in (0.6, 0.4) * 20])
    updates(monitor, log, [update(entropy=0.6)] * RECENT)
    updates(monitor, log, [update(entropy=of) for of in (0.05,) * RECENT + (0.07, 0.05) * 20])
    assert [name for name, _ in log] == ["drift", "entropy"]


def test_entropy_of_another_loss_is_not_watched() -> None:
    monitor, log = RolloutMonitor(RolloutMonitorConfig()), Log()
    updates(monitor, log, [{"entropy": 3.0}] * RECENT + [{"entropy": 0.0}] * RECENT)
    assert log == []


def test_answers_that_are_left_out_of_training_are_told_once_until_they_are_few() -> None:
    monitor, log = RolloutMonitor(RolloutMonitorConfig()), Log()
    for share in (0.0, 0.2, 0.6, 0.19, 0.7, 0.1, 0.25):
        monitor.look(1, told(dropped=share), log)
    assert [name for name, _ in log] == ["dropped", "dropped"]
    assert "60% of the answers are cut and left out" in log[0][1]


def critic(low: float, high: float, least: float = 0.0, most: float = 1.0) -> dict[str, Any]:
    return told(value_low=low, value_high=high, return_min=least, return_max=most)


def test_values_outside_the_range_of_the_returns_are_told_once_until_they_are_back() -> None:
    monitor, log = RolloutMonitor(RolloutMonitorConfig()), Log()
    for _ in range(2 * RECENT):
        monitor.look(1, critic(-0.3, 1.4), log)
    monitor.look(
        1, critic(0.1, 0.2, least=0.0, most=0.0), log
    )  # one rollout without a right answer
    assert log == []
    for high in (2.0, 6.8):
        monitor.look(2, critic(0.1, high), log)
    ((name, detail),) = log
    assert name == "values" and "from 0.1 to 2," in detail and "from 0 to 1;" in detail
    monitor.look(3, critic(0.1, 0.9), log)
    monitor.look(4, critic(-0.8, 0.9), log)
    assert [name for name, _ in log] == ["values", "values"]


def test_values_of_a_constant_reward() -> None:
    """Every answer is worth 0.5, and values run to 6.8. A critic that has only begun is not judged."""
    monitor, log = RolloutMonitor(RolloutMonitorConfig()), Log()
    for _ in range(RECENT - 1):
        monitor.look(1, critic(-2.0, 2.0, least=0.5, most=0.5), log)
    monitor.look(2, critic(0.0, 0.6, least=0.5, most=0.5), log)
    assert log == []
    monitor.look(3, critic(0.4, 6.8, least=0.5, most=0.5), log)
    assert [name for name, _ in log] == ["values"]


def test_monitors_go_on_after_a_resume() -> None:
    """Also from a checkpoint of before there were any."""
    monitor, log = RolloutMonitor(RolloutMonitorConfig()), Log()
    updates(monitor, log, [update()] * RECENT + [update(kl=2.0, entropy=0.01)] * RECENT)
    monitor.look(1, critic(0.0, 1.0), log)
    other = RolloutMonitor(RolloutMonitorConfig())
    other.recall(json.loads(json.dumps(monitor.remember())))
    assert other == monitor and {"drift", "entropy"} <= other.warned
    updates(other, log, [update(kl=2.0, entropy=0.01)])
    assert [name for name, _ in log] == ["drift", "entropy"]
    old = {key: monitor.remember()[key] for key in ("first", "recent", "silent", "told")}
    other.recall(old)
    assert other.last == {} and other.first_entropy == []
