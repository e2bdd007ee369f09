"""Rollouts whose groups are generated while the model trains: ``rollout.lag`` above 0, against a server.

    Background     a thread with a feed (feed.py): begins a group where the server has room for it
    Lagging        asks prompts in their order, and takes groups as they finish

A draw is a place in the endless order of prompts (``Order``), so each is asked once, epoch by epoch; draws that the
data answer (``data_answers.py``) are passed over, and a rollout takes as many groups fewer as there are in its place.
It is open from when it is drawn until its group is trained on, or left out for want of a signal.

    push       the weights go to the server before each rollout; trajectories in flight go on with them
    take       the first ``samples_per_step * minibatches`` groups that finish; of several that wait, those with the
               oldest tokens first. A group whose oldest token was sampled more than ``lag`` updates ago is dropped, and
               its draw is asked again: as soon as it is known that it would be too old, finished or not, so that no
               slow answer or judge keeps a place that a younger group could have
    open       at most 1 + lag / updates rollouts, this one included: more would be too old when its turn comes

The state is what was drawn and is open after the last rollout was taken. A checkpoint keeps it; what was in flight, or
finished and not taken, is asked again on resume, before new draws. So no prompt is lost, and none comes twice.

The writer asks and judges. Every rank gets the same groups, in the same order. A group is judged where it finishes; a
model in this process, which cannot compute while another trains, judges it where it is taken.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from heapq import heappop, heappush
from operator import itemgetter
from threading import Condition, Thread
from typing import Annotated

from pydantic import BeforeValidator, Field
from typing_extensions import TypedDict

from taut.data.prompts import PromptRow
from taut.inference.vllm import ServerEngine
from taut.rl.advantages import as_tuple
from taut.rl.feed import Feed, Finished
from taut.rl.rollout import Group, Rollout, RolloutWorker, distinct, seed_of
from taut.rl.sampler import Trajectory

PATIENCE = 5.0
"""Seconds that ``close`` waits for the thread."""
Natural = Annotated[int, Field(ge=0)]


class Draws(TypedDict):
    """The state of ``Lagging``."""

    next: Natural
    """The first draw that was never made."""
    open: list[Annotated[tuple[Natural, Natural], BeforeValidator(as_tuple)]]
    """Draws that are open, with the index of the prompt of each."""


class Background:
    """A feed in a thread. All other methods are for one thread, another than that."""

    def __init__(self, make_feed: Callable[[], Feed]) -> None:
        """``make_feed``: called in the thread."""
        self._make_feed = make_feed
        self._changed = Condition()
        self._waiting: deque[tuple[int, PromptRow]] = deque()
        """What is asked and not yet begun."""
        self._finished: list[tuple[float, int, Finished]] = []
        """A heap of (version of the oldest token, how many finished before, group)."""
        self._num_finished = 0
        self._oldest: int | None = None
        """What has a token of an older version is to be dropped; None: all of it has been."""
        self._num_stale = 0
        """Groups that were dropped."""
        self._feed: Feed | None = None
        self._error: BaseException | None = None
        self._is_closing = False
        self._thread = Thread(target=self._run, name="feed", daemon=True)
        self._thread.start()

    def ask(self, number: int, row: PromptRow) -> None:
        """Begin a group as soon as the server has room."""
        with self._changed:
            self._waiting.append((number, row))
            self._wake()

    def next(self) -> tuple[float, Finished]:
        """A finished group, and the version of its oldest token (infinity: it has none): of several the oldest. Raises
        the error that ended the thread.
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
        """How many groups were dropped since the last call."""
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
        if self._feed is not None:
            self._feed.wake()

    def _run(self) -> None:
        try:
            with closing(self._make_feed()) as feed:
                with self._changed:
                    self._feed = feed
                while self._begin(feed):
                    feed.wait()
                    while feed.has_finished:
                        finished = feed.next()
                        oldest = _oldest(finished.trajectories)
                        with self._changed:
                            heappush(self._finished, (oldest, self._num_finished, finished))
                            self._num_finished += 1
                            self._changed.notify()
        except BaseException as error:  # noqa: BLE001 (raised again by next)
            with self._changed:
                self._error = error
                self._changed.notify()

    def _begin(self, feed: Feed) -> bool:
        """Drop groups that are too old, and begin others where there is room for them. False: it is to end."""
        while True:
            with self._changed:
                if self._is_closing:
                    return False
                if self._oldest is not None:
                    self._drop_older(feed, self._oldest)
                    self._oldest = None
                if not self._waiting or not feed.has_room:
                    return True
                number, row = self._waiting.popleft()
            feed.ask(number, row)

    def _drop_older(self, feed: Feed, version: int) -> None:
        dropped = feed.drop_older(version)
        while self._finished and self._finished[0][0] < version:
            _, _, finished = heappop(self._finished)
            dropped.append((finished.number, finished.trajectories[0].row))
        self._num_stale += len(dropped)
        self._waiting.extend(sorted(dropped, key=itemgetter(0)))


