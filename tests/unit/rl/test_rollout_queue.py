"""A server gets each turn as soon as its trajectory has come to it, and a group is judged as soon as it is finished."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from threading import Barrier, Event, Lock
from typing import Any

import numpy as np
import pytest
from tests.helpers.fake_vllm import FakeServer, Fault
from tests.unit.rl.test_environment import renderer_of, row_of

from taut.config import from_mapping
from taut.data.render.stop_tokens import derive_stop_set
from taut.data.rows.tool_calls import ToolCall
from taut.errors import EngineError, UserCodeError
from taut.inference.settings import Sampling, ServerConfig
from taut.inference.vllm import ServerEngine
from taut.rewards.reward_set import RewardResult
from taut.rl.environment import EnvironmentPool, Step, open_environments
from taut.rl.rollout_queue import Finished, Judge, RolloutQueue
from taut.rl.sampler import Trajectory
from taut.rl.settings import EnvironmentConfig

PATIENCE = 20.0
"""Seconds that a test waits for what has to happen at once."""


@dataclass
class Talk:
    """Asks again until the row has had its turns; each is worth 1."""

    left: int = 0

    def reset(self, row: dict[str, Any]) -> None:
        self.left = row["turns"]

    def step(self, text: str, calls: list[ToolCall]) -> Step:
        self.left -= 1
        if self.left == 0:
            return Step(done=True, reward=1.0)
        return Step([{"role": "user", "content": "And then?"}], reward=1.0)


@dataclass
class Place:
    """An environment, and a server with the stop set of its template."""

    make: Callable[[], Any] = Talk
    timeout: float = PATIENCE
    concurrency: int = 16
    feeds: list[RolloutQueue] = field(default_factory=list)
    firsts: dict[str, list[int]] = field(default_factory=dict)
    """The ids that each row begins with."""

    def play(
        self,
        turns: Mapping[str, int],
        n: int = 1,
        faults: Callable[[str, int], Fault | None] = lambda name, count: None,
        judge: Judge | None = None,
        after: Callable[[RolloutQueue], object] = lambda feed: None,
    ) -> list[Finished]:
        """The groups of rows with so many turns, as they finish. ``faults``: of a row's request, by how many came
        before it. ``after``: called once a group has finished.
        """
        renderer = renderer_of()
        stop_ids = derive_stop_set(renderer).ids
        config = EnvironmentConfig(
            name="tools", tools=["calculator"], timeout=self.timeout, max_turns=8
        )
        made = open_environments(config, renderer, stop_ids)
        assert made is not None
        pool = EnvironmentPool(config, self.make, made.bridge, made.calls, (), None, None)
        rows = []
        for number, (name, times) in enumerate(turns.items()):
            row = row_of(renderer, name, turns=times)
            row = replace(row, ids_T=np.append(row.ids_T, 40 + 10 * number))
            self.firsts[name] = row.ids_T.tolist()
            rows.append(row)
        asked: Counter[str] = Counter()
        lock = Lock()

        def fault_of(body: dict[str, Any], count: int) -> Fault | None:
            for name, ids in self.firsts.items():
                if body["prompt"][: len(ids)] == ids:
                    with lock:
                        before = asked[name]
                        asked[name] += 1
                    return faults(name, before)
            return None  # a probe

        ends = tuple(sorted(stop_ids))
        with FakeServer(ends=ends, max_model_len=4096, faults=fault_of) as server:
            keys = {"retries": 0, "concurrency": self.concurrency}
            engine = ServerEngine.open(
                server.url, from_mapping(ServerConfig, keys), renderer.tokenizer, stop_ids, 4096
            )
            with (
                closing(engine),
                closing(RolloutQueue(engine, Sampling(n=n), pool, judge)) as feed,
            ):
                self.feeds.append(feed)
                for number, row in enumerate(rows):
                    feed.ask(number, row)
                finished = []
                while feed.is_busy:
                    finished.append(feed.next())
                    after(feed)
                return finished

    def trajectories(self, *args: Any, **options: Any) -> list[Trajectory]:
        """Those of ``play``, in the order of rows."""
        return [t for group in sorted(self.play(*args, **options)) for t in group.trajectories]


def test_no_turn_waits_for_another_trajectory() -> None:
    """The first turn of one row is answered once the last turn of the other has been asked for."""
    came = Event()

    def faults(name: str, count: int) -> Fault | None:
        if name == "b" and count == 2:
            came.set()
        if name == "a":
            assert came.wait(PATIENCE)
        return None

    first, second = Place().trajectories({"a": 1, "b": 3}, faults=faults)
    assert came.is_set()
    assert (first.error, first.num_turns, first.rewards) == (None, 1, {"environment": 1.0})
    assert (second.error, second.num_turns, second.rewards) == (None, 3, {"environment": 3.0})
    assert [reward for _, reward in second.turn_rewards] == [1.0] * 3


def test_trajectories_do_not_depend_on_how_many_are_under_way() -> None:
    def found(concurrency: int) -> list[tuple[Any, ...]]:
        place = Place(concurrency=concurrency)
        trajectories = place.trajectories({"a": 2, "b": 1, "c": 4}, n=3)
        assert [t.name for t in trajectories[:4]] == [
            f"{name} of rollout 1" for name in ("a#0", "a#1", "a#2", "b#0")
        ]
        return [
            (t.name, t.ids_T.tolist(), t.sampled_at_N.tolist(), t.messages, t.rewards)
            for t in trajectories
        ]

    assert found(1) == found(16)


def test_a_call_that_is_late_ends_its_own_trajectory_alone() -> None:
    hangs, over = Event(), Event()

    class Late(Talk):
        def step(self, text: str, calls: list[ToolCall]) -> Step:
            if self.left == 2:
                hangs.set()
                over.wait(PATIENCE)
            return super().step(text, calls)

    try:
        first, second = Place(Late, timeout=0.3).trajectories({"a": 2, "b": 1})
    finally:
        over.set()
    assert hangs.is_set()
    assert first.error == "the environment's step did not return within 0.3 s"
    assert (second.error, second.finish_reason) == (None, "stop")


def test_a_wrong_type_stops_at_the_first() -> None:
    class Wrong(Talk):
        def step(self, text: str, calls: list[ToolCall]) -> Any:
            return "no step"

    with pytest.raises(UserCodeError, match="expected a Step"):
        Place(Wrong).play({"a": 1, "b": 1})


def test_a_server_that_fails_ends_all() -> None:
    def faults(name: str, count: int) -> Fault | None:
        return Fault(status=500, text="no memory") if (name, count) == ("b", 1) else None

    with pytest.raises(EngineError, match="no memory"):
        Place().play({"a": 1, "b": 3}, faults=faults)


def worth(trajectories: Sequence[Trajectory]) -> list[RewardResult]:
    """A trajectory is worth its turns."""
    return [RewardResult({}, float(trajectory.num_turns)) for trajectory in trajectories]


def test_a_group_is_judged_while_others_are_generated() -> None:
    """The last turn of one row is answered once the other's group has been judged."""
    judged = Event()

    def faults(name: str, count: int) -> Fault | None:
        if name == "b" and count > 2:
            assert judged.wait(PATIENCE)
        return None

    def judge(trajectories: Sequence[Trajectory]) -> list[RewardResult]:
        assert len({trajectory.row.id for trajectory in trajectories}) == 1
        if trajectories[0].row.id == "a":
            judged.set()
        return worth(trajectories)

    first, second = Place().play({"b": 3, "a": 1}, n=2, faults=faults, judge=judge)
    assert (first.number, second.number) == (1, 0)
    assert [t.reward for t in first.trajectories] == [1.0, 1.0]
    assert [(t.index, t.reward) for t in second.trajectories] == [(0, 3.0), (1, 3.0)]


