"""Environments, which answer the policy between its turns, end a trajectory and reward it.

    class Game:
        tools = [...]                               JSON schemas for the template; optional
        def reset(self, row: dict) -> list[dict]    the first messages; optional: the row's prompt
        def step(self, text: str, calls: list[ToolCall]) -> Step
        def cut(self) -> float | dict | None        the reward of a trajectory that a limit ended; optional: none
        follows_prompt = True                       the messages of reset come after the row's prompt; optional: False

``rollout.environment.name`` is ``FILE.py:Game``, ``tools`` for the built-in one, ``gym:ENV_ID``, or an agent, which is
another thing (``environments/agent.py``), as is ``verifiers:ENV_ID``. Each trajectory has an instance of its own, made
without arguments, which holds its state. Steps of different trajectories run side by side in threads, each with a time
limit. An exception or a timeout makes the trajectory an error with the reason, never a reward of 0. A result of the
wrong type (no Step, a text as the reward) stops the run at the first trajectory.

A reward is a number (True and False are 1 and 0), or numbers by name; the rewards of all steps are added. Where an
environment gives none, the run's rewards judge the trajectory.

The class is the user's own Python in this process; untrusted code belongs into a process or sandbox that it starts.
Under several ranks whose engine is asked by all, each rank steps its share of the trajectories.

Tools (``environments/tools.py``) are a calculator, functions of packages (Python in the sandbox) and of the user's own,
and those of MCP servers. Adapters to other libraries are in taut_tools/adapters, one file each, which is imported where
an environment of the library is loaded.

User code runs in threads (``each``), and a thread cannot be ended from outside: a call that does not return in
time is abandoned and ends with the process.
"""

from __future__ import annotations

import copy
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, TypeAlias, cast

from taut.config import Decision
from taut.data.read.json_io import shown
from taut.data.render.render import Renderer
from taut.data.rows.messages import Message, Tool, read_conversation, read_tools
from taut.data.rows.prompts import PromptRow
from taut.data.rows.tool_calls import CallFormat, ToolCall, derive_call_format
from taut.errors import CheckFailed, ConfigError, DataError, RenderError, UserCodeError
from taut.io import plugins
from taut.rewards.verifier import read_number
from taut.rl.environments.agent import GRACE, Agents
from taut.rl.environments.chat_endpoint import IGNORED
from taut.rl.environments.tools import Kit, ToolFunction, answer, load_own, open_tools, schemas_of
from taut.rl.forks import NO_FORKS, copied
from taut.rl.settings import (
    AGENT,
    ENVIRONMENT_COLUMN,
    ENVIRONMENT_ENTRY_POINTS,
    GYM,
    VERIFIERS,
    EnvironmentConfig,
    ForkConfig,
)
from taut.rl.turns import Bridge
from taut.train.distributed import Ranks

Reward: TypeAlias = float | bool | Mapping[str, float | bool] | None
"""The reward of a step, a number or numbers by name; None: the step has no reward."""

REWARD = "environment"
"""The name of a reward that is a bare number."""
MOST_LATE = 32
"""Number of abandoned calls that still run at which the training stops."""


class Outcome(NamedTuple):
    """The value that a call returned, or its error."""

    value: Any = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """An environment's answer to a turn."""

    messages: Sequence[Message] = ()
    """Messages to the policy, with role user, tool or system."""
    done: bool = False
    """Whether the trajectory is over; else the policy has the next turn."""
    reward: Reward = None


class Kind(NamedTuple):
    """One of the environments of a run."""

    make: Callable[[], Any]
    """A new instance."""
    tools: tuple[Tool, ...] = ()
    """Tools of every trajectory; empty where each row has its own."""
    is_agent: bool = False
    """Whether it asks the policy by itself."""


