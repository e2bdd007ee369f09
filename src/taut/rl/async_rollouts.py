"""Asynchronous rollouts: groups are generated while the model trains. ``rollout.lag`` above 0, with a server.

    PromptQueue      a thread with a RolloutQueue (rollout_queue.py): begins a group where the server has room for it
    AsyncRollouts    the base source that asks prompts in their order, and takes groups as they finish

Each draw (``RolloutRequest``) is asked once, epoch by epoch; draws that the data answer (data_answers.py) are passed
over, and a rollout takes as many groups fewer. A draw is open from when it is asked until its group is trained on, or
left out for want of a signal.

    push     the weights go to the server before each rollout; trajectories in flight continue with them
    take     the first groups that finish; of several that wait, the group with the oldest token first. A group whose
             oldest token was sampled more than ``lag`` updates ago is dropped, and its draw is asked again. So is a
             group, finished or not, that would be too old for the next rollout: no slow answer or judge keeps a place
             that a younger group could have
    open     the draws of at most 1 + lag / updates rollouts, this one included: later ones would be too old when taken

The state is the draws that are open after the last rollout. A checkpoint keeps them. A resume asks again what was in
flight, or finished and not taken, before new draws: no prompt is lost, and none comes twice.

The writer asks and judges; every rank gets the same groups, in the same order. A group is judged where it finishes. A
model in this process cannot compute while another trains, and judges a group where it is taken.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from heapq import heappop, heappush
from operator import itemgetter
from threading import Condition, Thread
from typing import Annotated

from pydantic import BeforeValidator, Field
from typing_extensions import TypedDict

from taut.config import Decision
from taut.data.rows.prompts import PromptRow
from taut.inference.vllm import ServerEngine
from taut.rl.advantages import TrainSample, as_tuple
from taut.rl.dynamic_sampling import GroupChoice
from taut.rl.rollout import Group, Rollout, RolloutRequest, RolloutSource, RolloutState, distinct
from taut.rl.rollout_queue import Finished, RolloutQueue
from taut.rl.sampler import Trajectory
from taut.rl.worker import RolloutWorker, seed_of

PATIENCE = 5.0
"""Seconds that ``close`` waits for the thread."""
Natural = Annotated[int, Field(ge=0)]


class DrawState(TypedDict):
    """The part of ``AsyncRollouts`` in the state of a run."""

    next: Natural
    """The first draw that was never made."""
    open: list[Annotated[tuple[Natural, Natural], BeforeValidator(as_tuple)]]
    """Draws that are open, with the index of the prompt of each."""


class PromptQueue:
    """A RolloutQueue in a thread of its own. One other thread calls the methods."""

    def __init__(self, open_queue: Callable[[], RolloutQueue]) -> None:
        """``open_queue``: called in the thread."""
        self._open_queue = open_queue
        self._changed = Condition()
        self._waiting: deque[tuple[int, PromptRow]] = deque()
        """Prompts that are asked and not yet begun."""
        self._finished: list[tuple[float, int, Finished]] = []
        """A heap of (version of the oldest token, number of groups that finished before, group)."""
        self._num_finished = 0
        self._oldest: int | None = None
        """Groups with a token of an older version than this are yet to be dropped; None: there are none to drop."""
        self._num_stale = 0
        """Groups that were dropped."""
        self._rollouts: RolloutQueue | None = None
        self._error: BaseException | None = None
        self._is_closing = False
        self._thread = Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()

    def ask(self, number: int, row: PromptRow) -> None:
        """Begin a group as soon as the server has room."""
        with self._changed:
            self._waiting.append((number, row))
            self._wake()

    def next(self) -> tuple[float, Finished]:
        """Return a finished group and the version of its oldest token (infinity: it has none), the oldest group first.
        Raises the error that ended the thread.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._error is not None)
            if self._error is not None:
                raise self._error
            oldest, _, finished = heappop(self._finished)
            return oldest, finished

    def drop_older(self, version: int) -> None:
        """Drop the groups that have a token of older weights than this version, finished or not, and ask them again."""
        with self._changed:
            self._oldest = version
            self._wake()

    def num_stale(self) -> int:
        """Return how many groups were dropped since the last call."""
        with self._changed:
            found, self._num_stale = self._num_stale, 0
            return found

    def close(self) -> None:
        """Cancel what is in flight."""
        with self._changed:
            self._is_closing = True
            self._wake()
        self._thread.join(PATIENCE)

    def _wake(self) -> None:
        if self._rollouts is not None:
            self._rollouts.wake()

    def _run(self) -> None:
        try:
            with closing(self._open_queue()) as rollouts:
                with self._changed:
                    self._rollouts = rollouts
                while self._begin(rollouts):
                    rollouts.wait()
                    while rollouts.has_finished:
                        finished = rollouts.next()
                        # the oldest weights that sampled a token; infinity where it has none
                        paths = (p for t in finished.trajectories for p in t.parts)
                        versions = [int(p.version_N.min()) for p in paths if p.version_N.size]
                        oldest = min(versions, default=math.inf)
                        with self._changed:
                            heappush(self._finished, (oldest, self._num_finished, finished))
                            self._num_finished += 1
                            self._changed.notify()
        except BaseException as error:  # noqa: BLE001 (raised again by next)
            with self._changed:
                self._error = error
                self._changed.notify()

    def _begin(self, rollouts: RolloutQueue) -> bool:
        """Drop groups that are too old, and begin others while there is room. Return whether to go on."""
        while True:
            with self._changed:
                if self._is_closing:
                    return False
                if self._oldest is not None:
                    dropped = rollouts.drop_older(self._oldest)
                    while self._finished and self._finished[0][0] < self._oldest:
                        _, _, finished = heappop(self._finished)
                        dropped.append((finished.number, finished.trajectories[0].row))
                    self._num_stale += len(dropped)
                    self._waiting.extend(sorted(dropped, key=itemgetter(0)))
                    self._oldest = None
                if not self._waiting or not rollouts.has_room:
                    return True
                number, row = self._waiting.popleft()
            rollouts.ask(number, row)


