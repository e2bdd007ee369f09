"""Tools that the policy calls: a calculator, functions of the user's own or of packages, MCP servers.

A function's schema is made by the library from its type hints and docstring (Google style). The policy reads a tool's
result as text, and also a ValueError, TypeError, ArithmeticError or LookupError, since its arguments were wrong. Any
other exception is a fault of the tool, and the trajectory is an error.

A function that has to be opened before the run, as the tool ``python`` of taut_tools/sandbox, has an attribute
``open_tool``: a function of ``rollout.environment.remote``. It returns the function that is called, and a decision for
the run log or None; it raises a TautError where the tool cannot be used.
"""

from __future__ import annotations

import ast
import asyncio
import json
import math
import operator
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from taut.config import Decision, home_path
from taut.data.rows.messages import Message
from taut.data.rows.messages import Tool as Schema
from taut.data.rows.tool_calls import ToolCall
from taut.errors import ConfigError, TautError, UserCodeError
from taut.io import plugins
from taut.io.user_code import find_code
from taut.rl.settings import HERE, MCP, TOOL_ENTRY_POINTS, Remote

MAX_RESULT = 4000
"""Characters of a tool's result that the policy gets."""
MOST_BITS = 4096
"""Bits of the calculator's largest integer."""
MOST_DIGITS = 300
"""Places that the calculator rounds to."""
LONGEST = 1000
"""Characters of an expression."""

Number = int | float


class ToolFunction(NamedTuple):
    """A function, and how the template describes it."""

    schema: Schema
    function: Callable[..., Any]
    decision: Decision | None = None
    """As ``open_tool`` returned it."""

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])


def answer(kit: Mapping[str, ToolFunction], call: ToolCall) -> Message:
    """The message with the result of a call, or with its error."""
    if call.error is not None:
        text = f"Error: {call.error}"
    elif call.name not in kit:
        text = f"Error: there is no tool {call.name}; there are {', '.join(kit)}"
    else:
        try:
            value = awaited_value(kit[call.name].function(**call.arguments))
        except TautError:
            raise
        except (ValueError, TypeError, ArithmeticError, LookupError) as error:
            text = f"Error: {type(error).__name__}: {error}"[:MAX_RESULT]
        else:
            is_text = isinstance(value, str)
            text = value if is_text else json.dumps(value, ensure_ascii=False, default=_as_text)
            left = len(text) - MAX_RESULT
            text = text if left <= 0 else f"{text[:MAX_RESULT]}... ({left} characters more)"
    name = call.name or "tool"
    return {"role": "tool", "tool_call_id": call.id, "name": name, "content": text}


def awaited_value(value: Any) -> Any:
    """Await what a function returned, if needed; the first items of a generator become a list."""

    async def awaited() -> Any:
        return await value

    if isinstance(value, Awaitable):
        return awaited_value(asyncio.run(awaited()))
    return list(islice(value, MAX_RESULT)) if isinstance(value, Iterator) else value


