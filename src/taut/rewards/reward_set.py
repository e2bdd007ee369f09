"""Reward sets: every reward of a configuration scores every answer, and the total is their weighted sum.

    total = sum of weight * value over the rewards that gave a number
            None if one of them gave an error, or none applied

Verifiers run concurrently, outside of the caller's thread and each within its time limit: those that compute in worker
processes (``workers.py``), those that ask servers in one thread. Verifiers that are quick and cannot hang run in the
caller's thread. ``grade`` returns a result for each answer, in their order. An error belongs to one answer and one
reward; the caller counts and bounds errors (``tally``). A value of the wrong type is a bug of the reward, and ``grade``
raises UserCodeError. If rewards are functions of the answer, results do not depend on the number of workers. Any thread
may call ``grade``; several may at a time unless a model in this process judges.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import groupby
from types import TracebackType
from typing import TypeAlias

import anyio
import httpx2

from taut.config import Decision
from taut.errors import ConfigError, UserCodeError
from taut.io.http import ClientThread, Closed
from taut.rewards.registry import Part, read_parts
from taut.rewards.settings import GradingConfig, Judged, RewardSpec
from taut.rewards.verifier import Client, RewardInput, Score, Verifier, reason, scored
from taut.rewards.worker import judged
from taut.rewards.workers import Workers

Rater: TypeAlias = Callable[[Sequence[RewardInput]], list[Score]]
"""Scores a batch of answers by a model in this process."""
OpenRater: TypeAlias = Callable[[Verifier], Rater]


@dataclass(frozen=True)
class RewardResult:
    """The rewards of one answer."""

    parts: Mapping[str, Score]
    """Score of each reward, by label."""
    total: float | None
    """The weighted sum. None: one of the scores is an error, or no reward applies."""
    steps: tuple[tuple[int, float], ...] = ()
    """(Character of the answer at which a step ends, its part of the total), if rewards charge steps."""
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """``steps`` by sampled token: (number of the token that ends a step, its part), set by ``rl/step_rewards.py``."""

    @property
    def error(self) -> str | None:
        """The first error."""
        return next((score.error for score in self.parts.values() if score.error), None)


@dataclass(frozen=True)
class RewardStats:
    """The scores of one reward over many answers."""

    num_scored: int
    num_not_applicable: int
    errors: tuple[str, ...]
    """The reason of each."""
    mean: float | None
    """Mean over the answers with a value."""

    @property
    def error_share(self) -> float:
        total = self.num_scored + self.num_not_applicable + len(self.errors)
        return len(self.errors) / total if total else 0.0


class RewardSet:
    """Rewards that are ready. ``close`` ends their processes; so does garbage collection."""

    def __init__(
        self,
        parts: Sequence[Part],
        config: GradingConfig,
        raters: Mapping[str, Rater],
        decisions: Sequence[Decision] = (),
    ) -> None:
        self.parts = tuple(parts)
        self.decisions = decisions
        self.judges: dict[str, Judged] = {}
        """The judged quality of each reward, by label; known once they are loaded (``require_loadable``)."""
        self._grouped: set[str] = set()
        """Labels of the rewards that judge the answers to one prompt together."""
        self._raters = raters
        self._rating = threading.Lock()
        computed = [part for part in parts if part.verifier.runs == "process"]
        self._numbers = {part.label: number for number, part in enumerate(computed)}
        self._workers = Workers(computed, config.workers) if computed else None
        self._servers = ClientThread()
        self._at_a_time = anyio.Semaphore(config.concurrency)

    @property
    def names(self) -> list[str]:
        """Names of the metrics, in the order of the configuration."""
        return [part.label for part in self.parts]

    def grade(
        self,
        answers: Sequence[RewardInput],
        labels: Collection[str] | None = None,
        *,
        extract: bool = True,
    ) -> list[RewardResult]:
        """Return the result of each answer, in their order. Raises UserCodeError for the first value of the wrong type.

        ``labels``: the rewards to ask, by default all. ``extract``: false for bare answers, which have no marks around
        them (``inside``, ``after``).
        """
        # Start rewards in worker processes and at servers; meanwhile compute the others in this thread.
        parts = [part for part in self.parts if labels is None or part.label in labels]
        pending: dict[str, list[Future[list[Score]]]] = {}
        read = {part.label: [part.read(each, extract) for each in answers] for part in parts}
        try:
            for part in parts:
                pending[part.label] = self._start(part, read[part.label])
            found: dict[str, list[Score]] = {}
            for part in parts:
                if part.verifier.runs == "model":
                    with self._rating:
                        found[part.label] = self._raters[part.label](read[part.label])
                elif part.verifier.runs == "here":
                    found[part.label] = [
                        judged(part.label, part.verifier, answer) for answer in read[part.label]
                    ]
            for label, futures in pending.items():
                found.setdefault(label, [score for each in futures for score in each.result()])
        except BaseException:  # Ctrl-C above all: the rest is not needed
            for future in (future for futures in pending.values() for future in futures):
                future.cancel()
            if self._workers is not None:
                self._workers.drop()
            raise

        # The scores of each answer, and their weighted sum.
        reward_results = []
        for index in range(len(answers)):
            scores = {part.label: found[part.label][index] for part in parts}
            counted = [
                part.weight * value
                for part in parts
                if (value := scores[part.label].value) is not None
            ]
            is_complete = bool(counted) and all(score.error is None for score in scores.values())
            steps = [
                (end, part.weight * charge)
                for part in parts
                for end, charge in scores[part.label].steps
            ]
            total = sum(counted) if is_complete else None
            reward_results.append(RewardResult(scores, total, tuple(sorted(steps))))
        # A value of the wrong type is a bug of the reward, not of the answer.
        for answer, reward_result in zip(answers, reward_results, strict=True):
            for score in reward_result.parts.values():
                if score.is_wrong_type:
                    says, _, remedy = str(score.error).rpartition("; ")
                    raise UserCodeError(
                        f"the reward {says}; it judged the answer {answer.text!r:.60}; {remedy}"
                    )
        return reward_results

    def close(self) -> None:
        """End its processes and requests."""
        if self._workers is not None:
            self._workers.close()
        self._servers.close()

    def __enter__(self) -> RewardSet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def require_loadable(self) -> None:
        """Raise ConfigError for a verifier that cannot work here."""
        # In this process, at the servers, and in a worker process.
        for part in self.parts:
            if part.verifier.runs in ("here", "remote"):
                part.verifier.prepare()
        remote = [part.verifier for part in self.parts if part.verifier.runs == "remote"]
        for future in [
            self._servers.start(lambda client, it: it.reach(Client(client)), verifier)
            for verifier in remote
        ]:
            future.result()
        loaded = {} if self._workers is None else self._workers.require_loadable()
        self._grouped = {label for label, one in loaded.items() if one.takes_groups}
        for part in self.parts:
            verifier = loaded.get(part.label, part.verifier)
            self.judges[part.label] = part.judges or verifier.judges

    def _start(self, part: Part, answers: Sequence[RewardInput]) -> list[Future[list[Score]]]:
        """Start scoring the answers in worker processes or at a server; nothing for verifiers of this process."""
        if part.verifier.runs == "process":
            assert self._workers is not None
            number = self._numbers[part.label]
            groups = [[answer] for answer in answers]
            if part.label in self._grouped:  # answers to one row stand side by side
                groups = [list(group) for _, group in groupby(answers, lambda each: id(each.row))]
            return [self._workers.start(number, group) for group in groups]
        if part.verifier.runs == "remote":
            try:
                return [
                    self._servers.start(_ask_server, self._at_a_time, part, answer)
                    for answer in answers
                ]
            except Closed:
                raise RuntimeError("the rewards are closed") from None
        return []


async def _ask_server(
    client: httpx2.AsyncClient, at_a_time: anyio.Semaphore, part: Part, answer: RewardInput
) -> list[Score]:
    """The score, alone in a list, of a verifier that asks a server; the time limit covers all attempts."""
    async with at_a_time:
        try:
            with anyio.fail_after(part.timeout):
                return [scored(part.label, await part.verifier.ask(Client(client), answer))]
        except TimeoutError as error:
            last = f"; the last: {error}" if str(error) else ""
            return [Score(error=f"{part.label} had no answer within {part.timeout:g} s{last}")]
        except Exception as error:  # noqa: BLE001 (what a server's answer leads to is counted and shown)
            return [Score(error=reason(error))]


def open_rewards(
    rewards: str | Sequence[str | RewardSpec],
    config: GradingConfig | None = None,
    *,
    reserved: Sequence[str] = (),
    open_rater: OpenRater | None = None,
) -> RewardSet:
    """Load the rewards that a configuration names.

    ``reserved``: names of other metrics, which no reward may have. ``open_rater``: loads a reward model in this
    process; without it ``reward_model`` is refused.
    """
    # Settings that are left to taut are chosen here, once, so that no two processes choose differently.
    parts, decisions = [], dict[Decision, None]()
    for part in read_parts(rewards, reserved):
        verifier, decision = part.verifier.resolve_defaults()
        parts.append(replace(part, verifier=verifier))
        if decision is not None:
            decisions[decision] = None
    # Models that judge in this process.
    raters = {}
    for part in parts:
        if part.verifier.runs != "model":
            continue
        if open_rater is None:
            raise ConfigError(
                f"found the reward {part.label!r}, a model in this process, where none can be; expected a server of "
                "it; use reward_server"
            )
        raters[part.label] = open_rater(part.verifier)
    reward_set = RewardSet(
        parts, GradingConfig() if config is None else config, raters, list(decisions)
    )
    try:
        reward_set.require_loadable()
    except ConfigError:
        reward_set.close()
        raise
    return reward_set


def tally(reward_results: Sequence[RewardResult]) -> dict[str, RewardStats]:
    """Return the statistics of each reward, by label."""
    totals = {}
    for label in reward_results[0].parts if reward_results else ():
        scores = [reward_result.parts[label] for reward_result in reward_results]
        values = [score.value for score in scores if score.value is not None]
        errors = tuple(score.error for score in scores if score.error is not None)
        mean = sum(values) / len(values) if values else None
        totals[label] = RewardStats(
            len(values), len(scores) - len(values) - len(errors), errors, mean
        )
    return totals