@dataclass(eq=False)
class AsyncRollouts(RolloutSource):
    """Takes groups that were generated in the background. Every rank has one; the writer's has the thread."""

    worker: RolloutWorker
    choice: GroupChoice
    """Which groups are kept; with dynamic sampling others are taken in place of the rest."""
    state: RolloutState
    _taken: DrawState | None = field(default=None, init=False)
    """The draws after the last rollout that was taken."""

    @property
    def decisions(self) -> Sequence[Decision]:  # type: ignore[override]  # of the instance
        if not self.worker.judges_together:
            return self.worker.decisions
        value = "judge between updates, on the first rank"
        reason = "rollout.lag: groups are judged as they are taken, while nothing trains"
        return [*self.worker.decisions, Decision("reward models", value, reason)]

    def take(self, request: RolloutRequest) -> Rollout:
        """Take the groups of a rollout. The server has the weights of ``request.version``."""
        engine, ranks = self.worker.engine, self.worker.ranks
        assert isinstance(engine, ServerEngine)
        take = partial(self._take, request)
        rollout, self._taken = engine.shared(partial(ranks.run_on_writer, take))
        return rollout

    def commit(self, rollout: Rollout, samples: Sequence[TrainSample]) -> None:
        if self._taken is not None:  # else the data answered all prompts so far
            self.state.draws = self._taken

    def close(self) -> None:
        """Cancel what is in flight, and close the worker; the state stays."""
        if "_queue" in vars(self):
            self._queue.close()
        self.worker.close()

    @cached_property
    def _queue(self) -> PromptQueue:
        """The thread. Draws that are open are asked first."""
        worker = self.worker
        engine = worker.engine
        assert isinstance(engine, ServerEngine)
        sampling = worker.config.sampling(seed_of(worker.seed, 0, 0))
        judge = None if worker.judges_together else worker.judge
        queue = PromptQueue(partial(RolloutQueue, engine, sampling, worker.environments, judge))
        for number, index in self.state.draws["open"]:
            queue.ask(number, self._row(number, index))
        return queue

    def _row(self, number: int, index: int) -> PromptRow:
        """Return the prompt of a draw, with an id that no other draw has: it keys the random streams."""
        row = self.worker.prompts[index]
        return replace(row, id=f"{row.id} drawn {number}")

    def _take(self, request: RolloutRequest) -> tuple[Rollout, DrawState]:
        """Take a rollout, on the writer; return it with the draws after it."""
        worker, queue, began = self.worker, self._queue, time.perf_counter()
        config, number, version = worker.config, request.number, request.version
        before = self._taken or self.state.draws
        open_draws, next_draw = dict(before["open"]), before["next"]

        # How many groups are wanted, open and tried at most.
        num_wanted = request.num_asked(number)
        ahead = range(number, number + min(1 + config.lag // config.updates, request.num_left))
        most_open = sum(map(request.num_asked, ahead))
        most_asked = num_wanted * (1 + self.choice.rounds)
        most_tried = num_wanted * (1 + self.choice.num_tries)

        kept: dict[int, list[Trajectory]] = {}
        left_out: dict[int, list[Trajectory]] = {}
        num_stale, num_replaced = queue.num_stale(), 0
        while True:
            # Ask draws until enough are open.
            while len(open_draws) < most_open + len(left_out):
                if request.is_asked(next_draw):
                    of_rollout, place = divmod(next_draw, request.order.samples_per_step)
                    planned = request.order.step(of_rollout + 1)[place]
                    index = request.choose(next_draw, planned, open_draws.values())
                    open_draws[next_draw] = index
                    num_replaced += index != planned
                    queue.ask(next_draw, self._row(next_draw, index))
                next_draw += 1

            # Take the next group that is finished; one that is too old is asked again.
            oldest, (draw, trajectories) = queue.next()
            if version - oldest > config.lag:
                num_stale += 1
                queue.ask(draw, self._row(draw, open_draws[draw]))
                continue
            if worker.judges_together:
                results = worker.judge(trajectories)
                trajectories = [t.judged(r) for t, r in zip(trajectories, results, strict=True)]
            is_kept = self.choice.keeps(Group(tuple(trajectories)))
            (kept if is_kept else left_out)[draw] = trajectories
            num_tried = len(kept) + len(left_out)
            has_some = bool(kept) and num_tried >= most_asked
            if len(kept) == num_wanted or has_some or num_tried >= most_tried:
                break

        # Ask again, while the model trains, what would be too old for the next rollout.
        queue.drop_older(version + config.updates - config.lag)

        if not kept:  # a step has to have something
            kept, left_out = left_out, {}
        order = [*kept, *left_out]
        rows = distinct([worker.prompts[open_draws[draw]] for draw in order])
        groups = [
            Group(tuple(replace(t, row=row, rollout=number) for t in trajectories))
            for row, trajectories in zip(rows, (kept | left_out).values(), strict=True)
        ]
        rollout = Rollout(
            groups[: len(kept)],
            groups[len(kept) :],
            seconds_generating=time.perf_counter() - began,
            draws=order,
            num_stale=num_stale,
            num_replaced=num_replaced,
        )
        still_open = [pair for pair in sorted(open_draws.items()) if pair[0] not in order]
        return rollout, {"next": next_draw, "open": still_open}
