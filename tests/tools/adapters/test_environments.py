"""Environments of other libraries: Gymnasium's in text, and the tools of MCP servers."""

from __future__ import annotations

import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.unit.rl.test_environment import Scripted, renderer_of, row_of, world_of

from taut.config import from_mapping
from taut.data.rows.tool_calls import ToolCall
from taut.errors import ConfigError
from taut.inference.settings import Sampling
from taut.rl.environments.tools import Kit, answer, open_tools
from taut.rl.sampler import Trajectory, joined, sample_trajectories
from taut.rl.settings import HERE, EnvironmentConfig

# -- Gymnasium


@pytest.fixture
def gym() -> Iterator[Any]:
    """The library, with an environment of numbers and one of words."""
    gymnasium = pytest.importorskip("gymnasium", reason="the extra gym is not installed")
    spaces = gymnasium.spaces

    class Steps(gymnasium.Env):  # type: ignore[misc]
        """3 is reached by steps of 1 or 2; each costs 1, and the end is worth 10."""

        observation_space = spaces.Dict({"at": spaces.Discrete(9), "box": spaces.Box(0, 9, (2,))})
        action_space = spaces.Discrete(2, start=1)

        def __init__(self, start: int = 0) -> None:
            self.start = start

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
            super().reset(seed=seed)
            self.at = self.start
            return self._seen(), {}

        def step(self, action: int) -> tuple[Any, float, bool, bool, Any]:
            assert self.action_space.contains(action)
            self.at += action
            is_there = self.at >= 3
            return self._seen(), 10.0 if is_there else -1.0, is_there, False, {}

        def _seen(self) -> Any:
            return {"at": self.at, "box": self.observation_space["box"].high * self.at}

    class Echo(gymnasium.Env):  # type: ignore[misc]
        observation_space = spaces.Text(64)
        action_space = spaces.Text(4, min_length=1)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
            super().reset(seed=seed)
            return f"seed {seed}", {}

        def step(self, action: str) -> tuple[Any, float, bool, bool, Any]:
            return action, float(len(action)), False, action == "stop", {}

    class Picture(Steps):
        observation_space = spaces.Box(0, 255, (64, 64, 3))

    class Torque(Steps):
        action_space = spaces.Box(-1, 1, (1,))

    made = {"Steps": Steps, "Echo": Echo, "Picture": Picture, "Torque": Torque}
    for name, kind in made.items():
        gymnasium.register(f"taut/{name}-v0", entry_point=kind, disable_env_checker=True)
    yield gymnasium
    for name in made:
        del gymnasium.registry[f"taut/{name}-v0"]


def play(name: str, script: Callable[[int], str], **columns: Any) -> Trajectory:
    """A trajectory of an environment, where turn n says ``script(n)``."""
    renderer = renderer_of()
    options = columns.pop("options", {})
    config = EnvironmentConfig(name=f"gym:taut/{name}-v0", options=options)
    engine = Scripted(renderer, lambda row, index, turn: script(turn))
    row = row_of(renderer, **columns)
    (found,) = sample_trajectories(engine, [row], Sampling(), world_of(config, renderer))
    return found


def test_numbers_are_actions_and_observations_are_json(gym: Any) -> None:
    """From 1 by one step of 1 and one of 2: -1 + 10. The turn without an action takes no step."""
    turns = ["I am not sure, maybe 7", "Not 2 but 1", "2"]
    found = play("Steps", lambda turn: turns[turn], options={"start": 1})
    assert found.first_messages is not None
    assert [message["content"] for message in (*found.first_messages, *found.messages)] == [
        'What is 2 plus 3?\n\n{"at": 1, "box": [9.0, 9.0]}',
        "I am not sure, maybe 7",
        "Answer with a whole number from 1 to 2.",
        "Not 2 but 1",
        '{"at": 2, "box": [18.0, 18.0]}',
        "2",
        '{"at": 4, "box": [36.0, 36.0]}',
    ]
    assert (found.error, found.finish_reason, found.rewards) == (None, "stop", {"environment": 9.0})


def test_texts_are_actions_and_the_row_is_the_seed(gym: Any) -> None:
    """What Gymnasium truncates is done; 2 + 4 letters."""
    found = play("Echo", lambda turn: [" hi\n", "too long", "stop"][turn], seed=5)
    assert (found.error, found.rewards, found.num_turns) == (None, {"environment": 6.0}, 3)
    assert found.first_messages is not None
    assert found.first_messages[0]["content"].endswith("\n\nseed 5")
    assert "Answer with 1 to 4 characters of 01" in found.messages[3]["content"]
    one, same, other = (play("Echo", lambda turn: "stop", x=x).first_messages for x in (1, 1, 2))
    assert one == same != other


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Picture", {}, "whose observations are 12,288 numbers .*wrap it"),
        ("Torque", {}, "whose actions are Box.*expected Text or Discrete"),
        ("Nowhere", {}, "which cannot be made: .*Nowhere.*rollout.environment.options"),
        ("Steps", {"begin": 1}, "which cannot be made: .*begin"),
    ],
)
def test_what_is_not_in_text_is_refused(
    gym: Any, name: str, options: dict[str, Any], message: str
) -> None:
    config = EnvironmentConfig(name=f"gym:taut/{name}-v0", options=options)
    with pytest.raises(ConfigError, match=message):
        world_of(config, renderer_of())


def test_options_need_an_environment_that_reads_them() -> None:
    with pytest.raises(ConfigError, match=r"options=.*size.*: nothing reads it; expected name="):
        from_mapping(EnvironmentConfig, {"name": "game.py:Game", "options": {"size": 3}})