@dataclass(eq=False)
class Lagging:
    """Takes rollouts of groups that were generated in the background. Every rank has one; the writer's has the thread.
    ``close`` ends it.
    """

    worker: RolloutWorker
    prompt_of: Callable[[int, Collection[int]], tuple[int, bool]]
    """The index of the prompt to ask for a draw, given those that are open, and whether it replaces another."""
    are_own: Callable[[int], list[bool]]
    """Which draws of a rollout are asked; the data answer the others."""
    num_draws: int
    """Draws of a rollout."""
    draws: Draws
    """The state after the last rollout that was taken. Replaced as a whole."""

    def take(self, phase: int, version: int, num_left: int) -> Rollout:
        """The rollout of a phase. ``version``: of the weights that begin to train on it, which the server has.
        ``num_left``: rollouts that are still to be taken, this one included.
        """
        engine, ranks = self.worker.engine, self.worker.ranks
        assert isinstance(engine, ServerEngine)

        def work() -> tuple[Rollout, Draws] | None:
            return self._take(phase, version, num_left) if ranks.is_writer else None

        taken = engine.shared(work, ranks)[0]
        assert taken is not None
        rollout, self.draws = taken
        return rollout

    def close(self) -> None:
        """Cancel what is in flight; the state stays."""
        if "_background" in vars(self):
            self._background.close()

    @cached_property
    def _background(self) -> Background:
        """The thread. Draws that are open are asked first."""
        worker = self.worker
        engine = worker.engine
        assert isinstance(engine, ServerEngine)
        sampling = worker.config.sampling(seed_of(worker.seed, 0, 0))
        environments = worker.environments
        judge = None if worker.judges_together else worker.judge
        background = Background(partial(Feed, engine, sampling, environments, judge))
        for number, index in self.draws["open"]:
            background.ask(number, self._row(number, index))
        return background

    def _row(self, number: int, index: int) -> PromptRow:
        """The prompt of a draw, with an id that no other draw has: it keys the random streams."""
        row = self.worker.prompts[index]
        return replace(row, id=f"{row.id} drawn {number}")

    def _take(self, phase: int, version: int, num_left: int) -> tuple[Rollout, Draws]:
        worker, background, began = self.worker, self._background, time.perf_counter()
        config, wanted = worker.config, sum(self.are_own(phase))
        open_draws, next_draw = dict(self.draws["open"]), self.draws["next"]
        ahead = range(phase, phase + min(1 + config.lag // config.updates, num_left))
        most_open = sum(sum(self.are_own(number)) for number in ahead)
        most_asked = wanted * (1 + config.dynamic_sampling_rounds)
        most_tried = wanted * (1 + max(config.dynamic_sampling_rounds, worker.num_tries))
        kept: dict[int, list[Trajectory]] = {}
        left_out: dict[int, list[Trajectory]] = {}
        num_stale, num_replaced = background.num_stale(), 0
        while True:
            while len(open_draws) < most_open + len(left_out):
                of_phase, place = divmod(next_draw, self.num_draws)
                if not self.are_own(of_phase)[place]:
                    next_draw += 1
                    continue
                index, is_replaced = self.prompt_of(next_draw, open_draws.values())
                open_draws[next_draw] = index
                num_replaced += is_replaced
                background.ask(next_draw, self._row(next_draw, index))
                next_draw += 1
            oldest, (number, trajectories) = background.next()
            if version - oldest > config.lag:
                num_stale += 1
                background.ask(number, self._row(number, open_draws[number]))
                continue
            if worker.judges_together:
                verdicts = worker.judge(trajectories)
                trajectories = [t.judged(v) for t, v in zip(trajectories, verdicts, strict=True)]
            is_kept = not worker.must_choose or worker.is_useful(Group(tuple(trajectories)))
            (kept if is_kept else left_out)[number] = trajectories
            num_tried = len(kept) + len(left_out)
            has_some = bool(kept) and num_tried >= most_asked
            if len(kept) == wanted or has_some or num_tried >= most_tried:
                break
        background.drop_older(version + config.updates - config.lag)
        if not kept:  # a step has to have something
            kept, left_out = left_out, {}
        order = [*kept, *left_out]
        rows = distinct([worker.prompts[open_draws[number]] for number in order])
        groups = [
            Group(tuple(replace(t, row=row, rollout=phase) for t in trajectories))
            for row, trajectories in zip(rows, (kept | left_out).values(), strict=True)
        ]
        still_open = [pair for pair in sorted(open_draws.items()) if pair[0] not in order]
        rollout = Rollout(
            groups[: len(kept)],
            groups[len(kept) :],
            seconds_generating=time.perf_counter() - began,
            draws=order,
            num_stale=num_stale,
            num_replaced=num_replaced,
        )
        return rollout, {"next": next_draw, "open": still_open}


def _oldest(trajectories: Sequence[Trajectory]) -> float:
    """The version of the oldest token of a group; infinity where it has none."""
    paths = [path for trajectory in trajectories for path in trajectory.parts]
    return min(
        (int(path.version_N.min()) for path in paths if path.version_N.size), default=math.inf
    )
