"""Trajectories in flight at a server, and groups that are judged as soon as they are finished.

    queue = RolloutQueue(engine, sampling, environments, judge)
    queue.ask(0, row)             begins the trajectories of a group
    queue.next()                  (0, its trajectories, judged): the first group that is finished

A trajectory is a coroutine (``Course`` in sampler.py): it waits for the server, its environment and its judge, and for
no other trajectory. Where more turns are asked than the server takes at a time, trajectories with the fewest turns come
first: as far as is known, they have the most left to do.

Trajectories do not depend on each other: random streams are keyed by (seed, prompt id, index).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NamedTuple, TypeAlias

from taut.data.rows.prompts import PromptRow
from taut.errors import UserCodeError
from taut.inference.settings import Sampling
from taut.inference.vllm import ServerEngine, Stream
from taut.rewards.reward_set import RewardResult
from taut.rl.environment import Calls, EnvironmentPool, Outcome
from taut.rl.sampler import Course, PartialTrajectory, Trajectory, begin, resume, roots
from taut.rl.turns import Rendered
from taut.types import Completion, Prompt

Judge: TypeAlias = Callable[[Sequence[Trajectory]], list[RewardResult]]
"""Returns the rewards of each trajectory of a group. Called in threads, for several groups at a time."""


class Finished(NamedTuple):
    """A group whose trajectories are finished, and judged where there is a judge."""

    number: int
    trajectories: list[Trajectory]


@dataclass(eq=False, slots=True)
class _Group:
    """A group in flight."""

    number: int
    paths: list[PartialTrajectory]
    trajectories: dict[int, Trajectory] = field(default_factory=dict)
    """The trajectories that are finished, by index."""
    rendered: dict[str, Rendered] = field(default_factory=dict)
    """The ids of messages that were rendered before."""


class RolloutQueue:
    """Groups in flight. Used by one thread. ``close`` cancels what is not finished."""

    def __init__(
        self,
        engine: ServerEngine,
        sampling: Sampling,
        environments: EnvironmentPool | None,
        judge: Judge | None,
    ) -> None:
        """``judge``: None leaves the trajectories without rewards."""
        self.size, self._environments, self._judge = sampling.n, environments, judge
        self.generated_at = time.perf_counter()
        """When the last trajectory was finished."""
        self._events: SimpleQueue[Callable[[], None]] = SimpleQueue()
        """Events of other threads, to be handled by this one."""
        self._stream = Stream(engine, replace(sampling, n=1), self._completed)
        self._calls = None if environments is None else Calls(environments, self._called)
        self._groups: dict[int, _Group] = {}
        self._courses: dict[int, tuple[_Group, PartialTrajectory, Course]] = {}
        self._finished: deque[Finished] = deque()
        self._num_begun = 0
        self._asked_at: dict[int, float] = {}
        """When the turn of a trajectory that is in flight was asked for."""
        self._sampled, self._seconds = 0, 0.0
        """Tokens of the turns that came, and the seconds that they took."""

    @property
    def is_busy(self) -> bool:
        """Whether a group was asked for and ``next`` has not returned it."""
        return bool(self._groups or self._finished)

    def ask(self, number: int, row: PromptRow) -> None:
        """Begin the trajectories of a group. Raises TautError for a prompt that cannot be asked."""
        group = self._groups[number] = _Group(number, [])
        begun = roots(row, self.size, self._environments, self._num_begun)
        self._num_begun += self.size
        self._begin(group, begun)

    @property
    def has_room(self) -> bool:
        """Whether the server would begin with another prompt at once."""
        return self._stream.has_room

    def next(self) -> Finished:
        """Return the next group that is finished. Raises errors of the server, of the user's code and of the judge."""
        while not self._finished:
            self.wait()
        return self._finished.popleft()

    @property
    def has_finished(self) -> bool:
        """Whether ``next`` returns at once."""
        return bool(self._finished)

    def wait(self) -> None:
        """Wait until something happens. Raises as ``next`` does."""
        try:
            act = self._events.get(timeout=None if self._calls is None else self._calls.left)
        except Empty:
            assert self._calls is not None
            self._take_call(*self._calls.overdue())
        else:
            act()

    def sizes(self) -> list[float]:
        """Return the number of tokens so far of each trajectory in a group that is not finished. Tokens of a turn in
        flight are estimated by its time, at the mean pace of the turns that came.
        """
        now, pace = time.perf_counter(), self._sampled / max(self._seconds, 1e-9)
        return [
            len(path.sampled_at) + pace * (now - self._asked_at.get(path.number, now))
            for group in self._groups.values()
            for path in group.paths
            for _ in range(path.leaves)
        ]

    def drop_older(self, version: int) -> list[tuple[int, PromptRow]]:
        """Cancel the groups that are not finished and have a token of older weights than this version, and return them.
        Groups of agents continue, as nothing ends an agent.
        """
        pool, dropped = self._environments, []
        for group in [*self._groups.values()]:
            if pool is not None and pool.kind_of(group.paths[0].row).is_agent:
                continue
            if not any(path.version and path.version[0] < version for path in group.paths):
                continue
            del self._groups[group.number]
            for path in group.paths:
                if self._courses.pop(path.number, None) is not None:
                    self._stream.cancel(path.number)
                    self._asked_at.pop(path.number, None)
            dropped.append((group.number, group.paths[0].row))
        return dropped

    def wake(self) -> None:
        """End ``wait``. Any thread may call it."""
        self._events.put(lambda: None)

    def close(self) -> None:
        """Cancel what is in flight."""
        self._stream.close()
        self._groups.clear()

    # -- events of other threads

    def _completed(self, number: int) -> None:
        self._events.put(partial(self._take_completion, number))

    def _called(self, number: int, outcome: Outcome) -> None:
        self._events.put(partial(self._take_call, number, outcome))

    # -- the thread of the queue

    def _take_completion(self, number: int) -> None:
        if number not in self._courses:  # dropped
            return
        completion = self._stream.take(number)
        self._sampled += completion.ids_N.size
        self._seconds += time.perf_counter() - self._asked_at.pop(number)
        self._go_on(number, completion)

    def _take_call(self, number: int, outcome: Outcome) -> None:
        assert self._calls is not None
        if not self._calls.take(number):
            return
        if isinstance(outcome.value, UserCodeError):
            raise outcome.value
        if number not in self._courses:  # dropped
            return
        self._go_on(number, outcome)

    def _begin(self, group: _Group, paths: Sequence[PartialTrajectory]) -> None:
        group.paths += paths
        for path in paths:
            course = begin(path, self._environments, group.rendered)
            self._courses[path.number] = group, path, course
        for path in paths:
            self._go_on(path.number, None)

    def _go_on(self, number: int, result: Completion | Outcome | None) -> None:
        """Start what a trajectory waits for next. ``result``: of what it waited for."""
        group, path, course = self._courses[number]
        match resume(course, result):
            case Prompt() as prompt:
                index = path.index if self._environments is None else 0
                self._asked_at[number] = time.perf_counter()
                self._stream.ask(number, prompt, index, priority=path.num_turns)
            case None:
                del self._courses[number]
                self.generated_at = time.perf_counter()
                group.trajectories |= {leaf.index: leaf for leaf in path.finished()}
                if len(group.trajectories) == self.size:
                    self._judge_group(group)
            case list() as forked:
                self._begin(group, forked)
                self._go_on(number, None)
            case call:
                assert self._calls is not None
                self._calls.start(number, call)

    def _judge_group(self, group: _Group) -> None:
        trajectories = [group.trajectories[index] for index in range(self.size)]
        if self._judge is None:
            self._end(group, trajectories)
            return
        judge = self._judge

        def run() -> None:
            try:
                reward_results = judge(trajectories)
            except BaseException as error:  # noqa: BLE001 (raised again by the thread of the queue)
                self._events.put(partial(_fail, error))
                return
            judged = [
                trajectory.judged(reward_result)
                for trajectory, reward_result in zip(trajectories, reward_results, strict=True)
            ]
            self._events.put(partial(self._end, group, judged))

        Thread(target=run, name=f"judge of group {group.number}", daemon=True).start()

    def _end(self, group: _Group, trajectories: list[Trajectory]) -> None:
        if self._groups.get(group.number) is not group:  # dropped while it was judged
            return
        del self._groups[group.number]
        self._finished.append(Finished(group.number, trajectories))


def _fail(error: BaseException) -> None:
    raise error
