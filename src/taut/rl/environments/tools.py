"""Tools that the policy calls: a calculator, Python in the sandbox, functions of the user's own, MCP servers.

A function's schema is made by the library from its type hints and docstring (Google style). The policy reads a tool's
result as text, and also a ValueError, TypeError, ArithmeticError or LookupError, since its arguments were wrong. Any
other exception is a fault of the tool, and the trajectory is an error.
"""

from __future__ import annotations

import ast
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from taut.config import home_path
from taut.data.messages import Message
from taut.data.messages import Tool as Schema
from taut.data.tool_calls import ToolCall
from taut.errors import ConfigError, TautError
from taut.extras import require
from taut.io.user_code import read_user_code
from taut.sandbox import HERE, Limits, Remote, open_remote, run_python, shared

if TYPE_CHECKING:
    from taut.rl.environments.mcp import McpServer

MCP = "mcp:"
"""Before the command or URL of an MCP server."""
MAX_RESULT = 4000
"""Characters of a tool's result that the policy gets."""
MOST_BITS = 4096
"""Bits of the calculator's largest integer."""
MOST_DIGITS = 300
"""Places that the calculator rounds to."""
LONGEST = 1000
"""Characters of an expression."""

LIMITS = Limits(cpu_seconds=5, wall_seconds=8.0, total_seconds=8.0)
"""Limits of a program that the policy runs."""
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


def answer(kit: Mapping[str, ToolFunction], call: ToolCall) -> Message:
    """The message with the result of a call, or with its error."""
    if call.error is not None:
        text = f"Error: {call.error}"
    elif call.name not in kit:
        text = f"Error: there is no tool {call.name}; there are {', '.join(kit)}"
    else:
        try:
            value = kit[call.name].function(**call.arguments)
        except TautError:
            raise
        except (ValueError, TypeError, ArithmeticError, LookupError) as error:
            text = f"Error: {type(error).__name__}: {error}"[:MAX_RESULT]
        else:
            is_text = isinstance(value, str)
            text = value if is_text else json.dumps(value, ensure_ascii=False, default=str)
            left = len(text) - MAX_RESULT
            text = text if left <= 0 else f"{text[:MAX_RESULT]}... ({left} characters more)"
    name = call.name or "tool"
    return {"role": "tool", "tool_call_id": call.id, "name": name, "content": text}


def python(code: str) -> str:
    """
    Run a Python program in a sandbox and return what it prints. Nothing is kept from one program to the next.

    Args:
        code: The program. It prints what is to be returned.
    """
    return _run_python(code, HERE)


def _run_python(code: str, remote: Remote) -> str:
    """The result of the tool python."""
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


TOOLS: dict[str, Callable[..., Any]] = {"calculator": calculator, "python": python}
"""name -> function. A new one is a line here."""


@dataclass(frozen=True)
class Kit:
    """The tools of an environment, and the servers that have some of them."""

    functions: Mapping[str, ToolFunction]
    servers: Sequence[McpServer] = ()

    def close(self) -> None:
        """End the servers."""
        for server in self.servers:
            server.close()


def open_tools(names: Sequence[str], remote: Remote, seconds: float) -> Kit:
    """The tools that a configuration names. ``remote``: where python runs. ``seconds``: time limit of a server's call.

    Raises ConfigError where one cannot be used, or where two have one name.
    """
    tools: list[ToolFunction] = []
    servers: list[McpServer] = []
    try:
        for name in names:
            if not name.startswith(MCP):
                tools.append(load_tool(name, remote))
                continue
            require("mcp", f"rollout.environment.tools has {name}, which")
            from taut.rl.environments.mcp import McpServer

            servers.append(McpServer(name.removeprefix(MCP), seconds))
            tools += servers[-1].tools
        functions = {tool.name: tool for tool in tools}
        if len(functions) < len(tools):
            raise ConfigError(
                f"rollout.environment.tools has {', '.join(names)}, two of one name; expected each once; rename one"
            )
    except BaseException:
        Kit({}, servers).close()
        raise
    return Kit(functions, servers)


def load_tool(name: str, remote: Remote = HERE) -> ToolFunction:
    """The tool that a configuration names: ``calculator``, or ``FILE.py:function``. ``remote``: where python runs."""
    key = "rollout.environment.tools"
    if name not in TOOLS and ":" not in name:
        raise ConfigError(
            f"{key} has {name!r}; expected one of {', '.join(TOOLS)}, FILE.py:function or mcp:COMMAND"
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
