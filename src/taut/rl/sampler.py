"""Trajectories: paths from a prompt to its end, token for token as an engine sampled them.

    prompt ids | completion | environment's messages | completion | ...

Only sampled tokens are targets; tokens of an environment are context. No token is tokenized again or rewritten.

Without an environment a trajectory is a prompt and its completion. With an environment, turns of the policy alternate
with the environment's answers, and the template's tokens are between them (``turns.py``). A trajectory ends where its
environment is done, where a completion was cut (a half answer gets no reply), at the limits of turns, tokens or
context, or with an error: then it is not trained on.

With ``rollout.fork`` a trajectory may continue as several at the end of a turn (``forks.py``).

With an agent (``environments/agent.py``) a trajectory has all requests of the agent until it ends: conversations, which
may branch and begin anew (``conversations.py``). Its path is the one with the newest answer; ``branches`` has the
tokens that were sampled elsewhere.

The engine in this process computes the next turns of all trajectories as one batch, once all environments have
answered (``sample_trajectories``), and of each turn only the tokens that are new. A server gets each turn as soon as
its trajectory has come to it (rollout_queue.py). For both a trajectory is a coroutine: ``begin`` makes it, and
``resume`` gives it the result that it waited for.

Random streams are keyed by (seed, prompt id, index). With an environment the id of a turn's prompt is the row's id with
the sample's index and the turn, so that trajectories do not depend on each other. A caller that samples a prompt again
in another phase passes another seed.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from taut.data.rows.messages import Message, Tool
from taut.data.rows.prompts import PromptRow
from taut.data.rows.tool_calls import ToolCall
from taut.errors import DataError, PictureError, RenderError
from taut.inference.engine import Engine
from taut.inference.local import conversation
from taut.inference.settings import Sampling
from taut.rewards.reward_set import RewardResult
from taut.rl.conversations import Conversations, Path
from taut.rl.environment import (
    AgentCall,
    EnvironmentPool,
    Outcome,
    Step,
    read_reset,
    read_reward,
    read_step,
)
from taut.rl.environments.agent import Ended, Next, Refusal
from taut.rl.environments.chat_endpoint import Asked, ChatAnswer
from taut.rl.forks import copied, replayed
from taut.rl.turns import Rendered, moved
from taut.types import Completion, FinishReason, FloatArray, IntArray, Media, Prompt
from taut.vision.content import ImageRef

NO_REWARD = RewardResult({}, None)


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
    """The engine's logprob of each sampled token; NaN where the engine gives none."""
    version_N: IntArray
    """The version of the weights that sampled each token: the step of their last update."""
    finish_reason: FinishReason
    """Of the last completion; length also where an environment's limit of turns or tokens cut the path."""
    text: str
    """Of the last completion, without its end token: the text that verifiers read."""
    messages: tuple[Message, ...] = ()
    """The conversation after the prompt: the policy's turns with their tool calls, and the environment's messages."""
    num_turns: int = 1
    error: str | None = None
    """The engine's or environment's reason where finish_reason is error."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """The environment's rewards, by name; empty: it gives none."""
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """Rewards that are assigned to turns, as (n, reward). Sampled token n is the last one of a turn that
    an environment's step answered, or of a step of the answer that a reward charges (``step_rewards.py``). The reward
    of ``cut`` belongs to the whole path and is left out."""
    num_calls: int = 0
    """Tool calls of the policy."""
    num_malformed_calls: int = 0
    """Tool calls that could not be read."""
    first_messages: tuple[Message, ...] | None = None
    """The messages that an environment began with; None: the row's prompt."""
    media: tuple[Media, ...] = ()
    """The pictures among the ids, ascending."""
    branches: tuple[Path, ...] = ()
    """The other paths of an agent's conversations, each with the sampled tokens that no earlier one has."""
    num_conversations: int = 1
    """Conversations that an agent began."""
    num_edited: int = 0
    """Conversations that begin like an earlier one whose history the agent has edited."""
    forks: tuple[int, ...] = ()
    """Number of tokens that had been sampled at each fork of its path."""
    num_inherited: int = 0
    """Number of sampled tokens that it shares with the trajectory it forked from; all if that ended before the fork."""
    part: int = 0
    """Which of ``parts`` it is; 0: it is whole."""
    rollout: int = 0
    """The number of its rollout, from 0."""
    reward_result: RewardResult = NO_REWARD
    """Its rewards by name, with their total."""

    @property
    def name(self) -> str:
        """Unique in a run."""
        part = f", branch {self.part}" if self.part else ""
        return f"{self.row.id}#{self.index} of rollout {self.rollout + 1}{part}"

    @property
    def parts(self) -> list[Trajectory]:
        """The trajectory and its branches, as trajectories of one path each: the paths to train on."""
        branches = [
            replace(
                self,
                part=number,
                branches=(),
                media=(),
                ids_T=branch.ids_T,
                sampled_at_N=branch.sampled_at_N,
                logp_N=branch.logp_N,
                version_N=branch.version_N,
            )
            for number, branch in enumerate(self.branches, 1)
        ]
        return [self, *branches]

    @property
    def has_reward(self) -> bool:
        """Whether something can be learned from it: there is a completion, and it has a reward."""
        return self.error is None and self.reward_result.total is not None

    @property
    def reward(self) -> float:
        """The total of its rewards."""
        assert self.reward_result.total is not None, "the trajectory has no reward"
        return self.reward_result.total

    @property
    def failure(self) -> str | None:
        """The first error that left it without a reward, with the place of its row; None: there is none."""
        reason = self.error or self.reward_result.error
        return None if reason is None else f"{self.row.place}#{self.index}: {reason}"

    def judged(self, reward_result: RewardResult) -> Trajectory:
        """Return the trajectory with its rewards; steps that the rewards charge count as turns."""
        turn_rewards = (*self.turn_rewards, *reward_result.turn_rewards)
        return replace(self, reward_result=reward_result, turn_rewards=turn_rewards)

    @property
    def is_cut(self) -> bool:
        """Whether a limit ended it."""
        return self.finish_reason == "length"

    @property
    def version(self) -> int:
        """The version of the oldest weights that sampled it."""
        versions = [self.version_N, *(branch.version_N for branch in self.branches)]
        return min(int(version_N.min()) for version_N in versions)

    @property
    def num_sampled(self) -> int:
        """Sampled tokens, those of its branches included."""
        return self.sampled_at_N.size + sum(b.sampled_at_N.size for b in self.branches)


