"""Groups that are generated while the model trains: which are taken, which are dropped, and what is asked again."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

from taut.config import from_mapping
from taut.data.order import Order
from taut.data.rows.prompts import PromptRow
from taut.errors import EngineError
from taut.inference.vllm import ServerEngine
from taut.rewards.reward_set import RewardResult
from taut.rl import async_rollouts
from taut.rl.async_rollouts import AsyncRollouts, DrawState, PromptQueue
from taut.rl.dynamic_sampling import GroupChoice
from taut.rl.rollout import Rollout, RolloutRequest, RolloutState
from taut.rl.rollout_queue import Finished
from taut.rl.sampler import Trajectory
from taut.rl.settings import RolloutConfig
from taut.rl.worker import RolloutWorker
from taut.train.distributed import Ranks

N = 2
PATIENCE = 20.0


def rows(count: int) -> list[PromptRow]:
    return [
        PromptRow(f"p{i}", f"p{i}", np.array([i + 1, 2]), "", (), None, {}) for i in range(count)
    ]


@dataclass
class Script:
    """A feed that finishes what it is told to. ``answer``: of a group's number and how often it was asked before: the
    version of its weights and the rewards of its answers; None: it is not finished.
    """

    answer: Callable[[int, int], tuple[int, list[float]] | None]
    room: int = 10**6
    """Groups in flight at a time."""
    asked: list[tuple[int, str]] = field(default_factory=list)
    finished: deque[Finished] = field(default_factory=deque)
    events: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    in_flight: dict[int, PromptRow] = field(default_factory=dict)
    most: int = 0
    is_closed: bool = False
    begun_at: dict[int, int] = field(default_factory=dict)
    """The version of the first token of a group in flight."""

    def drop_older(self, version: int) -> list[tuple[int, PromptRow]]:
        old = [number for number in self.in_flight if self.begun_at.get(number, version) < version]
        return [(number, self.in_flight.pop(number)) for number in old]

    def ask(self, number: int, row: PromptRow) -> None:
        before = [asked for asked, _ in self.asked].count(number)
        self.asked.append((number, row.id))
        self.in_flight[number] = row
        self.most = max(self.most, len(self.in_flight))
        answer = self.answer(number, before)
        if answer is not None:
            self.finish(number, *answer)

    def finish(self, number: int, version: int, rewards: list[float]) -> None:
        self.events.put((number, version, rewards))

    @property
    def has_room(self) -> bool:
        return len(self.in_flight) < self.room

    @property
    def has_finished(self) -> bool:
        return bool(self.finished)

    def wait(self) -> None:
        if (event := self.events.get(timeout=PATIENCE)) is None:
            return
        number, version, rewards = event
        row = self.in_flight.pop(number)
        trajectories = [
            Trajectory(
                row,
                index,
                np.array([*row.ids_T, 5, 6]),
                np.array([2, 3]),
                np.zeros(2),
                np.array([version, version + 1]),  # the second token is of later weights
                "stop",
                "",
                reward_result=RewardResult({}, reward),
            )
            for index, reward in enumerate(rewards)
        ]
        self.finished.append(Finished(number, trajectories))

    def next(self) -> Finished:
        return self.finished.popleft()

    def wake(self) -> None:
        self.events.put(None)

    def close(self) -> None:
        self.is_closed = True


class Engine(ServerEngine):
    """A server that is never asked."""

    def __init__(self) -> None:
        pass

    def shared(self, run: Callable[[], Any]) -> Any:
        return run()

    def close(self) -> None:
        pass


@dataclass(eq=False, kw_only=True)
class Taking(AsyncRollouts):
    """Each rollout that is taken is accepted."""

    order: Order
    are_own: Callable[[int], list[bool]] | None

    def taken(self, phase: int, version: int, num_left: int) -> Rollout:
        def is_asked(draw: int) -> bool:
            of_phase, place = divmod(draw, self.order.samples_per_step)
            return self.are_own is None or self.are_own(of_phase)[place]

        rollout = self.take(RolloutRequest(phase, self.order, version, num_left, is_asked))
        self.commit(rollout, [])
        return rollout


@contextmanager
def lagging(
    script: Script,
    monkeypatch: pytest.MonkeyPatch,
    draws: DrawState | None = None,
    num_groups: int = 2,
    are_own: Callable[[int], list[bool]] | None = None,
    **keys: Any,
) -> Iterator[Taking]:
    monkeypatch.setattr(async_rollouts, "RolloutQueue", lambda *_: script)
    keys = {"n": N, "lag": 1, "engine": "server", "urls": "http://127.0.0.1:9/v1", **keys}
    config = from_mapping(RolloutConfig, keys)
    ranks = Ranks(0, 1, torch.device("cpu"))
    worker = RolloutWorker(config, rows(5), Engine(), None, None, 3, ranks)
    choice = GroupChoice(rounds=config.dynamic_sampling_rounds)
    order = Order((5,), (1.0,), 3, num_groups, is_shuffled=False)
    made = Taking(
        worker,
        choice,
        RolloutState(draws=draws or DrawState(next=0, open=[])),
        order=order,
        are_own=are_own,
    )
    try:
        yield made
    finally:
        made.close()
        assert script.is_closed
        assert "rollouts" not in [thread.name for thread in threading.enumerate()]


def test_a_model_in_this_process_judges_in_the_thread_that_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And before a group is chosen: the first draw has no signal then, whatever it had."""
    threads = []

    def judge(trajectories: Sequence[Trajectory]) -> list[RewardResult]:
        threads.append(threading.current_thread())
        number = int(trajectories[0].row.id.rpartition(" ")[2])
        return [RewardResult({}, float(number * t.index)) for t in trajectories]

    script = Script(lambda number, before: (0, [0.0] * N))
    with lagging(script, monkeypatch, dynamic_sampling_rounds=1) as made:
        object.__setattr__(made.worker, "judges_together", True)
        object.__setattr__(made.worker, "judge", judge)
        rollout = made.taken(0, 0, 1)
    assert [[t.reward for t in group.trajectories] for group in rollout.groups] == [
        [float(number * index) for index in range(N)] for number in rollout.draws[:2]
    ]
    assert 0 not in rollout.draws[:2] and len(rollout.left_out) == 1
    assert set(threads) == {threading.current_thread()} and len(threads) == 3


