"""Which trees each step trains on, what is kept of earlier ones, and what a checkpoint remembers."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.helpers.scripted_engines import FakeEngine
from tests.unit.rl.test_rollout_groups import RewardSet, rows

from taut.data.order import Order
from taut.data.rows.prompts import PromptSet
from taut.errors import CheckFailed, EngineError, OutOfMemory
from taut.losses.advantages import ESTIMATORS, Scale
from taut.losses.policy import PolicyGradient
from taut.rewards.reward_set import RewardResult
from taut.rewards.verifier import RewardInput, Score
from taut.rl.advantages import PolicyCredit
from taut.rl.monitors import RolloutMonitor
from taut.rl.online import Online, numbered
from taut.rl.settings import RolloutConfig, RolloutMonitorConfig, ShapingConfig
from taut.rl.worker import RolloutWorker
from taut.train.distributed import Ranks
from taut.train.recorder import Recorder
from taut.train.signals import Interrupts
from taut.train.trainer import Trainer
from taut.types import Sample, Tree

ONE = Ranks(0, 1, torch.device("cpu"))
NUM_PROMPTS = 8


class FakeTrainer:
    """As much of a trainer as a method that asks no model looks at."""

    def __init__(self, num_steps: int = 100) -> None:
        self.done, self.num_steps, self.ranks = 0, num_steps, ONE
        self.interrupts, self.recorder = Interrupts(), Recorder()
        self.told: list[tuple[str, dict[str, Any]]] = []

    def emit(self, kind: str, **fields: Any) -> None:
        self.told.append((kind, fields))

    @property
    def rolled_out(self) -> list[int]:
        """The steps of which a rollout is told."""
        return [fields["step"] for kind, fields in self.told if kind == "rollout"]


def half(one: RewardInput) -> float:
    """A group's answers differ where the prompt's number is even."""
    return float(one.row["i"] % 2 == 0) * int(one.text)


def online(worth: Any = half, monitor: RolloutMonitorConfig | None = None, **keys: Any) -> Online:
    """A method on an engine that says 0 and 1 of each prompt, two prompts for each update of a pass."""
    config = RolloutConfig(**{"n": 2, **keys})
    size = 2 * config.minibatches
    order = Order((NUM_PROMPTS,), (1.0,), 3, size, is_shuffled=True)
    credit = PolicyCredit(
        PolicyGradient(),
        ESTIMATORS["mean"],
        ShapingConfig(scale="running"),
        limit=4,
        temperature=1.0,
        has_old=False,
    )
    prompts = cast(PromptSet, SimpleNamespace(image_store=None))
    engine = FakeEngine(lambda name, index: str(index))
    worker = RolloutWorker(config, rows(NUM_PROMPTS), engine, RewardSet(worth), None, 3, ONE)  # type: ignore[arg-type]
    trainer = cast(Trainer, FakeTrainer())
    return Online(
        config,
        prompts,
        order,
        credit,
        RolloutMonitor(monitor or RolloutMonitorConfig()),
        seed=3,
        get_trainer=lambda: trainer,
        open_worker=lambda: worker,
    )


def trainer_of(method: Online) -> FakeTrainer:
    return cast(FakeTrainer, method.trainer)


def names(trees: list[Tree]) -> list[str]:
    """The prompt and rollout of each tree."""
    return [tree.samples[0].id.replace("#0 of rollout ", "/") for tree in trees]


def steps(method: Online, first: int, last: int) -> list[list[str]]:
    found = []
    for step in range(first, last + 1):
        found.append(names(method.prepare(step)))
        trainer_of(method).done = step
    return found


def test_a_roll_out_is_dealt_out_anew_in_each_pass() -> None:
    method = online(minibatches=2, epochs=2)
    first, second, third, fourth, fifth = steps(method, 1, 5)
    assert len(first) == len(second) == 2
    assert sorted(first + second) == sorted(third + fourth)
    assert [first, second] != [third, fourth]
    assert not set(fifth) & set(first + second)
    assert trainer_of(method).rolled_out == [1, 5]
    assert method.worker.engine.version == 4  # type: ignore[attr-defined]
    assert steps(online(minibatches=2, epochs=2), 1, 5) == [first, second, third, fourth, fifth]


def test_a_step_that_is_begun_again_has_what_it_had() -> None:
    method = online()
    assert method.prepare(1) == method.prepare(1)
    assert trainer_of(method).rolled_out == [1]
    assert method.cursor(1).samples == 2 and method.cursor(3).samples == 6


def test_fewer_trees_than_updates() -> None:
    """One pair of prompts, of which one has a signal after dynamic_sampling_rounds: each update has it."""
    method = online(
        minibatches=4,
        dynamic_sampling_rounds=9,
        worth=lambda one: float(one.row["i"] == 2) * int(one.text),
    )
    assert [len(method.prepare(step)) for step in (1, 2, 3, 4)] == [1, 1, 1, 1]


def test_groups_with_a_signal_are_replayed_newest_first() -> None:
    method = online(replay_groups=3)
    for step in range(1, 6):
        method.prepare(step)
        trainer_of(method).done = step
    told = [fields for kind, fields in trainer_of(method).told if kind == "rollout"]
    signals = [fields["groups_with_signal"] for fields in told]
    before = np.cumsum([0, *signals])[:5]
    assert [fields["num_replayed"] for fields in told] == np.minimum(before, 3).tolist()
    versions = [version for version, _ in method.remember()["replayed"]]
    assert versions == sorted(versions, reverse=True) and len(versions) == 3


def test_what_is_too_old_is_replayed_no_more() -> None:
    method = online(replay_groups=9, max_staleness=2)
    seen = [len(found) - 2 for found in steps(method, 1, 6)]
    told = [fields for kind, fields in trainer_of(method).told if kind == "rollout"]
    signals = [fields["groups_with_signal"] for fields in told]
    assert seen == [sum(signals[max(0, at - 2) : at]) for at in range(6)]


@pytest.mark.parametrize("done", [1, 3, 4, 6])
def test_a_resumed_run_goes_on_with_what_was_remembered(done: int) -> None:
    """Mid-phase, between phases, with replay and a running scale."""
    keys: dict[str, Any] = {"minibatches": 2, "epochs": 2, "replay_groups": 2}
    whole = online(**keys)
    steps(whole, 1, done)
    remembered = json.loads(json.dumps(whole.remember()))
    assert (remembered["phase"] is None) == (done % 4 == 0)
    wanted = steps(whole, done + 1, 10)
    other = online(**keys)
    trainer_of(other).done = done
    other.recall(remembered)
    assert steps(other, done + 1, 10) == wanted
    assert other.credit.remember() == whole.credit.remember()
    assert other.monitor == whole.monitor
    told = [step for step in trainer_of(whole).rolled_out if step > done]
    assert trainer_of(other).rolled_out == told


def test_a_roll_out_that_was_interrupted_before_its_first_update_is_told_again() -> None:
    """It is kept; its event is of a step that the resume takes back."""
    whole = online(minibatches=2)
    steps(whole, 1, 2)
    trees = whole.prepare(3)  # and an interrupt before the update
    other = online(minibatches=2)
    trainer_of(other).done = 2
    other.recall(json.loads(json.dumps(whole.remember())))
    assert names(other.prepare(3)) == names(trees)
    assert "worker" not in vars(other)  # nothing was generated
    (told,) = trainer_of(other).told
    assert told[0] == "rollout" and told[1]["step"] == 3
    assert told[1]["samples"] == trainer_of(whole).told[-1][1]["samples"]
    trainer_of(other).done = 3
    other.prepare(4)
    assert len(trainer_of(other).told) == 1


def test_a_roll_out_that_stops_the_run_has_changed_nothing() -> None:
    method = online(
        worth=lambda one: 0.5, monitor=RolloutMonitorConfig(max_without_signal=1), replay_groups=2
    )
    before = method.credit.remember()
    with pytest.raises(CheckFailed, match="max_without_signal"):
        method.prepare(1)
    assert method.phase is None and method.remember()["replayed"] == []
    assert method.credit.remember() == before
    assert isinstance(method.credit, PolicyCredit) and method.credit._scale == Scale()


def sometimes(one: RewardInput) -> float | None:
    """No reward applies to the prompts of some steps."""
    return None if one.row["i"] in (1, 7, 4, 5) else half(one)


def test_a_roll_out_without_rewards_skips_its_steps_and_a_resume_is_exact() -> None:
    keys: dict[str, Any] = {"minibatches": 2, "worth": lambda one: None}
    method = online(**keys)
    assert [method.prepare(step) for step in (1, 2)] == [[], []]
    trainer_of(method).done = 2
    other = again(method, 2, **keys)
    for one in (method, other):
        assert [one.prepare(step) for step in (3, 4)] == [[], []]
        trainer_of(one).done = 4
        with pytest.raises(CheckFailed, match="step 5: in 3 rollouts in a row no completion"):
            one.prepare(5)
    assert other.monitor == method.monitor and method.monitor.unrewarded == 2
    warned = [fields["step"] for kind, fields in trainer_of(method).told if kind == "warning"]
    assert warned == [1, 3]


@pytest.mark.parametrize("replay", [0, 2])
def test_one_roll_out_without_rewards_is_skipped_and_training_goes_on(replay: int) -> None:
    """With groups to be replayed the step trains on these."""
    found = steps(online(worth=sometimes, replay_groups=replay), 1, 8)
    without = [at for at, trees in enumerate(found) if len(trees) == 0]
    told = {at for at, trees in enumerate(found) if not any(f"/{at + 1}" in n for n in trees)}
    assert told and (set(without) == told if replay == 0 else without != sorted(told))
    for done in (1, 2, 3, 5):
        whole = online(worth=sometimes, replay_groups=replay)
        steps(whole, 1, done)
        assert (
            steps(again(whole, done, worth=sometimes, replay_groups=replay), done + 1, 8)
            == found[done:]
        )


def test_an_engine_that_fails_has_changed_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    method = online(replay_groups=2)
    steps(method, 1, 1)
    before = json.dumps(method.remember())

    def fail(*_: Any) -> None:
        raise EngineError("server: gone")

    with monkeypatch.context() as patch:
        patch.setattr(FakeEngine, "generate", fail)
        with pytest.raises(EngineError, match="gone"):
            method.prepare(2)
    assert json.dumps(method.remember()) == before
    assert names(method.prepare(2)) == names(steps_of_whole(2))


def steps_of_whole(step: int) -> list[Tree]:
    whole = online(replay_groups=2)
    steps(whole, 1, step - 1)
    return whole.prepare(step)


def test_what_is_compared_inside_a_tree_is_numbered_by_it() -> None:
    def sample(name: str) -> Sample:
        return Sample(name, np.arange(3), np.array([1]), np.ones(1))

    pair, single = Tree((sample("a"), sample("b")), is_atom=True), Tree((sample("c"),))
    found = numbered([single, pair, pair])
    assert [[s.group for s in tree.samples] for tree in found] == [
        [sample("c").group],
        [1, 1],
        [2, 2],
    ]


def test_closing_what_was_never_opened(tmp_path: Path) -> None:
    method = online()
    method.close()
    assert "worker" not in vars(method)


def again(method: Online, done: int, **keys: Any) -> Online:
    """A run that goes on from what ``method`` remembers."""
    other = online(**keys)
    trainer_of(other).done = done
    other.recall(json.loads(json.dumps(method.remember())))
    return other


def test_a_roll_out_that_stops_its_first_update_is_drawn_anew() -> None:
    """It may be what is wrong: of an engine that was mended since. Also where it came from a checkpoint."""
    keys: dict[str, Any] = {"minibatches": 2, "replay_groups": 2}
    whole = online(**keys)
    steps(whole, 1, 2)
    before = json.dumps(whole.remember())
    wanted = names(whole.prepare(3))
    resumed = again(whole, 2, **keys)
    resumed.prepare(3)
    for method in (whole, resumed):
        method.reject()
        assert json.dumps(method.remember()) == before
    other = again(whole, 2, **keys)
    assert names(other.prepare(3)) == wanted
    assert "worker" in vars(other), "asked again"


def test_a_roll_out_that_was_trained_on_is_kept() -> None:
    whole = online(minibatches=2)
    steps(whole, 1, 3)
    wanted = names(whole.prepare(4))
    whole.reject()
    assert names(again(whole, 3, minibatches=2).prepare(4)) == wanted


def test_warnings_of_a_roll_out_are_told_again_with_it() -> None:
    keys: dict[str, Any] = {"monitor": RolloutMonitorConfig(max_errors=1.0)}
    whole = online(**keys)
    reward_set = cast(RewardSet, whole.worker.reward_set)
    reward_set.grade = partial(failing, reward_set.grade)  # type: ignore[method-assign]
    whole.prepare(1)
    trainer_of(whole).done = 1
    whole.prepare(2)
    other = again(whole, 1, **keys)
    other.prepare(2)
    assert [(kind, it["step"]) for kind, it in trainer_of(other).told] == [
        ("rollout", 2),
        ("warning", 2),
    ]


def failing(grade: Any, answers: Any) -> list[RewardResult]:
    """The first answer cannot be judged."""
    return [RewardResult({"worth": Score(error="late")}, None), *grade(answers)[1:]]


def test_generating_without_memory_left_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes."
        )

    monkeypatch.setattr(FakeEngine, "generate", fail)
    with pytest.raises(
        OutOfMemory, match=r"rollout of step 1: .*smaller rollout\.local\.seq"
    ) as found:
        online().prepare(1)
    assert found.value.half is None
