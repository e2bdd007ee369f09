"""Environments: what answers the policy between its turns, ends a trajectory and rewards it.

    class Game:
        tools = [...]                               JSON schemas for the template; optional
        def reset(self, row: dict) -> list[dict]    the first messages; optional: the row's prompt
        def step(self, text: str, calls: list[ToolCall]) -> Step
        def cut(self) -> float | dict | None        the reward of a trajectory that a limit ended; optional: none

``rollout.environment.name`` is ``FILE.py:Game``, or ``tools`` for the built-in one. Each trajectory has an instance
of its own, made without arguments, which holds its state. Steps of different trajectories run side by side in
threads, each with a time limit. An exception or a timeout makes the trajectory an error with the reason, never a
reward of 0. A result of the wrong type (no Step, a text as the reward) stops the run at the first trajectory.

A reward is a number (True and False are 1 and 0), or numbers by name; the rewards of all steps are added. Where an
environment gives none, the run's rewards judge the trajectory.

The class is the user's own Python in this process; untrusted code belongs into a process or sandbox that it starts.
Under several ranks whose engine is asked by all, each rank steps its share of the trajectories.

Tools are a calculator, Python in the sandbox, and functions of the user's own. A function's schema is made by the
library from its type hints and docstring (Google style). The policy reads a tool's result as text, and also a
ValueError, TypeError, ArithmeticError or LookupError, since its arguments were wrong. Any other exception is a
fault of the tool, and the trajectory is an error.

User code runs in threads (``each``), and a thread cannot be ended from outside: a call that does not return in
time is abandoned and ends with the process.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Annotated, Any, NamedTuple, TypeAlias, cast

from pydantic import Field
from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from taut.config import Decision, configclass, home_path
from taut.data.chat_template import PROBE
from taut.data.json_io import shown
from taut.data.messages import Message, Tool, read_conversation, read_tools
from taut.data.messages import Tool as Schema
from taut.data.prompts import PromptRow
from taut.data.render import Renderer
from taut.data.tool_calls import CallFormat, ToolCall, derive_call_format
from taut.errors import CheckFailed, ConfigError, DataError, RenderError, TautError, UserCodeError
from taut.io.user_code import read_user_code
from taut.rewards.verifier import read_number
from taut.rl.turns import Bridge
from taut.sandbox import HERE, Limits, Remote, open_remote, run_python, shared
from taut.train.distributed import Ranks


class Outcome(NamedTuple):
    """What a call returned, or why it did not."""

    value: Any = None
    error: str | None = None


def each(
    jobs: Sequence[Callable[[], Any]],
    timeout: float,
    workers: int,
    on_late: Callable[[threading.Thread], None] = lambda thread: None,
) -> list[Outcome]:
    """The outcome of each call, in their order; ``workers`` at a time, ``timeout`` seconds each.

    ``on_late`` is told of each thread that is abandoned, at once: what it raises ends the calling.
    """
    found: dict[int, Outcome] = {}
    done: SimpleQueue[tuple[int, Outcome]] = SimpleQueue()
    deadlines: dict[int, float] = {}
    threads: dict[int, threading.Thread] = {}
    waiting = list(reversed(range(len(jobs))))
    while len(found) < len(jobs):
        while waiting and len(deadlines) < workers:
            number = waiting.pop()
            deadlines[number] = time.monotonic() + timeout
            job = (number, jobs[number], done)
            threads[number] = threading.Thread(target=_run, args=job, daemon=True)
            threads[number].start()
        try:
            left = min(deadlines.values()) - time.monotonic()
            number, outcome = done.get(timeout=max(left, 0.0))
        except Empty:
            number = min(deadlines, key=deadlines.__getitem__)
            outcome = Outcome(None, f"did not return within {timeout:g} s")
            on_late(threads[number])
        if deadlines.pop(number, None) is not None:  # else it is one given up before
            found[number] = outcome
    return [found[number] for number in range(len(jobs))]


def _run(number: int, job: Callable[[], Any], done: SimpleQueue[tuple[int, Outcome]]) -> None:
    try:
        outcome = Outcome(job())
    except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's code may raise anything; it is shown)
        reason = " ".join(f"raised {type(error).__name__}: {error}".split())
        outcome = Outcome(error=reason[:300])
    done.put((number, outcome))


# -- tools

MOST_SAID = 4000
"""Characters of what a tool returns that the policy is told."""
MOST_BITS = 4096
"""Integers that the calculator makes have no more."""
MOST_DIGITS = 300
"""Places that the calculator rounds to."""
LONGEST = 1000
"""Characters of what it is asked."""

LIMITS = Limits(cpu_seconds=5, wall_seconds=8.0, total_seconds=8.0)
"""Of a program that the policy runs."""
ENDS = {
    "time": f"the program took more than {LIMITS.wall_seconds:g} s",
    "cpu": f"the program took more than {LIMITS.cpu_seconds} s of processor time",
    "memory": f"the program took more than {LIMITS.memory_mb} MB",
    "output": f"the program printed more than {LIMITS.output_kb} kB",
    "crash": "the program crashed",
}

Number = int | float


class ToolFunction(NamedTuple):
    """A function, and how the template describes it."""

    schema: Schema
    function: Callable[..., Any]

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])


def least_timeout(remote: Remote) -> float:
    """Seconds of an environment's step in which a program that begins by half of them ends."""
    waiting = 0.0 if remote.service is None else remote.wait_seconds
    return 2 * (LIMITS.wall_seconds + waiting) + 1