def taken(rollout: Rollout) -> list[tuple[str, ...]]:
    return [tuple(t.name for t in group.trajectories) for group in rollout.all_groups]


def until(holds: Callable[[], bool]) -> None:
    """Wait for a thread."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < PATIENCE
        time.sleep(0.001)


def test_groups_are_taken_as_they_finish_and_the_others_stay_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two rollouts are open at lag=1; the third draw is finished first."""
    script = Script(lambda number, before: (0, [0.0, 1.0]) if number in (2, 3) else None)
    with lagging(script, monkeypatch) as made:
        rollout = made.taken(0, 0, 9)
        assert [number for number, _ in script.asked] == [0, 1, 2, 3]
        assert rollout.draws == [2, 3] and rollout.num_stale == 0
        assert taken(rollout) == [
            ("p2#0 of rollout 1", "p2#1 of rollout 1"),
            ("p3#0 of rollout 1", "p3#1 of rollout 1"),
        ]
        assert made.state.draws == {"next": 4, "open": [(0, 0), (1, 1)]}
        for number in (1, 0):
            script.finish(number, 0, [0.0, 1.0])
        rollout = made.taken(1, 1, 8)
        assert rollout.draws == [1, 0]  # one update old
        assert made.state.draws == {"next": 6, "open": [(4, 4), (5, 0)]}
        until(lambda: len(script.asked) == 6)
    assert len({row_id for _, row_id in script.asked}) == 6  # each draw has its own streams


def test_draws_that_the_data_answer_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the draws of rollouts 0 to 3 the policy has 1; 2 and 3; none; 6."""
    own = [[False, True], [True, True], [False, False], [True, False]]
    script = Script(lambda number, before: (0, [0.0, 1.0]))
    with lagging(script, monkeypatch, are_own=lambda phase: own[phase]) as made:
        assert made.taken(0, 0, 4).draws == [1]
        assert made.state.draws == {"next": 4, "open": [(2, 2), (3, 3)]}
        assert sorted(made.taken(1, 0, 3).draws) == [2, 3]
        assert made.taken(3, 0, 1).draws == [6]
    assert [number for number, _ in script.asked] == [1, 2, 3, 6]


def test_a_group_that_is_too_old_is_dropped_and_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its oldest token counts: version 3, though its second token is of version 4; 3 is two before 5."""
    script = Script(lambda number, before: (3 if number == 1 and not before else 5, [0.0, 1.0]))
    with lagging(script, monkeypatch) as made:
        rollout = made.taken(5, 5, 1)
        assert rollout.num_stale == 1 and sorted(rollout.draws) == [0, 1]
        assert [number for number, _ in script.asked] == [0, 1, 1]
        assert made.state.draws == {"next": 2, "open": []}


