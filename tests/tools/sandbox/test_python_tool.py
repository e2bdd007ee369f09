"""The tool ``python``, found by its entry point: in the sandbox, at a service, or refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.helpers.fake_executors import serving
from transformers.utils.chat_template_utils import get_json_schema

from taut.data.rows.tool_calls import ToolCall
from taut.errors import SandboxError
from taut.rl.environments.tools import answer, load_tool, open_tools, schemas_of
from taut.rl.settings import HERE, Remote
from taut_tools.sandbox import gvisor, kernel, launch, python_tool
from taut_tools.sandbox.python_tool import python
from taut_tools.sandbox.shared import close_shared, shared


@pytest.fixture(autouse=True, scope="module")
def _closed() -> Iterator[None]:
    yield
    close_shared()


def test_python_runs_in_the_sandbox() -> None:
    kit = {"python": load_tool("python")}
    chosen = shared().mechanism
    assert kit["python"].decision == ("sandbox", chosen.name, chosen.reason)

    def told(code: str) -> str:
        return str(answer(kit, ToolCall("call00000", "python", {"code": code}))["content"])

    assert told("print(sum(range(5)))") == "10\n"
    assert told("x = 1") == "(nothing was printed)"
    assert told("print(1)\n1 / 0") == "1\nError: ZeroDivisionError: division by zero"


def test_a_program_that_runs_out_says_of_what(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = python_tool.run_python("while True: print(1)", limits=python_tool.LIMITS)
    assert ran.outcome in python_tool.ENDS
    monkeypatch.setattr(
        python_tool,
        "run_python",
        lambda code, limits, remote: ran._replace(stdout="", outcome="memory"),
    )
    assert python("x") == "Error: the program took more than 1024 MB"


def test_python_may_run_at_a_service() -> None:
    with serving("piston") as fake:
        remote = Remote(service="piston", addresses=(fake.url,), wait_seconds=5.0)
        tool = load_tool("python", remote)
        assert tool.schema == get_json_schema(python)
        assert tool.decision is not None and tool.decision.value == "piston"
        assert tool.function(code="print(1 + 1)") == "2\n"
        assert tool.function(code="1 / 0") == "Error: ZeroDivisionError: division by zero"
        fake.fault = lambda job: "401"
        with pytest.raises(SandboxError, match="HTTP 401"):
            tool.function(code="print(1)")
        with pytest.raises(SandboxError, match="HTTP 401"):
            load_tool("python", remote)
        close_shared()


def test_it_is_refused_where_programs_cannot_be_held_and_described_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    close_shared()
    monkeypatch.setattr(gvisor, "runsc", lambda: None)
    monkeypatch.setattr(launch, "bwrap", lambda: None)
    monkeypatch.setattr(kernel, "landlock_version", lambda: 0)
    with pytest.raises(SandboxError, match="found no way to hold a program on this machine"):
        open_tools(["calculator", "python"], HERE, 1.0)
    with pytest.raises(SandboxError, match="found no way to hold a program on this machine"):
        python("print(1)")
    assert [it["function"]["name"] for it in schemas_of(["python"], 1.0)] == ["python"]