def answer(kit: Mapping[str, ToolFunction], call: ToolCall) -> Message:
    """What the policy is told of a call."""
    return {
        "role": "tool",
        "tool_call_id": call.id,
        "name": call.name or "tool",
        "content": _said(kit, call),
    }


def _said(kit: Mapping[str, ToolFunction], call: ToolCall) -> str:
    if call.error is not None:
        return f"Error: {call.error}"
    if call.name not in kit:
        return f"Error: there is no tool {call.name}; there are {', '.join(kit)}"
    try:
        value = kit[call.name].function(**call.arguments)
    except TautError:
        raise
    except (ValueError, TypeError, ArithmeticError, LookupError) as error:
        return f"Error: {type(error).__name__}: {error}"[:MOST_SAID]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    left = len(text) - MOST_SAID
    return text if left <= 0 else f"{text[:MOST_SAID]}... ({left} characters more)"


def python(code: str) -> str:
    """
    Run a Python program in a sandbox and return what it prints. Nothing is kept from one program to the next.

    Args:
        code: The program. It prints what is to be returned.
    """
    return _run_python(code, HERE)


def _run_python(code: str, remote: Remote) -> str:
    """What the tool python returns."""
    ran = run_python(code, limits=LIMITS, remote=remote)
    if ran.outcome == "ok":
        return ran.stdout or "(nothing was printed)"
    what = ENDS.get(ran.outcome) or (ran.stderr.strip().splitlines() or ["the program failed"])[-1]
    return f"{ran.stdout}Error: {what}"


