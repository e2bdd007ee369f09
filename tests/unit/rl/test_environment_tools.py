"""Tools: arithmetic without eval, functions of one's own; what they say of bad arguments."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest

from taut.data.rows.tool_calls import ToolCall
from taut.errors import ConfigError, EngineError, UserCodeError
from taut.io.user_code import name_object
from taut.rl.environments import tools
from taut.rl.environments.tools import ToolFunction, answer, calculator, load_tool
from taut.rl.settings import TOOL_ENTRY_POINTS, Remote

OWN = '''
import json

def area(width: float, height: float = 1.0) -> float:
    """
    The area of a rectangle.

    Args:
        width: Its width.
        height: Its height.
    """
    return width * height

def undescribed(x):
    return x
'''


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("(1 - 3) ** 3", "-8"),
        ("7 // 2 + 7 % 2", "4"),
        ("1 / 8", "0.125"),
        ("sqrt(16) + max(1, 2, 3)", "7.0"),
        ("-pi", "-3.141592653589793"),
        ("2 ** 100", "1267650600228229401496703205376"),
        ("round(2.5) + round(-1.25, 1) + round(1234, -2)", "1200.8"),
    ],
)
def test_the_calculator_computes(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')",
        "(1).__class__",
        "[x for x in (1, 2)]",
        "open('file')",
        "lambda: 1",
        "'a' * 3",
        "True + 1",
        "9 ** 9 ** 9",
        "(10 ** 1000) * (10 ** 1000)",
        "(-8) ** 0.5",
        "1 +",
        "sqrt(x=4)",
        "round(1, -301)",
        "1" * 2000,
        "(" * 400 + "1" + ")" * 400,
    ],
)
def test_the_calculator_computes_nothing_else(expression: str) -> None:
    with pytest.raises(ValueError):
        calculator(expression)


def test_what_was_wrong_with_arguments_is_told() -> None:
    kit = {"calculator": load_tool("calculator")}

    def told(**arguments: object) -> str:
        return str(answer(kit, ToolCall("call00007", "calculator", dict(arguments)))["content"])

    assert told(expression="1 / 0") == "Error: ZeroDivisionError: division by zero"
    assert "unexpected keyword argument 'x'" in told(x=1)
    assert told(expression="import os") == "Error: ValueError: this is no arithmetic expression"
    assert told(expression=5).startswith("Error: TypeError")


def test_a_fault_of_a_tool_is_no_answer() -> None:
    def broken() -> str:
        raise EngineError("the endpoint is dead")

    kit = {"broken": ToolFunction({"type": "function", "function": {"name": "broken"}}, broken)}
    with pytest.raises(EngineError, match="dead"):
        answer(kit, ToolCall("call00000", "broken"))


async def awaited(x: int) -> int:
    return x + 1


def generated(x: int) -> Iterator[int]:
    yield x
    yield x + 1


def endless() -> Iterator[int]:
    return count()


def late(x: int) -> Iterator[int]:
    yield x
    raise ValueError("there is no more")


class Awaitable:
    def __await__(self) -> Generator[None, None, str]:
        yield from ()
        return "done"


class Point(NamedTuple):
    x: int


@dataclass
class Record:
    x: int


@pytest.mark.parametrize(
    ("function", "arguments", "content"),
    [
        (awaited, {"x": 1}, "2"),
        (partial(awaited, 1), {}, "2"),
        (Awaitable, {}, "done"),
        (generated, {"x": 1}, "[1, 2]"),
        (lambda: awaited_items(), {}, "[1, 2]"),
        (lambda: map(str, [1, 2]), {}, '["1", "2"]'),
        (lambda: {"a": [1, None, True]}, {}, '{"a": [1, null, true]}'),
        (lambda: Point(1), {}, "[1]"),
        (lambda: Record(1), {}, '"Record(x=1)"'),
        (lambda: Path("a") / "b", {}, '"a/b"'),
        (lambda: None, {}, "null"),
        (lambda: datetime(2026, 1, 2), {}, '"2026-01-02 00:00:00"'),
        (late, {"x": 1}, "Error: ValueError: there is no more"),
    ],
)
def test_what_a_tool_returns_is_awaited_collected_and_json(
    function: Callable[..., object], arguments: dict[str, object], content: str
) -> None:
    kit = {"it": ToolFunction({"type": "function", "function": {"name": "it"}}, function)}
    assert answer(kit, ToolCall("call00000", "it", arguments))["content"] == content


async def awaited_items() -> Iterator[int]:
    return generated(1)


def test_a_generator_without_end_is_cut() -> None:
    kit = {"it": ToolFunction({"type": "function", "function": {"name": "it"}}, endless)}
    content = answer(kit, ToolCall("call00000", "it"))["content"]
    assert content.startswith("[0, 1, 2, ") and content.endswith(" characters more)")


class Response:
    def __repr__(self) -> str:
        return "<Response [200]>"


async def items() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    "value",
    [object(), ToolCall, len, awaited, items(), {"a": object()}, [lambda: 1], sys, Response()],
)
def test_an_object_that_says_nothing_stops_the_run(value: object) -> None:
    kit = {"it": ToolFunction({"type": "function", "function": {"name": "it"}}, lambda: value)}
    with pytest.raises(UserCodeError, match=r"a tool returned .* which says nothing to the policy"):
        answer(kit, ToolCall("call00000", "it"))


def test_a_long_answer_is_shortened() -> None:
    kit = {
        "long": ToolFunction({"type": "function", "function": {"name": "long"}}, lambda: "x" * 5000)
    }
    said = answer(kit, ToolCall("call00000", "long"))["content"]
    assert said.endswith("x... (1000 characters more)")


def test_a_function_of_ones_own_is_described_by_its_docstring(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    tool = load_tool(f"{file}:area")
    parameters = tool.schema["function"]["parameters"]
    assert (tool.name, parameters["required"]) == ("area", ["width"])
    assert parameters["properties"]["height"] == {"type": "number", "description": "Its height."}
    said = answer({"area": tool}, ToolCall("call00000", "area", {"width": 2, "height": 3}))
    assert json.loads(said["content"]) == 6
    for name, message in (
        ("undescribed", "cannot be described"),
        ("other", "has no function 'other'"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_tool(f"{file}:{name}")
    with pytest.raises(ConfigError, match="expected one of calculator, python"):
        load_tool("abacus")


def test_files_of_one_s_own_may_have_one_name_and_end(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        file = tmp_path / name / "own.py"
        file.parent.mkdir()
        file.write_text(f"class Game:\n    name = {name!r}\n")
        found.append(tools.load_own(f"{file}:Game", "key", "class", TOOL_ENTRY_POINTS))
    assert [sys.modules[game.__module__].Game.name for game in found] == ["one", "two"]
    file.write_text("raise SystemExit('enough')")
    with pytest.raises(ConfigError, match="cannot be run: SystemExit: enough"):
        tools.load_own(f"{file}:Game", "key", "class", TOOL_ENTRY_POINTS)


OPENED = '''
from taut.config import Decision

def search(query: str) -> str:
    """
    Search for a text.

    Args:
        query: The text.
    """
    raise AssertionError("it is called as it was opened")

def opened(remote):
    return (lambda query: f"{query} at {remote.service}"), Decision("index", "small", "it fits")

search.open_tool = opened
'''


def test_a_tool_may_be_opened_with_the_settings_of_a_service_and_is_described_without_it(
    tmp_path: Path,
) -> None:
    file = tmp_path / "own.py"
    file.write_text(OPENED)
    remote = Remote(service="piston", addresses=("http://127.0.0.1:9/api",))
    kit = tools.open_tools(["calculator", f"{file}:search"], remote, 1.0)
    said = answer(kit.functions, ToolCall("call00000", "search", {"query": "x"}))
    assert said["content"] == "x at piston"
    assert kit.decisions == [("index", "small", "it fits")]
    file.write_text(OPENED.replace("return (lambda", "raise AssertionError; return (lambda"))
    assert tools.schemas_of([f"{file}:search"], 1.0) == (kit.functions["search"].schema,)


def test_a_function_that_python_gives_is_a_tool_itself() -> None:
    offset = 10

    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: One.
            b: Another.
        """
        return a + b + offset

    tool = load_tool(name_object(add))
    assert (tool.name, tool.function) == ("add", add)
    assert tool.schema["function"]["description"] == "Add two numbers."