def test_the_users_own_code_is_what_is_no_library() -> None:
    assert EnvironmentConfig(name="gym:taut/Steps-v0").code == []
    tools = ["calculator", "own.py:area", "mcp:python serve.py"]
    assert EnvironmentConfig(name="tools", tools=tools).code == [Path("own.py")]


def test_a_prompt_that_ends_with_another_role_is_followed() -> None:
    asked = {"role": "user", "content": "Go."}
    assert joined([{"role": "system", "content": "Be brief."}], [asked])[1] == asked
    assert joined([asked], [asked]) == ({"role": "user", "content": "Go.\n\nGo."},)


# -- MCP servers

SERVER = """
import os, sys, time
from mcp.server.mcpserver import MCPServer

if "fail" in sys.argv:
    sys.exit("no license found")
server = MCPServer("sums")
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()}\\n")

@server.tool()
def add(left: int, right: int) -> int:
    "Add two numbers."
    return left + right

@server.tool()
def fail() -> str:
    "Fail."
    raise RuntimeError("not today")

@server.tool()
def sleep() -> str:
    "Sleep."
    time.sleep(60)
    return "awake"

@server.tool()
def escape() -> int:
    "Leave a process behind."
    ready, done = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(done, str(os.getpid()).encode())
            time.sleep(600)
        os._exit(0)
    os.wait()
    return int(os.read(ready, 99))

@server.tool()
def told() -> str:
    "The value of a variable."
    return os.environ.get("SAID", "")

@server.tool()
def leave() -> str:
    "End the server."
    print("I leave", file=sys.stderr, flush=True)
    os._exit(3)

server.run("stdio")
"""


@pytest.fixture
def command(tmp_path: Path) -> str:
    """What starts an MCP server, which writes its process id to ``started``."""
    pytest.importorskip("mcp", reason="the extra mcp is not installed")
    (tmp_path / "serve.py").write_text(SERVER)
    path = ":".join(filter(None, sys.path))
    return f"mcp:env PYTHONPATH={path} {sys.executable} {tmp_path}/serve.py {tmp_path}/started"


def result(kit: Kit, name: str, **arguments: Any) -> str:
    return str(answer(kit.functions, ToolCall("call00001", name, arguments))["content"])


def test_the_tools_of_a_server_are_called(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process for the whole run; its errors are results, its end is a fault, and that of all it started. A variable
    of taut's is named in the command, and not written there.
    """
    monkeypatch.setenv("TOLD", "from taut")
    named = command.replace("mcp:env ", "mcp:env SAID=$TOLD ")
    kit = open_tools(["calculator", named], HERE, 1.0)
    try:
        assert list(kit.functions) == [
            *("calculator", "add", "fail", "sleep", "escape", "told", "leave")
        ]
        schema = kit.functions["add"].schema["function"]
        assert schema["description"] == "Add two numbers."
        assert schema["parameters"]["required"] == ["left", "right"]
        assert result(kit, "add", left=2, right=3) == "5"
        assert result(kit, "fail").startswith("Error: ToolFault: ")
        assert "not today" in result(kit, "fail")
        assert "Error" in result(kit, "add", left="two")
        assert result(kit, "sleep") == "Error: ToolFault: sleep did not answer within 1 s"
        assert result(kit, "add", left=2, right=4) == "6"
        assert result(kit, "told") == "from taut"
        escaped = result(kit, "escape")
        (process,) = (tmp_path / "started").read_text().split()
        with pytest.raises(ConnectionError, match=r"is gone: I leave"):
            result(kit, "leave")
    finally:
        kit.close()
    for number in (process, escaped):
        with pytest.raises(ProcessLookupError):
            os.kill(int(number), 0)
    monkeypatch.delenv("TOLD")
    with pytest.raises(ConfigError, match="names a variable that is not set"):
        open_tools([named], HERE, 1.0)


FLOODS = """
import os, sys
sys.stdin.readline()
stream = int(sys.argv[1])
for _ in range(64):
    os.write(stream, b"x" * 2**20)
sys.exit("\\ntoo much")
"""


@pytest.mark.parametrize(
    ("stream", "why"), [(1, "a line of its output has over 8,388,608 bytes"), (2, "too much")]
)
def test_what_a_server_says_is_bounded(tmp_path: Path, stream: int, why: str) -> None:
    pytest.importorskip("mcp", reason="the extra mcp is not installed")
    (tmp_path / "floods.py").write_text(FLOODS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError, match=why):
        open_tools([f"mcp:{sys.executable} {tmp_path}/floods.py {stream}"], HERE, 1.0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kB"


@pytest.mark.parametrize("encoding", ["", "gzip"])
def test_an_answer_from_an_address_is_bounded(encoding: str) -> None:
    pytest.importorskip("mcp", reason="the extra mcp is not installed")
    ended = threading.Event()

    class Endless(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            if encoding:
                self.send_header("Content-Encoding", encoding)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(b" " * 2**20)
            except OSError:
                ended.set()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with pytest.raises(ConfigError, match="bytes, uncompressed"):
                open_tools([f"mcp:http://127.0.0.1:{server.server_port}/mcp"], HERE, 1.0)
            assert ended.wait(20)
        finally:
            server.shutdown()


def test_a_server_ends_with_its_tools(tmp_path: Path, command: str) -> None:
    with pytest.raises(ConfigError, match="two of one name"):
        open_tools([command, command], HERE, 1.0)
    for process in (tmp_path / "started").read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(process), 0)


@pytest.mark.parametrize(
    ("tail", "message"),
    [(" fail", "does not list its tools: no license found"), ("/nowhere", "No such file")],
)
def test_a_server_that_does_not_start_is_refused(command: str, tail: str, message: str) -> None:
    spec = f"{command}{tail}" if tail == " fail" else f"mcp:{tail}"
    with pytest.raises(ConfigError, match=message):
        open_tools([spec], HERE, 1.0)