def _as_text(value: Any) -> str:
    """The text of what is no JSON. Raises UserCodeError for an object that has none of its own."""
    text = str(value)
    is_bare = re.search(rf"\A<([\w.]+\.)?{type(value).__name__}\b| at 0x[0-9a-f]+>", text)
    if callable(value) or is_bare:
        raise UserCodeError(
            f"a tool returned {text:.80}, which says nothing to the policy; expected a text, or what JSON holds; "
            "return what matters of it"
        )
    return text


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
    """``round`` with few digits: Python computes ten to the power of them, and no other thread runs meanwhile."""
    if any(abs(number) > MOST_DIGITS for number in digits):
        raise ValueError(f"round takes {MOST_DIGITS} digits at most")
    rounded: Number = round(value, *digits)
    return rounded


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
            base, exponent = _value(left), _value(right)
            is_whole = isinstance(base, int) and isinstance(exponent, int)
            if is_whole and int(base).bit_length() * abs(exponent) > MOST_BITS:
                raise ValueError("the power is too large")
            power = base**exponent
            if isinstance(power, complex):
                raise ValueError("the power of a negative number is not real")
            return power
        case ast.BinOp(op=op, left=left, right=right) if type(op) in OPERATORS:
            return _bounded(OPERATORS[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            return _bounded(FUNCTIONS[name](*map(_value, args)))
    raise ValueError(f"{ast.unparse(node)[:80]} is no arithmetic")


def _bounded(value: Number) -> Number:
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise ValueError("the number is too large")
    return value


TOOLS: dict[str, Callable[..., Any]] = {"calculator": calculator}
"""name -> function. A new one is a line here."""


@dataclass(frozen=True)
class Kit:
    """The tools of an environment, and the servers that have some of them."""

    functions: Mapping[str, ToolFunction]
    servers: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """End the servers."""
        self.servers.close()

    @property
    def decisions(self) -> list[Decision]:
        """Decisions that were made when its tools were opened."""
        return [tool.decision for tool in self.functions.values() if tool.decision is not None]


def open_tools(names: Sequence[str], remote: Remote, seconds: float) -> Kit:
    """The tools that a configuration names. ``remote``: where programs run. ``seconds``: time limit of a server's call.

    Raises ConfigError where one cannot be used, or where two have one name.
    """
    tools: list[ToolFunction] = []
    with ExitStack() as servers:
        for name in names:
            if not name.startswith(MCP):
                tools.append(load_tool(name, remote))
                continue
            connect = plugins.adapter("mcp", f"rollout.environment.tools has {name}, which")
            server = servers.enter_context(closing(connect(name.removeprefix(MCP), seconds)))
            tools += server.tools
        functions = {tool.name: tool for tool in tools}
        if len(functions) < len(tools):
            raise ConfigError(
                f"rollout.environment.tools has {', '.join(names)}, two of one name; expected each once; rename one"
            )
        return Kit(functions, servers.pop_all())


def load_tool(name: str, remote: Remote = HERE) -> ToolFunction:
    """The tool that a configuration names, opened. ``remote``: where programs run."""
    tool = describe_tool(name)
    opener = getattr(tool.function, "open_tool", None)
    return tool if opener is None else ToolFunction(tool.schema, *opener(remote))


def describe_tool(name: str) -> ToolFunction:
    """The tool that a configuration names: ``calculator``, a package's, or ``FILE.py:function``. Nothing is opened."""
    key = "rollout.environment.tools"
    function = TOOLS.get(name) or load_own(name, key, "function", TOOL_ENTRY_POINTS)
    if function is None:
        known = ", ".join([*TOOLS, *plugins.names(TOOL_ENTRY_POINTS)])
        raise ConfigError(
            f"{key} has {name!r}; expected one of {known}, FILE.py:function or mcp:COMMAND"
        )
    try:
        return ToolFunction(get_json_schema(function), function)
    except (DocstringParsingException, TypeHintParsingException, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{key} has {name}, which cannot be described to a model: {reason}; expected type hints, and a docstring "
            "with a line for each argument below Args:; write them"
        ) from None


def schemas_of(names: Sequence[str], seconds: float) -> tuple[Schema, ...]:
    """How templates describe these tools, in the order of ``open_tools``. A server is asked and closed again; nothing
    is opened for programs to run in.
    """
    schemas: list[Schema] = []
    for name in names:
        if not name.startswith(MCP):
            schemas.append(describe_tool(name).schema)
            continue
        kit = open_tools([name], HERE, seconds)
        kit.close()
        schemas += [tool.schema for tool in kit.functions.values()]
    return tuple(schemas)


def load_own(spec: str, key: str, kind: str, group: str) -> Any:
    """The function or class that is named under ``key``, as ``FILE.py:name`` or as a package adds it, or None."""
    code = find_code(spec, home_path(spec.rpartition(":")[0]), group, f"{key} is {spec}", kind)
    return None if code is None else code.load()