@dataclass(frozen=True, eq=False)
class EnvironmentPool:
    """A loaded environment: makes an instance for each trajectory, and calls the instances in threads."""

    config: EnvironmentConfig
    make: Callable[[], Any]
    """A new instance."""
    bridge: Bridge
    calls: CallFormat | None
    """The form in which the template writes tool calls. None: it writes none, and there are no tools."""
    tools: tuple[Tool, ...]
    """Tools of every trajectory; empty where each row has its own."""
    context: int | None
    ranks: Ranks | None
    decisions: tuple[Decision, ...] = ()
    late: list[Thread] = field(default_factory=list)
    """Threads of abandoned calls that still run."""
    sources: Sequence[Kit | Agents] = ()
    """Its parts that have to be closed."""
    by_row: Mapping[str, Kind] = field(default_factory=dict)
    """Several environments, by the name that rows have; then ``make`` and ``tools`` are of none."""
    fork: ForkConfig = NO_FORKS

    @property
    def kinds(self) -> list[Kind]:
        """Its environments."""
        return [*self.by_row.values()] or [self._only]

    def kind_of(self, row: PromptRow) -> Kind:
        """The environment of a row."""
        return self.by_row[row.columns[ENVIRONMENT_COLUMN]] if self.by_row else self._only

    @property
    def _only(self) -> Kind:
        return Kind(self.make, self.tools, bool(self.config.agents))

    def close(self) -> None:
        """End the servers of its tools, and its agents."""
        for source in self.sources:
            source.close()

    def each(self, jobs: Mapping[int, Callable[[], Any]]) -> dict[int, Outcome]:
        """The outcome of each call: ``config.workers`` at a time, ``config.timeout`` seconds each. A key is the number
        of a trajectory: the rank that has its environment calls.

        Raises UserCodeError, on every rank, where a call returned a value of the wrong type.
        """
        done: SimpleQueue[tuple[int, Outcome]] = SimpleQueue()
        calls = Calls(self, lambda *call: done.put(call))
        ranks, leaves = self.ranks, self.fork.leaves
        for number in jobs:  # a rank also has the environments that its trajectories fork into
            if ranks is None or number // leaves % ranks.size == ranks.rank:
                calls.start(number, jobs[number])
        outcomes: dict[int, Outcome] = {}
        while calls.is_busy:
            try:
                number, outcome = done.get(timeout=calls.left)
            except Empty:
                number, outcome = calls.overdue()
            if calls.take(number):
                outcomes[number] = outcome
        if ranks is not None and ranks.size > 1:
            shares: list[dict[int, Outcome]] = ranks.gather(outcomes)
            outcomes = {number: outcome for share in shares for number, outcome in share.items()}
        for number in sorted(outcomes):
            if isinstance(error := outcomes[number].value, UserCodeError):
                raise error
        return outcomes

    def require_copies(self, row: PromptRow | None) -> None:
        """Raise UserCodeError where the environment of this row, once it is reset, cannot be copied for a fork. What
        else fails with it is no matter here.
        """

        def act() -> None:
            assert row is not None
            environment = self.kind_of(row).make()
            if (reset := getattr(environment, "reset", None)) is not None:
                reset(copy.deepcopy(dict(row.columns)))
            copied(environment)

        if row is not None:
            self.each({0: act})

    def abandon(self, thread: Thread) -> None:
        """Leave a call that is late to itself. Raises CheckFailed where too many are."""
        self.late[:] = [late for late in (*self.late, thread) if late.is_alive()]
        if len(self.late) >= MOST_LATE:
            raise CheckFailed(
                f"{len(self.late)} calls of the environment {self.config.name} did not return in time, and still run "
                "during training; expected them to return; correct it, or raise rollout.environment.timeout"
            )


@dataclass(frozen=True, slots=True)
class AgentCall:
    """A call of an agent, which keeps to its own time limit and then takes some time to end."""

    act: Callable[[], Any]

    def __call__(self) -> Any:
        return self.act()


class Calls:
    """Calls of environments as they come, one at a time of each trajectory: ``config.workers`` of them at a time, each
    in a thread, each within ``config.timeout`` seconds, those of agents ``GRACE`` more. Used by one thread; ``put`` is
    called from the others with the number of a trajectory and the outcome of its call.
    """

    def __init__(self, pool: EnvironmentPool, put: Callable[[int, Outcome], object]) -> None:
        self._pool, self._put = pool, put
        self._waiting: deque[tuple[int, Callable[[], Any]]] = deque()
        self._running: dict[int, tuple[Thread, float, float]] = {}
        """The thread of a call, when it is late, and the seconds that it has."""

    @property
    def is_busy(self) -> bool:
        """Whether a call was started and not taken."""
        return bool(self._running)

    @property
    def left(self) -> float | None:
        """Seconds until the first call is late; None: none runs."""
        late = min((late for _, late, _ in self._running.values()), default=None)
        return None if late is None else max(late - time.monotonic(), 0.0)

    def start(self, number: int, act: Callable[[], Any]) -> None:
        """Begin a call as soon as there is room for it."""
        self._waiting.append((number, act))
        self._fill()

    def take(self, number: int) -> bool:
        """Whether the outcome of this call counts; not so where the call was late. Makes room for the next."""
        is_awaited = self._running.pop(number, None) is not None
        self._fill()
        return is_awaited

    def overdue(self) -> tuple[int, Outcome]:
        """The call that is late, to be taken; its thread is left to itself."""
        number = min(self._running, key=lambda number: self._running[number][1])
        thread, _, seconds = self._running[number]
        self._pool.abandon(thread)
        return number, Outcome(error=f"did not return within {seconds:g} s")

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._pool.config.workers:
            number, act = self._waiting.popleft()
            thread = Thread(target=self._run, args=(number, act), daemon=True)
            seconds = self._pool.config.timeout + (GRACE if isinstance(act, AgentCall) else 0.0)
            self._running[number] = thread, time.monotonic() + seconds, seconds
            thread.start()

    def _run(self, number: int, act: Callable[[], Any]) -> None:
        try:
            outcome = Outcome(act())
        except UserCodeError as error:  # the run's error, not that of one trajectory
            outcome = Outcome(error)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's code may raise anything; it is shown)
            reason = " ".join(f"raised {type(error).__name__}: {error}".split())
            outcome = Outcome(error=reason[:300])
        self._put(number, outcome)


