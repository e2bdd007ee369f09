"""The base source of rollouts: it samples trajectories from the policy and judges them.

    prompts -> trajectories (engine, environments) -> rewards -> groups

The engine in this process computes all trajectories as one batch, and they are judged together afterwards. A server has
all of them in flight, and each group is judged while others are generated (rollout_queue.py). One rank, the writer,
judges for all and asks the server.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from taut.config import Decision
from taut.data.rows.prompts import PromptRow
from taut.errors import DataError
from taut.evals.answers import to_reward_input
from taut.inference.engine import Engine
from taut.inference.local import LocalEngine
from taut.inference.settings import Sampling
from taut.inference.vllm import ServerEngine
from taut.rewards.reward_set import RewardResult, RewardSet
from taut.rewards.verifier import RewardInput, Score
from taut.rl.environment import EnvironmentPool
from taut.rl.rating import SharedRating
from taut.rl.rollout import (
    RESERVED,
    Group,
    Oversampled,
    Rollout,
    RolloutRequest,
    RolloutSource,
    distinct,
)
from taut.rl.rollout_queue import Judge, RolloutQueue
from taut.rl.sampler import NO_REWARD, Trajectory, sample_trajectories
from taut.rl.settings import RolloutConfig
from taut.rl.step_rewards import assign_step_rewards
from taut.train.distributed import Ranks


@dataclass(frozen=True, eq=False)
class RolloutWorker(RolloutSource):
    """Samples from the policy. Every rank has one, and all ranks call an engine in this process."""

    config: RolloutConfig
    prompts: Sequence[PromptRow]
    engine: Engine
    reward_set: RewardSet | None
    """The writer's; None also where the environment alone rewards."""
    environments: EnvironmentPool | None
    seed: int
    ranks: Ranks
    is_judged: bool = True
    """False: completions have no reward, and all are learned from."""
    judges_together: bool = False
    """Whether all groups are judged together, after the last trajectory, because a model in this process judges."""
    rating: SharedRating | None = None
    """The reward models of several ranks."""
    pieces: Sequence[bytes] | None = None
    """The bytes of each token id, where rewards charge steps of an answer."""
    decisions: Sequence[Decision] = ()

    def take(self, request: RolloutRequest) -> Rollout:
        """Sample and judge a group for each prompt of the request."""
        request, prompts = request.resolved()
        rows = distinct([self.prompts[index] for index in prompts])
        sampling = self.config.sampling(seed_of(self.seed, request.number, request.round))
        began = time.perf_counter()
        trajectories, generated, oversampled = self._sample(rows, sampling, request)
        judged = time.perf_counter()
        trajectories = [replace(one, rollout=request.number) for one in trajectories]
        size = self.config.n
        return Rollout(
            [
                Group(tuple(trajectories[at : at + size]))
                for at in range(0, len(trajectories), size)
            ],
            seconds_generating=generated - began,
            seconds_judging=judged - generated,
            prompts=prompts,
            oversampled=oversampled,
            num_replaced=request.num_replaced,
            lost=self.engine.take_lost() if isinstance(self.engine, LocalEngine) else (0, 0),
        )

    def close(self) -> None:
        """Close rewards, environments and engine."""
        if self.reward_set is not None:
            self.reward_set.close()
        if self.environments is not None:
            self.environments.close()
        if isinstance(self.engine, ServerEngine):
            self.engine.close()

    def _sample(
        self, rows: Sequence[PromptRow], sampling: Sampling, request: RolloutRequest
    ) -> tuple[list[Trajectory], float, Oversampled | None]:
        """Return the judged trajectories of these rows in their order, the time when the last of them was finished, and
        the groups that were cancelled.
        """
        # Generate. A server's groups are also judged here, each when it is finished. A model in this process judges all
        # trajectories together instead: the composition of its batches changes the last bits of its scores.
        if isinstance(self.engine, ServerEngine):
            judge = None if self.judges_together else self.judge
            sample = partial(self._ask_server, self.engine, rows, sampling, judge, request)
            run = partial(self.ranks.run_on_writer, sample)
            sampled, generated, oversampled = self.engine.shared(run)
            if judge is not None:
                return sampled, generated, oversampled
        else:
            sampled = sample_trajectories(self.engine, rows, sampling, self.environments)
            generated, oversampled = time.perf_counter(), None

        # Judge.
        if self.rating is not None:
            self.rating.rate([reward_input_of(path) for path in sampled if path.error is None])
        results = self.ranks.run_on_writer(partial(self.judge, sampled))
        judged = [path.judged(result) for path, result in zip(sampled, results, strict=True)]
        return judged, generated, oversampled

    def _ask_server(
        self,
        engine: ServerEngine,
        rows: Sequence[PromptRow],
        sampling: Sampling,
        judge: Judge | None,
        request: RolloutRequest,
    ) -> tuple[list[Trajectory], float, Oversampled | None]:
        """Sample from a server, on the writer; return the values of ``_sample``. Without a judge every group counts as
        wanted.
        """
        num_wanted = math.inf if request.num_wanted is None else request.num_wanted
        with closing(RolloutQueue(engine, sampling, self.environments, judge)) as queue:
            for number, row in enumerate(rows):
                queue.ask(number, row)
            groups: dict[int, list[Trajectory]] = {}
            while queue.is_busy and num_wanted:
                number, trajectories = queue.next()
                groups[number] = trajectories
                num_wanted -= judge is None or request.is_wanted(Group(tuple(trajectories)))
            sizes, oversampled = queue.sizes(), None
            if sizes:
                num_groups = len(sizes) // self.config.n
                oversampled = Oversampled(num_groups, sum(sizes) / len(sizes))
        in_order = [trajectory for number in sorted(groups) for trajectory in groups[number]]
        return in_order, queue.generated_at, oversampled

    def judge(self, trajectories: Sequence[Trajectory]) -> list[RewardResult]:
        """Return the rewards of each trajectory; without a total where the engine or the environment failed."""
        whole = [trajectory for trajectory in trajectories if trajectory.error is None]
        if self.reward_set is not None:
            results = self.reward_set.grade([reward_input_of(trajectory) for trajectory in whole])
        else:  # without rewards all trajectories are worth the same
            results = [RewardResult({}, None if self.is_judged else 0.0)] * len(whole)
        if self.pieces is not None:
            pairs = zip(results, whole, strict=True)
            results = [assign_step_rewards(result, one, self.pieces) for result, one in pairs]
        complete = (add_environment_rewards(*pair) for pair in zip(results, whole, strict=True))
        return [NO_REWARD if one.error is not None else next(complete) for one in trajectories]


