"""Tools that a policy may call: a calculator, Python in the sandbox, and functions of the user's own.

A function's schema, which the template shows to the policy, is made from its type hints and docstring (Google style) by
the library. What a tool returns is told to the policy as text. So is what it raises of ValueError, TypeError,
ArithmeticError and LookupError: its arguments were wrong. Anything else, a sandbox that is not to be had among it, is a
fault of the tool, and the path an error.

May import data, errors and sandbox. ``environment.py`` imports it.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import operator
import sys
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from taut.config import home_path
from taut.data.formats import Message
from taut.data.formats import Tool as Schema
from taut.data.tool_calls import ToolCall
from taut.errors import ConfigError, TautError
from taut.sandbox import HERE, Limits, Remote, open_remote, run_python, shared

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


class Tool(NamedTuple):
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


def answer(kit: Mapping[str, Tool], call: ToolCall) -> Message:
    """What the policy is told of a call."""
    return {
        "role": "tool",
        "tool_call_id": call.id,
        "name": call.name or "tool",
        "content": _said(kit, call),
    }


def _said(kit: Mapping[str, Tool], call: ToolCall) -> str:
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


def load_tool(name: str, remote: Remote = HERE) -> Tool:
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
        return Tool(get_json_schema(described), function)
    except (DocstringParsingException, TypeHintParsingException, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{key} has {name}, which cannot be described to a model: {reason}; expected type hints, and a docstring "
            "with a line for each argument below Args:; write them"
        ) from None


def load_own(spec: str, key: str, kind: str) -> Any:
    """What ``FILE.py:name`` names. ``key`` and ``kind`` are for messages."""
    file, _, name = spec.rpartition(":")
    path = home_path(file)
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(
            f"{key} is {spec}, and there is no file {file or spec}; expected FILE.py:{kind}; check the path"
        )
    number = zlib.crc32(str(path.resolve()).encode())  # two files may have one name
    made = importlib.util.spec_from_file_location(f"taut_own_{path.stem}_{number:08x}", path)
    assert made is not None and made.loader is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(made)
    sys.modules[made.name] = module  # dataclasses look their module up by name
    try:
        made.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(
            f"{key}: {file} cannot be run: {reason}; expected Python that can; correct it"
        ) from error
    if not hasattr(module, name):
        raise ConfigError(f"{key}: {file} has no {kind} {name!r}; expected one; name another")
    return getattr(module, name)
