"""The panel: every reward of a configuration scores every answer, and the total is their weighted sum.

    total = sum of weight * value over the rewards that gave a number
            None if one of them gave an error, or none applied

Verifiers run concurrently and off the caller's thread: worker processes for what computes (``workers.py``), one thread
for requests to servers, each within its time limit; only what is quick and cannot hang runs in the caller's. A batch of
answers comes back complete and in order; an error belongs to one answer and one reward, and counting and bounding
errors is the caller's task (``tally``). A reward that returns a value of the wrong type is no such error: ``grade``
raises UserCodeError. The same answers get the same verdicts, whatever the number of workers, if the rewards are
functions of the answer. ``grade`` may be called from any thread, and from several at a time unless a model in this
process judges.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Annotated, TypeAlias

import anyio
import httpx2
from pydantic import Field

from taut.config import Decision, configclass
from taut.errors import ConfigError, UserCodeError
from taut.io.http import ClientThread, Closed
from taut.rewards.registry import Part, RewardSpec, read_parts
from taut.rewards.verifier import Answered, Client, Judged, Score, Verifier, reason, scored
from taut.rewards.worker import judged
from taut.rewards.workers import Workers

Rater: TypeAlias = Callable[[Sequence[Answered]], list[Score]]
"""Scores a batch of answers by a model in this process."""
OpenRater: TypeAlias = Callable[[Verifier], Rater]


@configclass
class PanelConfig:
    """How rewards are run; none of it changes their values."""

    workers: Annotated[int, Field(ge=1)] = 4
    """Processes for rewards that compute: math, json_schema, FILE.py:function and the like."""
    concurrency: Annotated[int, Field(ge=1)] = 16
    """Requests to servers at a time."""


@dataclass(frozen=True)
class Verdict:
    """The scores of one answer."""

    parts: Mapping[str, Score]
    """By label."""
    total: float | None
    """The weighted sum; None: one of them is an error, or none applies."""
    steps: tuple[tuple[int, float], ...] = ()
    """(character of the answer, the part of the total that the step which ends there is charged with), where rewards
    charge steps."""
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """The same by sampled token, as of a trajectory, which knows its tokens (``rl/steps.py``)."""

    @property
    def error(self) -> str | None:
        """The first of its errors."""
        return next((score.error for score in self.parts.values() if score.error), None)


@dataclass(frozen=True)
class Tally:
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


class Panel:
    """Rewards that are ready. ``close`` ends their processes; so does garbage collection."""

    def __init__(
        self,
        parts: Sequence[Part],
        config: PanelConfig,
        raters: Mapping[str, Rater],
        decisions: Sequence[Decision] = (),
    ) -> None:
        self.parts = tuple(parts)
        self.decisions = decisions
        self.judges: dict[str, Judged] = {}
        """What each reward judges, by label; known once they are loaded (``require_loadable``)."""
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
        answers: Sequence[Answered],
        labels: Collection[str] | None = None,
        *,
        are_bare: bool = False,
    ) -> list[Verdict]:
        """The verdict on each answer, in their order. Raises UserCodeError for the first value of the wrong type.

        ``labels``: only these rewards. ``are_bare``: the answers have no marks around them (``inside``, ``after``).
        """
        parts = [part for part in self.parts if labels is None or part.label in labels]
        pending: list[dict[str, Future[Score]]] = [{} for _ in answers]
        try:
            for answered, futures in zip(answers, pending, strict=True):
                for part in parts:
                    future = self._start(part, part.read(answered, are_bare))
                    if future is not None:
                        futures[part.label] = future
            done = {
                part.label: self._at_once(
                    part, [part.read(answered, are_bare) for answered in answers]
                )
                for part in parts
                if part.verifier.runs in ("here", "model")
            }
            found = [{label: future.result() for label, future in each.items()} for each in pending]
        except BaseException:  # Ctrl-C above all: the rest is not needed
            self._drop(future for each in pending for future in each.values())
            raise
        verdicts = []
        for index, computed in enumerate(found):
            by_label = {label: scores[index] for label, scores in done.items()} | computed
            scores = {part.label: by_label[part.label] for part in parts}
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
            verdicts.append(Verdict(scores, total, tuple(sorted(steps))))
        for answered, verdict in zip(answers, verdicts, strict=True):
            for score in verdict.parts.values():
                if score.is_wrong_type:
                    says, _, remedy = str(score.error).rpartition("; ")
                    raise UserCodeError(
                        f"the reward {says}; it judged the answer {answered.text!r:.60}; {remedy}"
                    )
        return verdicts

    def close(self) -> None:
        """End its processes and requests."""
        if self._workers is not None:
            self._workers.close()
        self._servers.close()

    def __enter__(self) -> Panel:
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
        for part in self.parts:
            if part.verifier.runs in ("here", "remote"):
                part.verifier.prepare()
        remote = [part.verifier for part in self.parts if part.verifier.runs == "remote"]
        for reached in [self._servers.start(_reach, verifier) for verifier in remote]:
            reached.result()
        judged_by = {} if self._workers is None else self._workers.require_loadable()
        for part in self.parts:
            self.judges[part.label] = (
                part.judges or judged_by.get(part.label) or part.verifier.judges
            )

    def _drop(self, futures: Iterable[Future[Score]]) -> None:
        for future in futures:
            future.cancel()
        if self._workers is not None:
            self._workers.drop()

    def _start(self, part: Part, answered: Answered) -> Future[Score] | None:
        if part.verifier.runs == "process":
            assert self._workers is not None
            return self._workers.start(self._numbers[part.label], answered)
        if part.verifier.runs == "remote":
            try:
                return self._servers.start(_ask_server, self._at_a_time, part, answered)
            except Closed:
                raise RuntimeError("the rewards are closed") from None
        return None

    def _at_once(self, part: Part, answers: Sequence[Answered]) -> list[Score]:
        if part.verifier.runs == "model":
            with self._rating:
                return self._raters[part.label](answers)
        return [judged(part.label, part.verifier, answered) for answered in answers]


async def _reach(client: httpx2.AsyncClient, verifier: Verifier) -> None:
    await verifier.reach(Client(client))


async def _ask_server(
    client: httpx2.AsyncClient, at_a_time: anyio.Semaphore, part: Part, answered: Answered
) -> Score:
    """The score of a verifier that asks a server; the time limit covers all attempts."""
    async with at_a_time:
        try:
            with anyio.fail_after(part.timeout):
                return scored(part.label, await part.verifier.ask(Client(client), answered))
        except TimeoutError as error:
            last = f"; the last: {error}" if str(error) else ""
            return Score(error=f"{part.label} had no answer within {part.timeout:g} s{last}")
        except Exception as error:  # noqa: BLE001 (what a server's answer leads to is counted and shown)
            return Score(error=reason(error))


def open_panel(
    rewards: str | Sequence[str | RewardSpec],
    config: PanelConfig | None = None,
    *,
    reserved: Sequence[str] = (),
    open_rater: OpenRater | None = None,
) -> Panel:
    """The panel of the rewards that a configuration names, once all of them are loaded.

    ``reserved``: names of other metrics, which no reward may have. ``open_rater``: loads a reward model in this
    process; without it ``reward_model`` is refused.
    """
    # what taut chooses for the user is chosen here and once, so that no two processes choose differently
    parts, decisions = [], dict[Decision, None]()
    for part in read_parts(rewards, reserved):
        verifier, decision = part.verifier.settled()
        parts.append(replace(part, verifier=verifier))
        if decision is not None:
            decisions[decision] = None
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
    panel = Panel(parts, PanelConfig() if config is None else config, raters, list(decisions))
    try:
        panel.require_loadable()
    except ConfigError:
        panel.close()
        raise
    return panel


def tally(verdicts: Sequence[Verdict]) -> dict[str, Tally]:
    """The Tally of each reward, by label."""
    totals = {}
    for label in verdicts[0].parts if verdicts else ():
        scores = [verdict.parts[label] for verdict in verdicts]
        values = [score.value for score in scores if score.value is not None]
        errors = tuple(score.error for score in scores if score.error is not None)
        mean = sum(values) / len(values) if values else None
        totals[label] = Tally(len(values), len(scores) - len(values) - len(errors), errors, mean)
    return totals
