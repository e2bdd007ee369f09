"""Prompts and an engine -> trajectories: paths from a prompt to its end, token for token as they were sampled.

    prompt ids | completion | environment's messages | completion | ...

Only sampled tokens are targets; what an environment adds is context. No token is tokenised again or rewritten.

Without an environment a trajectory is a prompt and its completion. With one, the next turns of all unfinished
trajectories are one call of the engine; then their environments answer in parallel, and the tokens that the template
writes between two turns are inserted (``turns.py``). A trajectory ends where its environment is done, where a
completion was cut (a half answer gets no reply), at the limits of turns, tokens or context, or with an error: then it
is not trained on.

Random streams are keyed by (seed, prompt id, index). With an environment the id of a turn's prompt is the row's id with
the sample's index and the turn, so that no trajectory depends on what happens to another. A caller that samples a
prompt again in another phase passes another seed.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from taut.data.messages import Message, Tool
from taut.data.prompts import PromptRow
from taut.data.tool_calls import ToolCall
from taut.errors import DataError, PictureError, RenderError
from taut.inference.engine import Engine, Sampling
from taut.rewards.panel import Verdict
from taut.rl.environment import Step, World, read_reset, read_reward, read_step
from taut.rl.turns import Rendered, moved
from taut.types import Completion, FinishReason, FloatArray, IntArray, Media, Prompt
from taut.vision.content import ImageRef

NO_VERDICT = Verdict({}, None)


@dataclass(frozen=True, eq=False, slots=True)
class Trajectory:
    """One path that was sampled from a prompt to its end. N counts its sampled tokens, in order."""

    row: PromptRow
    """The prompt, with its references."""
    index: int
    """Which of the prompt's samples, from 0."""
    ids_T: IntArray
    """Prompt, completions, and what the environment put between them."""
    sampled_at_N: IntArray
    """Ascending positions into ``ids_T``: what the policy chose."""
    logp_N: FloatArray
    """log-probability of each under the policy it was drawn from, as the engine says; NaN where it cannot."""
    version_N: IntArray
    """The step whose update the weights had that each was drawn from."""
    finish_reason: FinishReason
    """Of the last completion; length also where an environment's limit of turns or tokens cut the path."""
    text: str
    """Of the last completion, without what ended it: what verifiers read."""
    messages: tuple[Message, ...] = ()
    """The conversation after the prompt: the policy's turns and what the environment said, with tool calls."""
    num_turns: int = 1
    error: str | None = None
    """Why there is no completion to learn from, where finish_reason is error: the engine's or environment's words."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """What the environment itself said the path is worth, by name; empty: rewards judge it."""
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """The part of ``rewards`` that steps gave: (n, sum of the step's rewards), where sampled token n is the last of the
    turn that the step answered. What ``cut`` gave belongs to the whole path and is left out."""
    num_calls: int = 0
    """Calls of tools that the policy made."""
    num_malformed_calls: int = 0
    """Those of them that could not be read; the environment was told."""
    asked: tuple[Message, ...] | None = None
    """The messages that an environment's path began with; None: the row's prompt."""
    media: tuple[Media, ...] = ()
    """The pictures among the ids, ascending."""
    rollout: int = 0
    """The number of its rollout, from 0."""
    verdict: Verdict = NO_VERDICT
    """Its rewards by name, with their total."""

    @property
    def name(self) -> str:
        """Unique in a run."""
        return f"{self.row.id}#{self.index} of roll-out {self.rollout + 1}"

    @property
    def has_reward(self) -> bool:
        """Whether something can be learned from it: there is a completion, and it has a reward."""
        return self.error is None and self.verdict.total is not None

    @property
    def reward(self) -> float:
        """The total of its verdict."""
        assert self.verdict.total is not None, "the trajectory has no reward"
        return self.verdict.total

    @property
    def failure(self) -> str | None:
        """Where it has no reward because of an error: the first error, with the place of its row."""
        reason = self.error or self.verdict.error
        return None if reason is None else f"{self.row.place}#{self.index}: {reason}"

    @property
    def is_cut(self) -> bool:
        """Whether a limit ended it."""
        return self.finish_reason == "length"

    @property
    def version(self) -> int:
        """The oldest weights it was drawn from."""
        return int(self.version_N.min())


@dataclass(eq=False, slots=True)
class PartialTrajectory:
    """A trajectory while it is being sampled."""

    row: PromptRow
    index: int
    number: int
    """Its place among all that are played."""
    ids: list[int]
    media: tuple[Media, ...] = ()
    """The pictures among them, ascending."""
    environment: Any = None
    asked: tuple[Message, ...] = ()
    """The messages it began with."""
    tools: tuple[Tool, ...] = ()
    limit: int | None = None
    """Tokens it may have."""
    sampled: list[IntArray] = field(default_factory=list)
    """Of each turn, as the engine gave it."""
    sampled_at: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    num_turns: int = 0
    num_calls: int = 0
    num_malformed: int = 0
    text: str = ""
    finish: FinishReason | None = None
    """None while it goes on."""
    error: str | None = None

    @property
    def room(self) -> int | None:
        """Tokens it may still have."""
        return None if self.limit is None else self.limit - len(self.ids)

    @property
    def last(self) -> int:
        """The last token of its last turn; -1: that has none."""
        return int(self.sampled[-1][-1]) if self.sampled[-1].size else -1

    def prompt(self, turn: int) -> Prompt:
        """What its next turn continues."""
        name = f"{self.row.id}#{self.index}@{turn}"
        return Prompt(name, _integers(self.ids), self.room, self.media)

    def take(self, completion: Completion) -> None:
        """Append what was sampled. A path goes on only after a completion that ended by itself."""
        size = completion.ids_N.size
        logp_N = np.full(size, np.nan) if completion.logp_N is None else completion.logp_N
        self.sampled.append(completion.ids_N)
        self.sampled_at += range(len(self.ids), len(self.ids) + size)
        self.ids += completion.ids_N.tolist()
        self.logp += logp_N.tolist()
        self.version += [completion.version] * size
        self.text = completion.text
        self.num_turns += 1
        self.messages.append({"role": "assistant", "content": completion.text})
        if completion.finish_reason == "error":
            self.fail(completion.error or "the engine gives no reason")
        elif completion.finish_reason == "length":
            self.finish = "length"

    def fail(self, reason: str) -> None:
        """End it as an error: nothing is to be learned from it."""
        self.finish, self.error = "error", reason

    def earn(self, reward: Mapping[str, float]) -> None:
        """Add what the environment gave for a step, or for a cut."""
        for name, number in reward.items():
            self.rewards[name] = self.rewards.get(name, 0.0) + number

    def finished(self) -> Trajectory:
        """The trajectory. Asserts that its ids are those that were sampled."""
        assert self.finish is not None, f"{self.row.id}: the path has not ended"
        ids_T, at_N = _integers(self.ids), _integers(self.sampled_at)
        sampled_N = np.concatenate([_integers([]), *self.sampled])
        assert (ids_T[at_N] == sampled_N).all(), f"{self.row.id}: other ids than were sampled"
        return Trajectory(
            row=self.row,
            index=self.index,
            ids_T=ids_T,
            sampled_at_N=at_N,
            logp_N=_numbers(self.logp),
            version_N=_integers(self.version),
            finish_reason=self.finish,
            text=self.text,
            messages=tuple(self.messages),
            num_turns=self.num_turns,
            error=self.error,
            rewards=self.rewards,
            turn_rewards=tuple(self.turn_rewards),
            num_calls=self.num_calls,
            num_malformed_calls=self.num_malformed,
            asked=self.asked or None,
            media=self.media,
        )


def sample_trajectories(
    engine: Engine, rows: Sequence[PromptRow], sampling: Sampling, world: World | None = None
) -> list[Trajectory]:
    """``sampling.n`` trajectories of each row, in the order of rows and samples.

    Raises DataError for a row that is a text where there is an environment: it speaks in messages.
    """
    samples = [(row, index) for row in rows for index in range(sampling.n)]
    paths = [
        PartialTrajectory(row, index, number, row.ids_T.tolist(), row.media)
        for number, (row, index) in enumerate(samples)
    ]
    if world is None:
        prompts = [Prompt(row.id, row.ids_T, media=row.media) for row in rows]
        for path, completion in zip(paths, engine.generate(prompts, sampling), strict=True):
            path.take(completion)
            path.finish = path.finish or "stop"
    else:
        _play(engine, paths, sampling, world)
    return [path.finished() for path in paths]


def _play(
    engine: Engine, paths: Sequence[PartialTrajectory], sampling: Sampling, world: World
) -> None:
    """All turns of all paths."""
    _reset(paths, world)
    turn = 0
    while live := [path for path in paths if path.finish is None]:
        prompts = [path.prompt(turn) for path in live]
        drawn = engine.generate(prompts, replace(sampling, n=1))
        for path, completion in zip(live, drawn, strict=True):
            path.take(completion)
        _answer([path for path in live if path.finish is None], world)
        turn += 1
    cut = {path.number: partial(_cut, path) for path in paths if path.finish == "length"}
    for number, outcome in world.each(cut).items():
        if outcome.error is None:
            paths[number].earn(outcome.value)
        else:
            paths[number].fail(f"the environment's cut {outcome.error}")


def _reset(paths: Sequence[PartialTrajectory], world: World) -> None:
    """Give each path its environment, its first messages and their ids."""
    found = world.each({path.number: partial(_begin, path, world) for path in paths})
    known: dict[str, Rendered] = {}
    for path in paths:
        outcome = found[path.number]
        if outcome.error is not None:
            path.fail(f"the environment's reset {outcome.error}")
            continue
        try:
            _place(path, outcome.value, world, known)
        except (RenderError, PictureError) as error:
            path.fail(str(error))


def _place(
    path: PartialTrajectory,
    messages: tuple[Message, ...] | None,
    world: World,
    known: dict[str, Rendered],
) -> None:
    """Begin a path with these messages; None: with the row's. ``known``: ids of messages that were seen."""
    asked = path.row.prompt if messages is None else messages
    if isinstance(asked, str):
        raise DataError(
            f"{path.row.place}: the prompt is a text, and an environment speaks in messages; expected messages; give "
            "the row messages, or the environment a reset that makes them"
        )
    path.asked = asked
    path.tools = world.tools or path.row.tools
    if messages is not None or world.tools:
        key = json.dumps([asked, path.tools], default=_named)
        if key not in known:
            known[key] = world.bridge.prompt_media(asked, path.tools)
        ids, path.media = known[key]
        path.ids = list(ids)
    most = len(path.ids) + world.config.max_tokens
    path.limit = most if world.context is None else min(most, world.context)
    if len(path.ids) >= path.limit:
        path.fail(f"the prompt has {len(path.ids):,} tokens and the context is {path.limit:,}")


def _begin(path: PartialTrajectory, world: World) -> Any:
    path.environment = world.make()
    reset = getattr(path.environment, "reset", None)
    row = copy.deepcopy(dict(path.row.columns))  # no path sees what another has done to it
    return None if reset is None else read_reset(reset(row), path.row.place)


def _answer(paths: Sequence[PartialTrajectory], world: World) -> None:
    """Let each environment answer its path's turn."""
    jobs: dict[int, Callable[[], Step]] = {}
    for path in paths:
        jobs[path.number] = partial(_step, path, _calls(path, world))
    found = world.each(jobs)
    for path in paths:
        outcome = found[path.number]
        if outcome.error is not None:
            path.fail(f"the environment's step {outcome.error}")
        else:
            _go_on(path, outcome.value, world)


def _calls(path: PartialTrajectory, world: World) -> list[ToolCall]:
    """The calls in a path's last turn, which its message is told."""
    if world.calls is None:
        return []
    said, calls = world.calls.read(path.text, path.tools, first=path.num_calls)
    good = [call for call in calls if call.error is None]
    path.num_calls += len(calls)
    path.num_malformed += len(calls) - len(good)
    if good:
        path.messages[-1]["tool_calls"] = [call.as_message() for call in good]
        path.messages[-1]["content"] = said if len(good) == len(calls) else path.text
    return calls


def _step(path: PartialTrajectory, calls: list[ToolCall]) -> Step:
    return read_step(path.environment.step(path.text, calls), path.row.place)


def _cut(path: PartialTrajectory) -> Mapping[str, float]:
    cut = getattr(path.environment, "cut", None)
    return {} if cut is None else read_reward(cut(), path.row.place)


def _go_on(path: PartialTrajectory, step: Step, world: World) -> None:
    """Take an answer, and put what comes before the next turn after the path; or end it."""
    assert isinstance(step.reward, Mapping)
    path.earn(step.reward)
    if path.sampled_at and step.reward:
        path.turn_rewards.append((len(path.sampled_at) - 1, sum(step.reward.values())))
    history = (*path.asked, *path.messages)
    path.messages += step.messages
    if step.done:
        path.finish = "stop"
        return
    if path.num_turns == world.config.max_turns:
        path.finish = "length"
        return
    try:
        between, media = world.bridge.follows(history, step.messages, path.tools, path.last)
    except (RenderError, PictureError) as error:
        path.fail(str(error))
        return
    if path.limit is not None and len(path.ids) + len(between) >= path.limit:
        path.finish = "length"
    else:
        path.media += moved(media, len(path.ids))
        path.ids += between


def _named(picture: ImageRef) -> list[str]:
    value = picture.value
    return [picture.kind, value if isinstance(value, str) else hashlib.sha256(value).hexdigest()]


def _integers(values: Sequence[int]) -> IntArray:
    return np.asarray(values, dtype=np.int64)


def _numbers(values: Sequence[float]) -> FloatArray:
    return np.asarray(values, dtype=np.float64)
