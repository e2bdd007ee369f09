"""What stops a run that generates, what it is warned of, and what is remembered of that."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.unit.online.test_credit import episode

from taut.errors import CheckFailed
from taut.loop import Job, Scored, StepReport
from taut.online.guard import (
    BEGINNING,
    DIFFERENCE,
    EFFECTIVE,
    RECENT,
    WEIGHT,
    Guard,
    GuardConfig,
)
from taut.online.rollouts import Group
from taut.parallel import Ranks
from taut.rewards.panel import Verdict
from taut.rewards.verifier import Score
from taut.types import Packed, Scores


def group(*totals: float | None, error: str | None = None) -> Group:
    """A path for each number; None: its reward is an error, or does not apply."""
    verdicts = [Verdict({"r": Score(t, None if t is not None else error)}, t) for t in totals]
    return Group(tuple(episode("a", i, 2) for i in range(len(totals))), tuple(verdicts))


def told(**fields: Any) -> dict[str, Any]:
    counts = {"errors": 0, "completions": 16, "rewarded": 16}
    return {**counts, "stopped": 1.0, "groups_with_signal": 1, "reward": 0.5, **fields}


class Log(list[tuple[str, str]]):
    def __call__(self, kind: str, **fields: Any) -> None:
        self.append((fields["name"], fields["detail"]))


def test_errors_are_bounded_by_their_share() -> None:
    guard = Guard(GuardConfig(max_errors=0.25))
    half = [group(1.0, 0.5, 0.0, None, error="late")]
    guard.require_rewards(half, 1)
    with pytest.raises(
        CheckFailed, match=r"step 2: 2 of 4 .* at most 25% .*nothing was updated; a#"
    ):
        guard.require_rewards([group(1.0, None, None, 0.0, error="late")], 2)
    broken = replace(episode("a", 0, 2), finish_reason="error", error="the server went away")
    lost = Group((broken,), (Verdict({}, None),))
    with pytest.raises(CheckFailed, match="the server went away"):
        guard.require_rewards([lost], 3)


def test_what_no_reward_applies_to_is_no_error_and_stops_the_run_when_it_is_all_for_long() -> None:
    guard, log = Guard(GuardConfig(max_errors=0.0, max_unrewarded=3)), Log()
    guard.require_rewards([group(None, None), group(1.0, None)], 1)
    nothing = told(completions=2, rewarded=0, groups_with_signal=0)
    for step in (2, 3):
        guard.require_rewards([group(None, None)], step)
        guard.look(step, nothing, log)
    before = guard.remember()
    with pytest.raises(
        CheckFailed, match=r"step 4: in 3 roll-outs in a row no completion has a reward: no reward"
    ):
        guard.require_rewards([group(None, None)], 4)
    assert guard.remember() == before and guard.unrewarded == 2
    assert [name for name, _ in log] == ["unrewarded"] * 2
    assert "none of 2 completions has a reward: no reward applies to them; the updates" in log[0][1]
    guard.look(4, told(), log)
    assert guard.unrewarded == 0
    with pytest.raises(CheckFailed, match="in 1 roll-outs in a row"):
        Guard(GuardConfig(max_unrewarded=1)).require_rewards([group(None, None)], 1)


def test_many_completions_without_a_reward_are_warned_of_once_until_they_are_few_again() -> None:
    guard, log = Guard(GuardConfig(warn_unrewarded=0.2)), Log()
    for rewarded in (16, 13, 6, 6, 13, 12):
        guard.look(1, told(rewarded=rewarded), log)
    assert [detail.partition(" have")[0] for _, detail in log] == [
        "10 of 16 completions",
        "4 of 16 completions",
    ]
    assert "the mean reward is over the other 6" in log[0][1]
    guard.look(1, told(rewarded=6, first_error="a#0: late"), log)
    assert len(log) == 2, "still the same episode"


def test_roll_outs_without_a_signal_are_counted_in_a_row() -> None:
    guard = Guard(GuardConfig(max_silent=2))
    log = Log()
    for signal in (0, 1, 0):
        guard.look(1, told(groups_with_signal=signal), log)
    with pytest.raises(CheckFailed, match=r"step 9: in the last 2 roll-outs .*0\.5 on average"):
        guard.look(9, told(groups_with_signal=0), log)
    never = Guard(GuardConfig(max_silent=0))
    for _ in range(30):
        never.look(1, told(groups_with_signal=0), log)
    ((name, detail),) = log
    assert name == "equal_rewards" and "max_silent" not in detail
    assert detail.startswith("in the last 3 roll-outs the rewards of every group were equal (the")


def test_answers_that_cease_to_end_are_told_once_until_they_end_again() -> None:
    guard, log = Guard(GuardConfig(warn_stops=0.2)), Log()

    def look(shares: Sequence[float]) -> None:
        for share in shares:
            guard.look(1, told(stopped=share), log)

    look([0.9] * BEGINNING + [0.5] * (RECENT + 3))
    assert [name for name, _ in log] == ["stops"]
    assert "50% of the last completions ended by themselves, 90% of the first" in log[0][1]
    look([0.9] * RECENT + [0.5] * RECENT)
    assert [name for name, _ in log] == ["stops", "stops"]


def test_errors_are_told() -> None:
    guard, log = Guard(GuardConfig()), Log()
    guard.look(4, told(errors=3, first_error="a#0: late"), log)
    assert log == [("rewards", "3 completions have no reward because of an error; a#0: late")]


def report(
    found: float, effective: float = 1.0, step: int = 1, *, weight: float = 1.0
) -> StepReport:
    """A step in which one token is off by a nat."""
    streams = {"engine_logp_N": torch.tensor([-1.0, -2.0])}
    packed = cast(Packed, SimpleNamespace(streams=streams))
    scored = [Scored(packed, Scores(torch.tensor([-1.0, -3.0])))]
    metrics = {DIFFERENCE: found, EFFECTIVE: effective, WEIGHT: weight}
    return StepReport(step, 0.0, metrics, 2, 2, 2, ["a"], scored)


def watched(guard: Guard, log: Log, seen: StepReport) -> None:
    job = SimpleNamespace(ranks=Ranks(0, 1, torch.device("cpu")), emit=log)
    guard(seen, cast(Job, job))


def test_an_engine_that_is_far_off_stops_the_run() -> None:
    guard, log = Guard(GuardConfig()), Log()
    seen = report(0.05)
    watched(guard, log, seen)
    assert seen.metrics["engine/largest"] == 1.0 and log == []
    for step in (2, 3):
        watched(guard, log, report(0.2, 0.1, step))
    assert [name for name, _ in log] == ["rollout_engine", "rollout_effective"]
    for value in (0.6, float("nan")):
        with pytest.raises(CheckFailed, match=r"step 7: .* nothing was updated"):
            watched(guard, log, report(value, step=7))


def test_a_correction_that_leaves_little_weight_is_told_at_the_first_update() -> None:
    """Also where all weights are alike, so that the effective sample size is that of all tokens."""
    for effective, weight in ((0.19, 0.9), (1.0, 0.15)):
        guard, log = Guard(GuardConfig()), Log()
        watched(guard, log, report(0.016, effective, weight=weight))
        ((name, detail),) = log
        assert name == "rollout_effective" and "correction_level=geometric" in detail
    guard, log = Guard(GuardConfig()), Log()
    watched(guard, log, report(0.016, 0.99, weight=0.98))
    assert log == []


def test_a_loss_that_knows_no_engine_is_not_watched() -> None:
    guard, log = Guard(GuardConfig()), Log()
    seen = report(0.9)
    seen.metrics.clear()
    watched(guard, log, seen)
    assert seen.metrics == {} and log == []


def test_it_is_remembered() -> None:
    guard, log = Guard(GuardConfig()), Log()
    for _ in range(BEGINNING + RECENT):
        guard.look(1, told(stopped=0.9 - len(guard.recent) / 5, groups_with_signal=0), log)
    other = Guard(GuardConfig())
    other.recall(json.loads(json.dumps(guard.remember())))
    assert other == guard and other.silent == BEGINNING + RECENT


def test_what_stops_the_run_is_not_remembered() -> None:
    """Resumed, the same roll-out counts once."""
    guard, log = Guard(GuardConfig(max_silent=2)), Log()
    guard.look(1, told(groups_with_signal=0), log)
    before = guard.remember()
    with pytest.raises(CheckFailed, match="last 2 roll-outs"):
        guard.look(2, told(groups_with_signal=0), log)
    assert guard.remember() == before
    kept = guard.remember()
    guard.look(3, told(), log)
    assert kept == before, "a copy"