@dataclass(eq=False, slots=True)
class PartialTrajectory:
    """A trajectory while it is being sampled."""

    row: PromptRow
    index: int
    number: int
    """Its place among all that are sampled in one call."""
    ids: list[int]
    leaves: int = 1
    """Trajectories that it may still become by forks; the places after its own are theirs."""
    media: tuple[Media, ...] = ()
    """The pictures among the ids, ascending."""
    environment: Any = None
    first_messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    limit: int | None = None
    """Maximum number of tokens."""
    sampled: list[IntArray] = field(default_factory=list)
    """Of each turn, as the engine gave it."""
    sampled_at: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    """Of the last turn."""
    num_turns: int = 0
    num_calls: int = 0
    num_malformed: int = 0
    branches: tuple[Path, ...] = ()
    num_conversations: int = 1
    num_edited: int = 0
    text: str = ""
    forks: tuple[int, ...] = ()
    """Number of tokens that had been sampled at each fork."""
    num_inherited: int = 0
    """Number of sampled tokens that it shares with the trajectory it forked from."""
    asked: list[tuple[str, list[ToolCall]]] = field(default_factory=list)
    """Turns that the environment answered: text and calls of each."""
    heard: list[Any] = field(default_factory=list)
    """Return values of the environment: of reset, then of each step."""
    finish: FinishReason | None = None
    error: str | None = None

    def fork(self, n: int) -> list[PartialTrajectory]:
        """Continue as n trajectories that share the leaves equally. Return the n - 1 new ones, without environments."""
        places = range(self.leaves // n, self.leaves, self.leaves // n)
        self.leaves //= n
        self.forks = (*self.forks, len(self.sampled_at))
        return [
            replace(
                self,
                index=self.index + place,
                number=self.number + place,
                ids=[*self.ids],
                environment=None,
                sampled=[*self.sampled],
                sampled_at=[*self.sampled_at],
                logp=[*self.logp],
                version=[*self.version],
                messages=[*self.messages],
                rewards=dict(self.rewards),
                turn_rewards=[*self.turn_rewards],
                num_inherited=len(self.sampled_at),
                asked=[*self.asked],
                heard=[*self.heard],
            )
            for place in places
        ]

    def prompt(self) -> Prompt:
        """The prompt of its next turn."""
        name = f"{self.row.id}#{self.index}@{self.num_turns}"
        room = None if self.limit is None else self.limit - len(self.ids)
        return Prompt(name, np.array(self.ids, np.int64), room, self.media)

    def take(self, completion: Completion) -> None:
        """Append a completion. Only after one that ended by itself does the trajectory go on."""
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

    def adopt(self, conversations: Conversations) -> None:
        """Take the conversations of an agent as its paths."""
        first, *others = conversations.paths()
        newest = conversations.answers[-1]
        root = newest.question.root
        self.ids, self.sampled_at = first.ids_T.tolist(), first.sampled_at_N.tolist()
        self.sampled = [first.ids_T[first.sampled_at_N]]
        self.logp, self.version = first.logp_N.tolist(), first.version_N.tolist()
        self.first_messages, self.tools = root.messages, root.tools
        said = (*newest.question.messages, newest.message)
        self.messages = list(said[len(root.messages) :])
        self.text = newest.completion.text
        self.branches = tuple(others)
        self.num_turns, self.num_calls = len(conversations.answers), conversations.num_calls
        self.num_malformed, self.num_edited = conversations.num_malformed, conversations.num_edited
        self.num_conversations = conversations.num_roots

    def fail(self, reason: str) -> None:
        """End it as an error: nothing is learned from it."""
        self.finish, self.error = "error", reason

    def earn(self, reward: Mapping[str, float]) -> None:
        """Add the environment's reward for a step, or for a cut."""
        for name, number in reward.items():
            self.rewards[name] = self.rewards.get(name, 0.0) + number

    def finished(self) -> list[Trajectory]:
        """Return the trajectory once for each of its leaves: if it ended before a fork, it stands for all of them.
        Asserts that its ids are the sampled ones.
        """
        assert self.finish is not None, f"{self.row.id}: the path has not ended"
        ids_T, at_N = np.array(self.ids, np.int64), np.array(self.sampled_at, np.int64)
        sampled_N = np.concatenate([np.array([], np.int64), *self.sampled])
        assert (ids_T[at_N] == sampled_N).all(), f"{self.row.id}: other ids than were sampled"
        trajectory = Trajectory(
            row=self.row,
            index=self.index,
            ids_T=ids_T,
            sampled_at_N=at_N,
            logp_N=np.array(self.logp, np.float64),
            version_N=np.array(self.version, np.int64),
            finish_reason=self.finish,
            text=self.text,
            messages=tuple(self.messages),
            num_turns=self.num_turns,
            error=self.error,
            rewards=self.rewards,
            turn_rewards=tuple(self.turn_rewards),
            num_calls=self.num_calls,
            num_malformed_calls=self.num_malformed,
            first_messages=self.first_messages or None,
            media=self.media,
            branches=self.branches,
            num_conversations=self.num_conversations,
            num_edited=self.num_edited,
            forks=self.forks,
            num_inherited=self.num_inherited,
        )
        # once for each leaf
        others = range(self.index + 1, self.index + self.leaves)
        return [
            trajectory,
            *(replace(trajectory, index=index, num_inherited=at_N.size) for index in others),
        ]


def roots(
    row: PromptRow, n: int, environments: EnvironmentPool | None, first: int
) -> list[PartialTrajectory]:
    """The paths with which a row begins; forks make n trajectories of them. ``first``: number of the first one."""
    leaves = 1 if environments is None else environments.fork.leaves
    return [
        PartialTrajectory(row, index, first + index, row.ids_T.tolist(), leaves, row.media)
        for index in range(0, n, leaves)
    ]


def sample_trajectories(
    engine: Engine,
    rows: Sequence[PromptRow],
    sampling: Sampling,
    environments: EnvironmentPool | None = None,
) -> list[Trajectory]:
    """Sample ``sampling.n`` trajectories of each row, in the order of rows and samples. Each call of the engine has the
    next turns of all that wait for one, and computes them as one batch.

    Raises DataError for a row that is a text where there is an environment: an environment needs messages.
    """
    n = sampling.n
    begun = [roots(row, n, environments, number * n) for number, row in enumerate(rows)]
    paths = {path.number: path for of_row in begun for path in of_row}
    # Without environments: one call.
    if environments is None:
        prompts = [Prompt(row.id, row.ids_T, media=row.media) for row in rows]
        completions = engine.generate(prompts, sampling)
        for path, completion in zip(paths.values(), completions, strict=True):
            path.take(completion)
            path.finish = path.finish or "stop"
        return [trajectory for path in paths.values() for trajectory in path.finished()]
    # With environments: each trajectory is a coroutine that waits for a call of its environment, or for the engine.
    rendered: dict[str, Rendered] = {}
    courses = {number: begin(path, environments, rendered) for number, path in paths.items()}
    results: dict[int, Completion | Outcome | None] = dict.fromkeys(courses)
    waiting: dict[int, Prompt] = {}
    with conversation(engine):
        while True:
            # Resume every trajectory that has its result.
            calls: dict[int, Call] = {}
            while results:
                number = next(iter(results))
                match resume(courses[number], results.pop(number)):
                    case Prompt() as prompt:
                        waiting[number] = prompt
                    case None:
                        pass
                    case list() as forked:
                        for path in forked:
                            paths[path.number] = path
                            courses[path.number] = begin(path, environments, rendered)
                        results |= dict.fromkeys((number, *(path.number for path in forked)))
                    case call:
                        calls[number] = call
            # Call the environments; once none has a call, ask the engine for the next turns.
            if calls:
                results = {**environments.each(calls)}
            elif waiting:
                in_order = sorted(waiting)
                completions = engine.generate(
                    [waiting[number] for number in in_order], replace(sampling, n=1)
                )
                results, waiting = dict(zip(in_order, completions, strict=True)), {}
            else:
                ended = [paths[number] for number in sorted(paths)]
                return [trajectory for path in ended for trajectory in path.finished()]


def first_prompts(rows: Sequence[PromptRow], environments: EnvironmentPool) -> list[Prompt | str]:
    """Return the first prompt of each row, from its environment or agent; where that fails, the reason."""
    prompts: list[Prompt | str] = []
    for number, row in enumerate(rows):
        path = PartialTrajectory(row, 0, number, row.ids_T.tolist(), media=row.media)
        course = begin(path, environments, {})
        wanted = resume(course, None)
        while wanted is not None and not isinstance(wanted, Prompt | list):
            wanted = resume(course, environments.each({number: wanted})[number])
        prompts.append(wanted if isinstance(wanted, Prompt) else path.error or "nothing is asked")
        course.close()
    return prompts


# -- the course of a trajectory

Call: TypeAlias = Callable[[], Any]
"""Calls an environment."""
Course: TypeAlias = Generator[Prompt | Call | list[PartialTrajectory], Any, None]
"""Yields what a trajectory waits for, one after another: a prompt, for its completion, or a call, for its outcome. A
list has the trajectories that it has forked into, to be begun beside it, and waits for nothing."""


def begin(
    path: PartialTrajectory, environments: EnvironmentPool | None, rendered: dict[str, Rendered]
) -> Course:
    """A trajectory from its first message, or from a fork, to its end, as a coroutine. ``rendered``: the ids of
    messages that were rendered before.
    """
    if environments is None:
        return _alone(path)
    if environments.kind_of(path.row).is_agent:
        return _with_agent(path, environments)
    return _with_environment(path, environments, rendered)


def resume(
    course: Course, result: Completion | Outcome | None
) -> Prompt | Call | list[PartialTrajectory] | None:
    """Continue a trajectory, and return what it waits for next, or has forked into; None: it has ended. ``result``: of
    what it waited for.
    """
    try:
        return course.send(result)
    except StopIteration:
        return None


def _alone(path: PartialTrajectory) -> Course:
    """One completion."""
    path.take((yield Prompt(path.row.id, path.row.ids_T, media=path.row.media)))
    path.finish = path.finish or "stop"


def _with_environment(
    path: PartialTrajectory, environments: EnvironmentPool, rendered: dict[str, Rendered]
) -> Course:
    """Alternate turns of the policy and the answers of its environment."""

    fork = environments.fork

    def reset(environment: Any) -> Any:
        act = getattr(environment, "reset", None)
        row = copy.deepcopy(dict(path.row.columns))  # a trajectory may change its copy
        return None if act is None else read_reset(act(row), path.row.place)

    def step(environment: Any, text: str, calls: list[ToolCall]) -> Step:
        return read_step(environment.step(text, [*calls]), path.row.place)

    def make() -> Any:
        return environments.kind_of(path.row).make()

    def start() -> Any:
        path.environment = make()
        return reset(path.environment)

    def replay() -> Any:
        steps = (partial(step, text=text, calls=calls) for text, calls in path.asked)
        return replayed([reset, *steps], path.heard, make())

    def share(forked: Sequence[PartialTrajectory]) -> None:
        for other in forked:
            is_copy = fork.state == "copy"
            other.environment = copied(path.environment) if is_copy else replay()

    def cut() -> Mapping[str, float]:
        act = getattr(path.environment, "cut", None)
        return {} if act is None else read_reward(act(), path.row.place)

    def follow(what: str, outcome: Outcome, act: Callable[[Any], None]) -> None:
        """Continue with the value of a call; a trajectory whose call failed ends."""
        if outcome.error is not None:
            path.fail(f"the environment's {what} {outcome.error}")
            return
        try:
            act(outcome.value)
        except (RenderError, PictureError) as error:
            path.fail(str(error))

    # the first messages; then turns, each answered by the environment, until one of them ends
    if path.num_turns == 0:
        follow("reset", (yield start), lambda said: _open(path, said, environments, rendered))
    while path.finish is None:
        path.take((yield path.prompt()))
        if path.finish is None:
            _read_calls(path, environments)
            act = partial(step, path.environment, path.text, path.calls)
            follow("step", (yield act), lambda said: _continue(path, said, environments))
        # a fork: other paths go on beside this one
        if path.finish is None and path.num_turns in fork.turns:
            forked = path.fork(fork.n)
            follow("copy", (yield partial(share, forked)), lambda _: None)
            for other in forked:
                other.finish, other.error = path.finish, path.error  # where there was no copy
            yield forked
    if path.finish == "length":
        follow("cut", (yield cut), path.earn)


def _with_agent(path: PartialTrajectory, environments: EnvironmentPool) -> Course:
    """Answer the requests of an agent, one after another, until it ends or has had its turns."""
    conversations = Conversations(environments.bridge, environments.calls)
    config = environments.config

    def start() -> Next:
        path.environment = environments.kind_of(path.row).make()
        return read_next(path.environment.begin(copy.deepcopy(dict(path.row.columns))))

    def reply(answer: ChatAnswer | Refusal) -> Next:
        return read_next(path.environment.reply(answer))

    def read_next(found: Next) -> Next:
        if isinstance(found.event, Asked):
            return found
        reward = read_reward(found.event.reward, f"{path.row.place}: the agent")
        return Next(Ended(reward, found.event.error), found.was_read)

    outcome: Outcome = yield AgentCall(start)
    while path.finish is None:
        if outcome.error is not None:
            path.fail(f"the agent {outcome.error}")
            break
        # the end of the agent, or its next request
        event, was_read = outcome.value
        if not was_read:
            conversations.forget()
        if isinstance(event, Ended):
            path.earn(event.reward)
            path.finish = "stop"
            if event.error is not None:
                path.fail(f"the agent {event.error}")
            elif not conversations.answers:
                path.fail("the agent ended and had no answer of the policy")
        elif len(conversations.answers) == config.max_turns:
            path.finish = "length"
        else:
            path.num_turns += 1
            answer: ChatAnswer | Refusal
            try:
                question = conversations.ask(event.messages, event.tools)
            except (RenderError, DataError) as error:
                answer = Refusal(str(error))
            else:
                limit = len(question.root.ids) + config.max_tokens
                limit = min(limit, environments.context or limit)
                room = limit - len(question.ids)
                if room > 0:
                    ids_T = np.array(question.ids, np.int64)
                    name = f"{path.row.id}#{path.index}@{path.num_turns - 1}"
                    completion = yield Prompt(name, ids_T, min(room, event.max_tokens or room))
                    if completion.finish_reason == "error":
                        path.fail(completion.error or "the engine gives no reason")
                        break
                    given = conversations.answer(question, completion)
                    size, is_cut = completion.ids_N.size, completion.finish_reason == "length"
                    answer = ChatAnswer(given.message, is_cut, len(question.ids), size)
                else:
                    answer = Refusal(
                        f"messages: found {len(question.ids):,} tokens; expected less than {limit:,}, by the model's "
                        "context and rollout.environment.max_tokens; send a shorter history"
                    )
            outcome = yield AgentCall(partial(reply, answer))
    yield AgentCall(lambda: path.environment.end())
    if conversations.answers:
        path.adopt(conversations)
        is_cut = conversations.answers[-1].completion.finish_reason == "length"
        path.finish = "length" if path.finish == "stop" and is_cut else path.finish


def _open(
    path: PartialTrajectory,
    messages: tuple[Message, ...] | None,
    environments: EnvironmentPool,
    rendered: dict[str, Rendered],
) -> None:
    """Begin a trajectory with these messages; None: with the row's. ``rendered``: the ids of messages that were
    rendered before.
    """
    first = path.row.prompt
    if messages is not None:
        follows = getattr(path.environment, "follows_prompt", False)
        first = joined(first, messages) if follows and not isinstance(first, str) else messages
    problem = ""
    if isinstance(first, str):
        problem = (
            "the prompt is a text, and an environment speaks in messages; expected messages; give the row messages, or "
            "the environment a reset that makes them"
        )
    elif path.row.template_variables:
        problem = (
            "the row's source has chat_template_kwargs of its own; expected equal ones for all rows of an environment; "
            "set data.chat_template_kwargs instead"
        )
    if problem or isinstance(first, str):
        raise DataError(f"{path.row.place}: {problem}")
    path.heard.append(messages)
    path.first_messages = first
    # the ids: the row's own, unless messages or tools are others
    tools = environments.kind_of(path.row).tools
    path.tools = tools or path.row.tools
    if messages is not None or path.tools != path.row.tools:
        key = json.dumps([first, path.tools], default=_picture_key)
        if key not in rendered:
            rendered[key] = environments.bridge.prompt_media(first, path.tools)
        ids, path.media = rendered[key]
        path.ids = list(ids)
    most = len(path.ids) + environments.config.max_tokens
    path.limit = most if environments.context is None else min(most, environments.context)
    if len(path.ids) >= path.limit:
        path.fail(f"the prompt has {len(path.ids):,} tokens and the context is {path.limit:,}")


def joined(prompt: Sequence[Message], messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages after the prompt's. Two texts of the user become one, for templates that take turns strictly."""
    last, first = prompt[-1], messages[0]
    contents = [message["content"] for message in (last, first) if message["role"] == "user"]
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == 2:
        both = {**last, "content": "\n\n".join(texts)}
        return (*prompt[:-1], both, *messages[1:])
    return (*prompt, *messages)


def _picture_key(picture: ImageRef) -> list[str]:
    value = picture.value
    return [picture.kind, value if isinstance(value, str) else hashlib.sha256(value).hexdigest()]


def _read_calls(path: PartialTrajectory, environments: EnvironmentPool) -> None:
    """Set the tool calls of a trajectory's last turn; its message gets those that can be read."""
    if environments.calls is None:
        return
    text, calls = environments.calls.read(path.text, path.tools, first=path.num_calls)
    good = [call for call in calls if call.error is None]
    path.num_calls += len(calls)
    path.num_malformed += len(calls) - len(good)
    if good:
        path.messages[-1]["tool_calls"] = [call.as_message() for call in good]
        path.messages[-1]["content"] = text if len(good) == len(calls) else path.text
    path.calls = calls


def _continue(path: PartialTrajectory, step: Step, environments: EnvironmentPool) -> None:
    """Append the environment's answer and the tokens up to the next turn, or end the trajectory."""
    assert isinstance(step.reward, Mapping)
    path.asked.append((path.text, path.calls))
    path.heard.append(step)
    path.earn(step.reward)
    if path.sampled_at and step.reward:
        path.turn_rewards.append((len(path.sampled_at) - 1, sum(step.reward.values())))
    history = (*path.first_messages, *path.messages)
    path.messages += step.messages
    if step.done:
        path.finish = "stop"
        return
    if path.num_turns == environments.config.max_turns:
        path.finish = "length"
        return
    last = int(path.sampled[-1][-1]) if path.sampled[-1].size else -1
    between, media = environments.bridge.follows(history, step.messages, path.tools, last)
    if path.limit is not None and len(path.ids) + len(between) >= path.limit:
        path.finish = "length"
    else:
        path.media += moved(media, len(path.ids))
        path.ids += between