def offered_tools(
    config: EnvironmentConfig,
) -> Callable[[Mapping[str, Any]], tuple[Tool, ...]]:
    """Columns of a row -> the tools that its environment gives every trajectory. Those of an agent are not known before
    it asks.
    """
    found = dict.fromkeys(config.names, schemas_of(config.tools, config.timeout / 2))
    for spec in found:
        if spec != "tools":
            is_own = not spec.startswith((AGENT, GYM, VERIFIERS))
            found[spec] = _load(spec, config, {}).tools if is_own else ()

    def tools_of(columns: Mapping[str, Any]) -> tuple[Tool, ...]:
        name = str(columns.get(ENVIRONMENT_COLUMN))
        return found.get(config.by_row.get(name, "") if config.by_row else str(config.name), ())

    return tools_of


def open_environments(
    config: EnvironmentConfig,
    renderer: Renderer,
    stop_ids: Collection[int],
    context: int | None = None,
    ranks: Ranks | None = None,
    *,
    rows: Sequence[PromptRow] = (),
    stop: Sequence[str] = (),
    fork: ForkConfig = NO_FORKS,
) -> EnvironmentPool | None:
    """The environment that ``config`` names; None where it names none.

    ``ranks``: those that sample together; None: one process. ``rows``: all prompts of the run. ``stop``: the texts that
    end a turn. Raises TautError where the environment cannot be loaded, or the template cannot write its messages.
    """
    if not config.is_on:
        return None
    sources: dict[str, Kit | Agents] = {}
    try:
        if config.tools:
            sources["tools"] = open_tools(config.tools, config.remote, config.timeout / 2)
        for name in config.agents:
            of_it = [key for key, value in config.by_row.items() if value == name]
            own = [row for row in rows if not of_it or row.columns.get(ENVIRONMENT_COLUMN) in of_it]
            if not name.startswith(VERIFIERS):
                spec = name.removeprefix(AGENT)
                sources[name] = Agents(spec, config.timeout, config=config.agent)
                continue
            play = plugins.adapter("verifiers", f"rollout.environment.name={name}")
            agent = play(name.removeprefix(VERIFIERS), config.options, own)
            sources[name] = Agents(name, config.timeout, agent, agent.close, config.agent)
        return _opened(config, sources, renderer, stop_ids, context, ranks, rows, stop, fork)
    except BaseException:
        for source in sources.values():
            source.close()
        raise