def calculator(expression: str) -> str:
    """
    Compute the value of an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % **, parentheses, pi, e, and abs, sqrt, exp, log, log10, sin, cos, tan,
            floor, ceil, round, min, max, gcd. Example: (3 + 4) * sqrt(2)
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has more than {LONGEST} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError("this is no arithmetic expression") from None
    try:
        return str(_value(tree.body))
    except RecursionError:
        raise ValueError("the expression is nested too deeply") from None


def _round(value: Number, *digits: Any) -> Number:
    """Python computes ten to the power of the digits, and lets nobody else run meanwhile."""
    if any(abs(number) > MOST_DIGITS for number in digits):
        raise ValueError(f"round takes {MOST_DIGITS} digits at most")
    found: Number = round(value, *digits)
    return found


OPERATORS: dict[type[ast.AST], Callable[..., Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
FUNCTIONS: dict[str, Callable[..., Number]] = {
    "abs": abs,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "log": math.log,
    "log10": math.log10,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "floor": math.floor,
    "ceil": math.ceil,
    "round": _round,
    "min": min,
    "max": max,
    "gcd": math.gcd,
}
CONSTANTS = {"pi": math.pi, "e": math.e}


def _value(node: ast.expr) -> Number:
    """The value of an expression: a walk over what is allowed, never ``eval``."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(operand))
        case ast.BinOp(op=ast.Pow(), left=left, right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(op=op, left=left, right=right) if type(op) in OPERATORS:
            return _bounded(OPERATORS[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            return _bounded(FUNCTIONS[name](*map(_value, args)))
    raise ValueError(f"{ast.unparse(node)[:80]} is no arithmetic")


def _power(base: Number, exponent: Number) -> Number:
    is_whole = isinstance(base, int) and isinstance(exponent, int)
    if is_whole and int(base).bit_length() * abs(exponent) > MOST_BITS:
        raise ValueError("the power is too large")
    found = base**exponent
    if isinstance(found, complex):
        raise ValueError("the power of a negative number is not real")
    return found


def _bounded(value: Number) -> Number:
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise ValueError("the number is too large")
    return value


TOOLS: dict[str, Callable[..., Any]] = {"calculator": calculator, "python": python}
"""name -> function. A new one is a line here."""


def load_tool(name: str, remote: Remote = HERE) -> ToolFunction:
    """The tool that a configuration names: ``calculator``, or ``FILE.py:function``. ``remote``: where python runs."""
    key = "rollout.environment.tools"
    if name not in TOOLS and ":" not in name:
        raise ConfigError(
            f"{key} has {name!r}; expected one of {', '.join(TOOLS)}, or FILE.py:function"
        )
    function = TOOLS[name] if name in TOOLS else load_own(name, key, "function")
    described = function
    if name == "python" and remote.service is not None:
        open_remote(remote, LIMITS).close()
        function = partial(_run_python, remote=remote)
    elif name == "python":
        shared()  # refused now where programs cannot be held
    try:
        return ToolFunction(get_json_schema(described), function)
    except (DocstringParsingException, TypeHintParsingException, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{key} has {name}, which cannot be described to a model: {reason}; expected type hints, and a docstring "
            "with a line for each argument below Args:; write them"
        ) from None


def load_own(spec: str, key: str, kind: str) -> Any:
    """The function or class that ``FILE.py:name`` names under ``key``."""
    path = home_path(spec.rpartition(":")[0])
    return read_user_code(spec, path, f"{key} is {spec}", kind).load()


# -- environments

Reward: TypeAlias = float | bool | Mapping[str, float | bool] | None
"""What an environment says a path is worth; None: nothing."""

REWARD = "environment"
"""The name of a reward that is a bare number."""
MOST_LATE = 32
"""When so many calls that were abandoned run beside the training, it is stopped."""


@configclass
class EnvironmentConfig:
    """What answers the policy between its turns."""

    name: str | None = None
    """tools: the tools named below. FILE.py:Class: one of your own. None by default: a completion is all there is."""
    tools: list[str] = field(default_factory=list)
    """With name=tools: calculator, python, or FILE.py:function with type hints and a docstring."""
    max_turns: Annotated[int, Field(ge=1)] = 8
    """Turns of the policy; a path that has had them is cut."""
    max_tokens: Annotated[int, Field(ge=1)] = 4096
    """Tokens a path may have after its prompt; then it is cut."""
    timeout: Annotated[float, Field(gt=0)] = 30.0
    """Seconds that reset and each step may take."""
    workers: Annotated[int, Field(ge=1)] = 16
    """Steps that run side by side."""
    remote: Remote = Remote()
    """A service that runs the programs of the tool python in place of this machine."""

    def __post_init__(self) -> None:
        if self.tools and self.name != "tools":
            raise ConfigError(
                f"rollout.environment.tools has {self.tools[0]} and rollout.environment.name is {self.name}; expected "
                "name=tools, for an environment of your own says itself which tools it has; set one of them"
            )
        if self.name == "tools" and not self.tools:
            raise ConfigError(
                "rollout.environment.name=tools and rollout.environment.tools is empty; expected at least one; set "
                'rollout.environment.tools=["calculator"]'
            )
        for key in ("max_turns", "max_tokens", "timeout", "workers"):
            if self.name is None and getattr(self, key) != getattr(EnvironmentConfig, key):
                raise ConfigError(
                    f"rollout.environment.{key} is {getattr(self, key)} and rollout.environment.name is not set: "
                    f"nothing reads it; expected an environment; set rollout.environment.name, or take {key} out"
                )
        if self.remote.service is not None and "python" not in self.tools:
            raise ConfigError(
                f"rollout.environment.remote.service is {self.remote.service} and rollout.environment.tools has no "
                "python: nothing reads it; expected that tool; add it, or take remote out"
            )
        least = least_timeout(self.remote)
        if "python" in self.tools and self.timeout < least:
            raise ConfigError(
                f"rollout.environment.timeout={self.timeout:g} with the tool python: a program may begin after half of "
                f"it and take {(least - 1) / 2:g} s; expected {least:g} or more; raise it"
            )

    @property
    def is_on(self) -> bool:
        return self.name is not None


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment answers."""

    messages: Sequence[Message] = ()
    """What is said to the policy: messages with role user, tool or system."""
    done: bool = False
    """Whether the path is over; else the policy has the next turn."""
    reward: Reward = None


@dataclass(frozen=True, eq=False)
class EnvironmentPool:
    """An environment that is ready: how its instances are made, and how their paths become tokens."""

    config: EnvironmentConfig
    make: Callable[[], Any]
    """A new instance."""
    bridge: Bridge
    calls: CallFormat | None
    """None: the template writes none, and no tools are on offer."""
    tools: tuple[Tool, ...]
    """On offer in every path; empty: a row's own are."""
    context: int | None
    ranks: Ranks | None
    decisions: tuple[Decision, ...] = ()
    late: list[Thread] = field(default_factory=list)
    """Of calls that were abandoned, those that still run."""

    def each(self, jobs: Mapping[int, Callable[[], Any]]) -> dict[int, Outcome]:
        """Call them all. A key is a path's number: the rank that has the path's environment is the one that calls.

        Raises UserCodeError, on every rank alike, where one returned something of the wrong type.
        """
        rank, size = (self.ranks.rank, self.ranks.size) if self.ranks is not None else (0, 1)
        mine = [number for number in jobs if number % size == rank]
        todo, config = [partial(_or_wrong_type, jobs[number]) for number in mine], self.config
        outcomes = each(todo, config.timeout, config.workers, self._abandon)
        found = dict(zip(mine, outcomes, strict=True))
        if self.ranks is not None and size > 1:
            shares: list[dict[int, Outcome]] = self.ranks.gather(found)
            found = {number: outcome for share in shares for number, outcome in share.items()}
        for number in sorted(found):
            if isinstance(error := found[number].value, UserCodeError):
                raise error
        return found

    def _abandon(self, thread: Thread) -> None:
        self.late[:] = [late for late in (*self.late, thread) if late.is_alive()]
        if len(self.late) >= MOST_LATE:
            raise CheckFailed(
                f"{len(self.late)} calls of the environment {self.config.name} did not return in time, and still run "
                "beside the training; expected them to return; correct it, or raise rollout.environment.timeout"
            )


def open_environments(
    config: EnvironmentConfig,
    renderer: Renderer,
    stop_ids: Collection[int],
    context: int | None = None,
    ranks: Ranks | None = None,
    *,
    rows: Sequence[PromptRow] = (),
    stop: Sequence[str] = (),
) -> EnvironmentPool | None:
    """The environment that ``config`` names; None where it names none.

    ``ranks``: where ``play`` is called by all of them; None: by one process. ``rows``: all that will be played.
    ``stop``: the texts that end a turn. Raises TautError where it cannot be had, or the template cannot carry it.
    """
    if config.name is None:
        return None
    make, offered = _maker(config)
    bridge = Bridge(renderer, stop_ids)
    place, on_offer = next(((f"{row.place}: ", row.tools) for row in rows if row.tools), ("", ()))
    if offered:
        place, on_offer = "", offered
    calls, said = _call_format(renderer, on_offer, place)
    if on_offer and calls is not None:
        _require_whole(calls, stop)
    _require_shown(renderer, offered)
    decisions = [*said, *_proofs(bridge, calls, on_offer)]
    return EnvironmentPool(config, make, bridge, calls, offered, context, ranks, tuple(decisions))


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
    """What a step returned, validated. Raises UserCodeError for a wrong type, DataError for what cannot be used."""
    if not isinstance(value, Step):
        raise UserCodeError(
            f"{place}: step returned {shown(value)} of type {type(value).__name__}; expected a Step; return "
            "Step(messages, done, reward) of taut.rl.environment"
        )
    _require_messages(value.messages, f"{place}: step")
    messages: tuple[Message, ...] = ()
    if value.messages:
        messages = read_conversation(list(value.messages), f"{place}: step").messages
    elif not value.done:
        raise DataError(f"{place}: step returned no messages and is not done; expected either")
    for message in messages:
        if message["role"] == "assistant":
            raise DataError(
                f"{place}: step returned an assistant message; expected what others say; return a user or tool message"
            )
        if message["role"] == "tool" and "tool_call_id" not in message:
            raise DataError(
                f"{place}: step returned a tool message without tool_call_id; expected the id of the call it answers"
            )
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


def _or_wrong_type(job: Callable[[], Any]) -> Any:
    """What the call returns. A UserCodeError is returned, not raised: it is no error of one path."""
    try:
        return job()
    except UserCodeError as error:
        return error


class ToolEnvironment:
    """Answers calls of tools until a turn has none; it gives no reward."""

    def __init__(self, kit: Mapping[str, ToolFunction], seconds: float) -> None:
        """``seconds``: a call that would begin later in a turn is not made, and the policy is told."""
        self.kit, self.seconds = kit, seconds

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


def _maker(config: EnvironmentConfig) -> tuple[Callable[[], Any], tuple[Tool, ...]]:
    """How instances are made, and the tools they have."""
    if config.name == "tools":
        loaded = [load_tool(name, config.remote) for name in config.tools]
        kit = {tool.name: tool for tool in loaded}
        if len(kit) < len(config.tools):
            raise ConfigError(
                f"rollout.environment.tools has {', '.join(config.tools)}, two of one name; expected each once; "
                "rename one"
            )
        return partial(ToolEnvironment, kit, config.timeout / 2), tuple(
            tool.schema for tool in kit.values()
        )
    assert config.name is not None
    found = load_own(config.name, "rollout.environment.name", "class")
    if not isinstance(found, type) or not callable(getattr(found, "step", None)):
        raise ConfigError(
            f"rollout.environment.name is {config.name}, which is no class with a method step; expected one; write it"
        )
    return found, read_tools(getattr(found, "tools", None), f"{config.name}: tools")


def _call_format(
    renderer: Renderer, offered: Sequence[Tool], place: str
) -> tuple[CallFormat | None, list[Decision]]:
    """How the template writes calls; it has to where tools are on offer. ``place``: of the row that offers them."""
    try:
        calls = derive_call_format(renderer.template)
    except RenderError as error:
        if offered:
            raise RenderError(f"{place}{error}") from None
        reason = str(error).partition(";")[0]
        return None, [Decision("tool calls", "none are read", reason)]
    return calls, [
        Decision("tool calls", " ".join(calls.example.split()), "as the template writes a call")
    ]


def _require_whole(calls: CallFormat, stop: Sequence[str]) -> None:
    """No stop string cuts a call."""
    for text in stop:
        if text in calls.example:
            raise ConfigError(
                f"rollout.stop has {shown(text)}, which is part of a call as the chat template writes it "
                f"({shown(calls.example.strip())}): no call would be whole; expected other texts; take it out"
            )


def _require_shown(renderer: Renderer, offered: Sequence[Tool]) -> None:
    """The template shows the policy every tool there is."""
    text = renderer.template.apply(PROBE[:1], offered, "the probe", is_prompt=True).text
    for tool in offered:
        name = tool["function"]["name"]
        if name not in text:
            raise RenderError(
                f"the chat template does not write the tool {shown(name)}; expected one that shows the policy what it "
                f"may call; give another with {renderer.template.key}=FILE"
            )


def _proofs(bridge: Bridge, calls: CallFormat | None, offered: Sequence[Tool]) -> list[Decision]:
    """That what comes between turns is what the template writes there: after words, and after a call."""
    turn: Message = {"role": "assistant", "content": "Yes."}
    pairs: list[tuple[Message, Message]] = [(turn, {"role": "user", "content": "And then?"})]
    if calls is not None and offered:
        call = ToolCall("call00000", offered[0]["function"]["name"], {"text": "one"})
        asks: Message = {**turn, "content": "", "tool_calls": [call.as_message()]}
        says = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": "two"}
        pairs = [(asks, says), *pairs]
    written = [bridge.rewrites(turn, said, offered) for turn, said in pairs]
    other = next((text for text in written if text is not None), None)
    if other is None:
        return [Decision("history", "as sampled", "the template leaves earlier turns as they are")]
    reason = (
        f"the template would write earlier turns differently (from {other} on); what was sampled is kept, since that "
        "is what the policy saw"
    )
    return [Decision("history", "as sampled", reason)]