def test_groups_are_judged_at_the_same_time() -> None:
    together = Barrier(3)

    def judge(trajectories: Sequence[Trajectory]) -> list[RewardResult]:
        together.wait(PATIENCE)
        return worth(trajectories)

    assert len(Place().play({"a": 1, "b": 1, "c": 2}, judge=judge)) == 3


def test_a_judge_that_fails_ends_all() -> None:
    def judge(trajectories: Sequence[Trajectory]) -> list[RewardResult]:
        raise UserCodeError("the reward says what it should not")

    with pytest.raises(UserCodeError, match="what it should not"):
        Place().play({"a": 1, "b": 2}, judge=judge)


def test_the_tokens_of_what_is_in_flight() -> None:
    """Two turns of four tokens have come, and a third is awaited."""
    came, over = Event(), Event()
    place, sizes = Place(), []

    def faults(name: str, count: int) -> Fault | None:
        if name == "b" and count == 2:
            came.set()
            over.wait(PATIENCE)
        return None

    def judge(trajectories: Sequence[Trajectory]) -> list[RewardResult]:
        if trajectories[0].row.id == "a":
            assert came.wait(PATIENCE)
            sizes.extend(place.feeds[0].sizes())
            over.set()
        return worth(trajectories)

    place.play({"a": 1, "b": 3}, faults=faults, judge=judge)
    first, second = sizes
    assert first == 4 and second > 8


@pytest.mark.parametrize("waits_for", ["server", "judge"])
def test_a_group_that_is_dropped_may_be_asked_again(waits_for: str) -> None:
    """Its first turn is of version 0. What it waited for comes after it was dropped, and counts no more."""
    came, over, dropped, judged = Event(), Event(), list[tuple[int, Any]](), list[str]()

    def hang() -> None:
        if not came.is_set():
            came.set()
            assert over.wait(PATIENCE)

    def faults(name: str, count: int) -> Fault | None:
        if (name, count, waits_for) == ("b", 1, "server"):
            hang()
        return None

    def judge(trajectories: Sequence[Trajectory]) -> list[RewardResult]:
        name = trajectories[0].row.id
        if name == "a":
            assert came.wait(PATIENCE)
        elif waits_for == "judge":
            hang()
        judged.append(name)
        return worth(trajectories)

    def after(feed: RolloutQueue) -> None:
        if dropped:
            return
        assert feed.drop_older(0) == []
        dropped.extend(feed.drop_older(1))
        assert not feed.is_busy
        feed.ask(*dropped[0])
        over.set()

    first, second = Place().play({"a": 1, "b": 3}, faults=faults, judge=judge, after=after)
    assert (first.number, second.number, len(dropped)) == (0, 1, 1)
    assert [t.reward for t in second.trajectories] == [3.0]
    assert judged.count("b") == (1 if waits_for == "server" else 2) and judged[0] == "a"


def test_turns_of_trajectories_with_the_fewest_turns_come_first() -> None:
    """One request at a time: no third turn before all second ones."""
    turns: list[int] = []

    def faults(name: str, count: int) -> Fault | None:
        turns.append(count)
        return None

    Place(concurrency=1).play({"a": 4, "b": 4, "c": 4}, faults=faults)
    assert turns == sorted(turns) and len(turns) == 12