def _opened(
    config: EnvironmentConfig,
    sources: Mapping[str, Kit | Agents],
    renderer: Renderer,
    stop_ids: Collection[int],
    context: int | None,
    ranks: Ranks | None,
    rows: Sequence[PromptRow],
    stop: Sequence[str],
    fork: ForkConfig,
) -> EnvironmentPool:
    # the environments, and the tools that they offer
    by_row = {name: _load(spec, config, sources) for name, spec in config.by_row.items()}
    if by_row:
        _require_names(by_row, rows)
        tools_of_all = [tool for kind in by_row.values() for tool in kind.tools]
        make, offered = next(iter(by_row.values())).make, tuple(tools_of_all)
    else:
        assert config.name is not None
        make, offered, _ = _load(config.name, config, sources)
    if begun := next((row for row in rows if row.beginning), None):
        raise DataError(
            f"{begun.place}: the prompt ends with the beginning of an answer, and rollout.environment answers whole "
            "turns; expected a user or tool message at its end; take the assistant message out of prompt"
        )
    # the form in which the template writes their calls
    bridge, template = Bridge(renderer, stop_ids), renderer.template
    place, tools = next(((f"{row.place}: ", row.tools) for row in rows if row.tools), ("", ()))
    if offered:
        place, tools = "", offered
    calls: CallFormat | None = None
    try:
        calls = derive_call_format(template)
    except RenderError as error:
        if tools:
            raise RenderError(f"{place}{error}") from None
        decision = Decision("tool calls", "none are read", str(error).partition(";")[0])
    else:
        example = " ".join(calls.example.split())
        decision = Decision("tool calls", example, "as the template writes a call")
    for text in stop:
        if tools and calls is not None and text in calls.example:
            raise ConfigError(
                f"rollout.stop has {shown(text)}, a part of {shown(calls.example.strip())}, as the chat template "
                "writes a call: no call would be whole; expected other texts; take it out"
            )
    bridge.require_tools(offered)
    # what was decided
    decisions = [decision, _history(bridge, calls, tools)]
    decisions += [it for kit in sources.values() if isinstance(kit, Kit) for it in kit.decisions]
    if config.agents:
        ignored = ", ".join(IGNORED[:5])
        reason = f"what is trained on is its distribution; {ignored}, ... of a request are not read"
        decisions.append(Decision("the agent's sampling", "the rollout's", reason))
        agents = (source for source in sources.values() if isinstance(source, Agents))
        decisions += dict.fromkeys(agent.decision for agent in agents)
    if by_row:
        counts = Counter(row.columns[ENVIRONMENT_COLUMN] for row in rows)
        shares = ", ".join(f"{name}: {counts[name]:,} rows" for name in by_row)
        decisions.append(Decision("environments", shares, "by the rows' column environment"))
        offered = ()
    pool = EnvironmentPool(
        *(config, make, bridge, calls, offered, context, ranks, tuple(decisions)),
        sources=[*sources.values()],
        by_row=by_row,
        fork=fork,
    )
    # a fork copies each kind of environment
    if fork.is_on and fork.state == "copy":
        for name in by_row or [""]:
            of_kind = (row for row in rows if not by_row or row.columns[ENVIRONMENT_COLUMN] == name)
            pool.require_copies(next(of_kind, None))
    return pool


def _require_names(by_row: Mapping[str, Kind], rows: Sequence[PromptRow]) -> None:
    """Raise DataError for a row without one of these environments, ConfigError for one without rows."""
    for row in rows:
        name = row.columns.get(ENVIRONMENT_COLUMN)
        if not isinstance(name, str) or name not in by_row:
            raise DataError(
                f"{row.place}: {ENVIRONMENT_COLUMN} is {shown(name)}; expected one of "
                f"{', '.join(by_row)} (rollout.environment.by_row); correct the row, or name its environment"
            )
    named = {row.columns[ENVIRONMENT_COLUMN] for row in rows}
    if unused := next((name for name in by_row if rows and name not in named), None):
        raise ConfigError(
            f"rollout.environment.by_row has {unused}, which no row names in its column {ENVIRONMENT_COLUMN}; "
            "expected rows for each; take it out, or add rows"
        )


def _history(bridge: Bridge, calls: CallFormat | None, tools: Sequence[Tool]) -> Decision:
    """Whether the tokens between turns are those that the template writes there: after words, and after a call."""
    turn: Message = {"role": "assistant", "content": "Yes."}
    pairs: list[tuple[Message, Message]] = [(turn, {"role": "user", "content": "And then?"})]
    if calls is not None and tools:
        call = ToolCall("call00000", tools[0]["function"]["name"], {"text": "one"})
        calling: Message = {**turn, "content": "", "tool_calls": [call.as_message()]}
        result = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": "two"}
        pairs = [(calling, result), *pairs]
    written = [bridge.rewrites(turn, reply, tools) for turn, reply in pairs]
    other = next((text for text in written if text is not None), None)
    reason = "the template leaves earlier turns as they are"
    if other is not None:
        reason = (
            f"the template would write earlier turns differently (from {other} on); what was sampled is kept, since "
            "that is what the policy saw"
        )
    return Decision("history", "as sampled", reason)


def read_reset(value: object, place: str) -> tuple[Message, ...] | None:
    """The first messages; None: the row's prompt. Raises UserCodeError for another type, DataError for messages that
    cannot be used.
    """
    if value is None:
        return None
    if not isinstance(value, str):  # a text may be messages as JSON
        _require_messages(value, f"{place}: reset")
    messages = read_conversation(value, f"{place}: reset").messages
    if messages[-1]["role"] not in ("user", "tool"):
        raise DataError(
            f"{place}: reset ends with a message of role {messages[-1]['role']}; expected a user or tool message, "
            "for the policy to answer"
        )
    return messages