def reward_input_of(trajectory: Trajectory) -> RewardInput:
    """Return a trajectory as rewards get it: up to the policy's last turn, which they judge."""
    row, roles = trajectory.row, [message["role"] for message in trajectory.messages]
    num_after = roles[::-1].index("assistant") if "assistant" in roles else 0
    messages = trajectory.messages[: len(roles) - num_after]
    if row.beginning and messages:
        first = {**messages[0], "content": row.beginning + messages[0]["content"]}
        messages = (first, *messages[1:])
    return to_reward_input(
        row,
        trajectory.text,
        num_tokens=trajectory.num_sampled,
        finish_reason=trajectory.finish_reason,
        prompt=trajectory.first_messages,
        messages=messages,
    )


def add_environment_rewards(result: RewardResult, trajectory: Trajectory) -> RewardResult:
    """Return the result with the environment's rewards. Raises DataError where two rewards have one name."""
    if not trajectory.rewards:
        return result
    for name in trajectory.rewards:
        if name in result.parts or name in RESERVED:
            raise DataError(
                f"{trajectory.row.place}: the environment gives the reward {name!r}, and another number of the run has "
                "that name; expected one of its own; rename it"
            )
    parts = {name: Score(value) for name, value in trajectory.rewards.items()} | dict(result.parts)
    total = sum(trajectory.rewards.values())
    if result.parts:
        whole = None if result.error is not None else total + (result.total or 0.0)
        return replace(result, parts=parts, total=whole)
    return RewardResult(parts, total)


def seed_of(seed: int, number: int, round: int) -> int:
    """Return the seed of a round of a rollout: a prompt that is asked again has other completions."""
    digest = hashlib.sha256(f"rollout/{seed}/{number}/{round}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1