def test_what_would_be_too_old_next_time_is_asked_again_while_the_model_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Taken next is version 1 or newer. Draw 0 is in flight since version 0, 4 finished and is as old, 1 is younger."""
    script = Script(
        lambda number, before: None if number < 2 else (before, [0.0, 1.0]), begun_at={0: 0, 1: 1}
    )
    draws = DrawState(next=5, open=[(n, n) for n in range(5)])
    with lagging(script, monkeypatch, draws, num_groups=2) as made:
        until(lambda: len(made._queue._finished) == 3)
        assert made.taken(1, 1, 9).draws == [2, 3]
        until(lambda: len(script.asked) == 7)
        assert [number for number, _ in script.asked] == [0, 1, 2, 3, 4, 0, 4]
        script.finish(0, 2, [0.0, 1.0])
        rollout = made.taken(2, 2, 1)
        assert rollout.num_stale == 2 and sorted(rollout.draws) == [0, 4]


def test_of_groups_that_wait_the_oldest_is_taken_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be too old next time."""
    script = Script(
        lambda number, before: ([4, 3, 2, 4][number], [0.0, 1.0]) if number < 4 else None
    )
    with lagging(
        script, monkeypatch, DrawState(next=4, open=[(n, n) for n in range(4)]), lag=2
    ) as made:
        until(lambda: len(made._queue._finished) == 4)
        assert made.taken(4, 4, 9).draws == [2, 1]


def test_the_end_of_a_run_asks_no_more_than_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(lambda number, before: (0, [0.0, 1.0]))
    with lagging(script, monkeypatch, lag=3) as made:
        for phase in range(3):
            made.taken(phase, 0, 3 - phase)
        assert [number for number, _ in script.asked] == list(range(6))
        assert made.state.draws == {"next": 6, "open": []}


def test_no_group_is_begun_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(lambda number, before: (0, [0.0, 1.0]), room=1)
    with lagging(script, monkeypatch, num_groups=5) as made:
        assert sorted(made.taken(0, 0, 9).draws) == [0, 1, 2, 3, 4]
        until(lambda: len(script.asked) == 10)
    assert script.most == 1


def test_groups_without_a_signal_are_left_out_and_others_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = Script(lambda number, before: (0, [1.0, 1.0 if number < 3 else 0.0]))
    with lagging(script, monkeypatch, dynamic_sampling_rounds=2) as made:
        rollout = made.taken(0, 0, 1)
        assert [group.row.id for group in rollout.groups] == ["p3", "p4"]
        assert [group.row.id for group in rollout.left_out] == ["p0", "p1", "p2"]
        assert rollout.draws == [3, 4, 0, 1, 2] and made.state.draws["open"] == []
    always = Script(lambda number, before: (0, [1.0, 1.0]))
    with lagging(always, monkeypatch, dynamic_sampling_rounds=2) as made:
        rollout = made.taken(0, 0, 1)
        assert len(rollout.groups) == 6 and not rollout.left_out  # 2 and twice as many again


def test_what_was_open_is_asked_again_before_anything_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = Script(lambda number, before: (0, [0.0, 1.0]))
    draws = DrawState(next=9, open=[(4, 4), (7, 2)])
    with lagging(script, monkeypatch, draws) as made:
        made.taken(0, 0, 9)
        until(lambda: len(script.asked) == 4)
        assert script.asked[:2] == [(4, "p4 drawn 4"), (7, "p2 drawn 7")]
        assert [number for number, _ in script.asked[2:]] == [9, 10]
        assert made.state.draws["next"] == 11 and len(made.state.draws["open"]) == 2


def test_a_prompt_that_is_taken_twice_has_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(lambda number, before: (0, [0.0, 1.0]))
    draws = DrawState(next=9, open=[(0, 2), (5, 2)])
    with lagging(script, monkeypatch, draws) as made:
        rollout = made.taken(0, 0, 1)
    assert [names[0] for names in taken(rollout)] == [
        "p2#0 of rollout 1",
        "p2 again 1#0 of rollout 1",
    ]


def test_an_error_of_the_thread_is_raised_where_groups_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(number: int, before: int) -> None:
        raise EngineError("the server is gone")

    with lagging(Script(fail), monkeypatch) as made:
        for _ in range(2):
            with pytest.raises(EngineError, match="is gone"):
                made.taken(0, 0, 9)
        assert made.state.draws == {"next": 0, "open": []}


def test_a_feed_that_is_closed_while_it_waits_ends() -> None:
    script = Script(lambda number, before: None)
    background = PromptQueue(lambda: script)  # type: ignore[arg-type,return-value]
    background.ask(0, rows(1)[0])
    until(lambda: bool(script.asked))
    began = time.monotonic()
    background.close()
    assert script.is_closed and time.monotonic() - began < async_rollouts.PATIENCE