def read_step(value: object, place: str) -> Step:
    """Validate the value of a step. Raises UserCodeError for a wrong type, DataError for an unusable value."""
    if not isinstance(value, Step):
        raise UserCodeError(
            f"{place}: step returned {shown(value)} of type {type(value).__name__}; expected a Step; return "
            "Step(messages, done, reward) of taut.rl.environment"
        )
    _require_messages(value.messages, f"{place}: step")
    messages: tuple[Message, ...] = ()
    if value.messages:
        messages = read_conversation(list(value.messages), f"{place}: step").messages
    problem = ""
    if not messages and not value.done:
        problem = "no messages and is not done; expected either"
    elif any(message["role"] == "assistant" for message in messages):
        problem = "an assistant message; expected what others say; return a user or tool message"
    elif any(m["role"] == "tool" and "tool_call_id" not in m for m in messages):
        problem = "a tool message without tool_call_id; expected the id of the call it answers"
    if problem:
        raise DataError(f"{place}: step returned {problem}")
    return Step(messages, bool(value.done), read_reward(value.reward, place))


def read_reward(value: object, place: str) -> Mapping[str, float]:
    """A reward, by name. Raises UserCodeError for what is no number, DataError for one that is not finite."""
    if value is None:
        return {}
    named: Mapping[Any, Any] = value if isinstance(value, Mapping) else {REWARD: value}
    for name in named:
        if not isinstance(name, str):
            raise UserCodeError(
                f"{place}: found a reward by the name {shown(name)}; expected a text; rename it"
            )
    return {
        name: read_number(number, f"{place}: the reward {name!r} of the environment")
        for name, number in named.items()
    }


def _require_messages(value: object, place: str) -> None:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if not (
        is_list and all(isinstance(message, Mapping) for message in cast(Sequence[Any], value))
    ):
        raise UserCodeError(
            f"{place} returned {shown(value)} of type {type(value).__name__} as messages; expected a list of objects "
            "with role and content; correct the environment"
        )


class ToolEnvironment:
    """Answers calls of tools until a turn has none; it gives no reward."""

    def __init__(self, kit: Mapping[str, ToolFunction], seconds: float) -> None:
        """``seconds``: a call that would begin later in a turn is not made; its result is an error."""
        self.kit, self.seconds = kit, seconds

    def __deepcopy__(self, memo: object) -> ToolEnvironment:
        """Itself: it has no state."""
        return self

    def step(self, text: str, calls: list[ToolCall]) -> Step:
        """One message of role tool for each call, in their order."""
        if not calls:
            return Step(done=True)
        late = time.monotonic() + self.seconds
        messages = []
        for call in calls:
            if time.monotonic() > late and call.error is None:
                call = replace(call, error="the time of this turn is up; the call was not made")
            messages.append(answer(self.kit, call))
        return Step(messages)


def _load(name: str, config: EnvironmentConfig, sources: Mapping[str, Kit | Agents]) -> Kind:
    """The environment of this name."""
    source = sources.get(name)
    if isinstance(source, Agents):
        return Kind(source.start, is_agent=True)
    if name == "tools":
        assert source is not None, "the configuration has tools"
        schemas = tuple(tool.schema for tool in source.functions.values())
        return Kind(partial(ToolEnvironment, source.functions, config.timeout / 2), schemas)
    if name.startswith(GYM):
        load_gymnasium = plugins.adapter("gym", f"rollout.environment.name={name}")
        return Kind(load_gymnasium(name.removeprefix(GYM), config.options))
    found = load_own(name, "rollout.environment.name", "class", ENVIRONMENT_ENTRY_POINTS)
    problem = ""
    if found is None:
        known = ", ".join(["tools", *plugins.names(ENVIRONMENT_ENTRY_POINTS)])
        problem = f"; expected {known}, FILE.py:class, gym:ENV_ID, verifiers:ENV_ID or agent:COMMAND; correct it"
    elif not isinstance(found, type) or not callable(getattr(found, "step", None)):
        problem = ", which is no class with a method step; expected one; write it"
    if problem:
        raise ConfigError(f"rollout.environment.name is {name}{problem}")
    return Kind(found, read_tools(getattr(found, "tools", None), f"{name}: tools"))
