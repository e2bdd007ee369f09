"""Tools: arithmetic without eval, Python in the sandbox, functions of one's own; what they say of bad arguments."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fake_executors import serving
from transformers.utils.chat_template_utils import get_json_schema

from taut.data.tool_calls import ToolCall
from taut.errors import ConfigError, EngineError, SandboxError
from taut.rl.environments import tools
from taut.rl.environments.tools import ToolFunction, answer, calculator, load_tool, python
from taut.sandbox import Remote, close_shared

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


@pytest.fixture(autouse=True, scope="module")
def _closed() -> Iterator[None]:
    yield
    close_shared()


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
        found.append(tools.load_own(f"{file}:Game", "key", "class"))
    assert [sys.modules[game.__module__].Game.name for game in found] == ["one", "two"]
    file.write_text("raise SystemExit('enough')")
    with pytest.raises(ConfigError, match="cannot be run: SystemExit: enough"):
        tools.load_own(f"{file}:Game", "key", "class")


def test_python_runs_in_the_sandbox() -> None:
    kit = {"python": load_tool("python")}

    def told(code: str) -> str:
        return str(answer(kit, ToolCall("call00000", "python", {"code": code}))["content"])

    assert told("print(sum(range(5)))") == "10\n"
    assert told("x = 1") == "(nothing was printed)"
    assert told("print(1)\n1 / 0") == "1\nError: ZeroDivisionError: division by zero"


def test_a_program_that_runs_out_says_of_what(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = tools.run_python("while True: print(1)", limits=tools.LIMITS)
    assert ran.outcome in tools.ENDS
    monkeypatch.setattr(
        tools,
        "run_python",
        lambda code, limits, remote: ran._replace(stdout="", outcome="memory"),
    )
    assert tools.python("x") == "Error: the program took more than 1024 MB"


def test_python_may_run_at_a_service() -> None:
    with serving("piston") as fake:
        remote = Remote(service="piston", addresses=(fake.url,), wait_seconds=5.0)
        tool = load_tool("python", remote)
        assert tool.schema == get_json_schema(python)
        assert tool.function(code="print(1 + 1)") == "2\n"
        assert tool.function(code="1 / 0") == "Error: ZeroDivisionError: division by zero"
        fake.fault = lambda job: "401"
        with pytest.raises(SandboxError, match="HTTP 401"):
            tool.function(code="print(1)")
        with pytest.raises(SandboxError, match="HTTP 401"):
            load_tool("python", remote)
        close_shared()
