"""Agents as black boxes: what they ask is what is trained on, and what they do wrong is an error with its reason."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.fake_vllm import FakeServer
from tests.unit.rl.test_environment import CALL, Scripted, renderer_of, row_of, world_of

from taut.data.render.stop_tokens import derive_stop_set
from taut.errors import ConfigError, UserCodeError
from taut.inference.settings import Sampling, ServerConfig
from taut.inference.vllm import ServerEngine
from taut.rl.environment import EnvironmentPool
from taut.rl.environments.agent import Agents, Endpoint
from taut.rl.environments.chat_endpoint import ChatEndpoint
from taut.rl.environments.tools import load_tool
from taut.rl.rollout_queue import RolloutQueue
from taut.rl.sampler import Trajectory, sample_trajectories
from taut.rl.settings import AgentConfig, EnvironmentConfig, is_function
from taut.types import Completion, Prompt

PROGRAM = '''
import json, os, sys, time, urllib.error, urllib.request

row = json.loads(sys.stdin.read())

def ask(messages, **keys):
    """The message that answers, or the status and reason of a refusal."""
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, **keys}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    try:
        return json.load(urllib.request.urlopen(request, timeout=30))["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]

def user(text):
    return {"role": "user", "content": text}
'''


def chat(endpoint: Endpoint, messages: list[Any], **keys: Any) -> dict[str, Any]:
    """The body of an answer. Raises HTTPError."""
    body = {"model": endpoint.model, "messages": messages, **keys}
    request = urllib.request.Request(
        f"{endpoint.base_url}/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def reason_of(endpoint: Endpoint, messages: list[Any], **keys: Any) -> tuple[int, str]:
    """Status and reason with which a request is refused."""
    with pytest.raises(urllib.error.HTTPError) as raised:
        chat(endpoint, messages, **keys)
    return raised.value.code, json.load(raised.value)["error"]["message"]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@contextmanager
def opened(function: Callable[..., Any] | str, **keys: Any) -> Iterator[EnvironmentPool]:
    """An agent that is a function, or a command."""
    name = "agent:true" if callable(function) else f"agent:{function}"
    pool = world_of(EnvironmentConfig(name=name, **keys), renderer_of())
    (source,) = pool.sources
    assert isinstance(source, Agents)
    if callable(function):
        source.function = function
    with closing(pool):
        yield pool


def run(
    function: Callable[..., Any] | str,
    script: Callable[[str, int, int], str] = lambda name, index, turn: f"Answer {turn}.",
    n: int = 1,
    **keys: Any,
) -> tuple[list[Trajectory], list[Completion]]:
    """The trajectories of one row, and what was sampled."""
    with opened(function, **keys) as pool:
        engine = Scripted(pool.bridge.renderer, script)
        row = row_of(pool.bridge.renderer, goal=5)
        return sample_trajectories(engine, [row], Sampling(n=n), pool), engine.drawn


def require_trained(trajectory: Trajectory, drawn: list[Completion]) -> None:
    """The targets of all paths are what was sampled, each once."""
    paths = [trajectory, *trajectory.branches]
    trained = sorted(path.ids_T[path.sampled_at_N].tolist() for path in paths)
    assert sum(map(len, trained)) == sum(c.ids_N.size for c in drawn) == trajectory.num_sampled
    assert sorted(token for ids in trained for token in ids) == sorted(
        int(token) for completion in drawn for token in completion.ids_N
    )


def test_a_program_asks_and_its_last_line_is_the_reward(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(
        PROGRAM
        + """
first = ask([user(f"What is {row['goal']}?")])
print("thinking")
second = ask([user("What is 5?"), first, user("Sure?")], temperature=0)
print(json.dumps({"reward": {"right": 1, "said": len(second["content"])}}))
"""
    )
    command = f"{sys.executable} {tmp_path}/agent.py"
    (found,), drawn = run(command)
    assert (found.error, found.finish_reason, found.num_turns) == (None, "stop", 2)
    assert found.rewards == {"right": 1.0, "said": len("Answer 1.")}
    assert found.first_messages == (user("What is 5?"),)
    assert [message["content"] for message in found.messages] == ["Answer 0.", "Sure?", "Answer 1."]
    assert (found.text, found.branches, found.num_conversations) == ("Answer 1.", (), 1)
    assert found.ids_T[found.sampled_at_N].tolist() == [i for c in drawn for i in c.ids_N.tolist()]


def test_branches_and_edits_are_paths_of_one_trajectory() -> None:
    def agent(row: dict[str, Any], endpoint: Endpoint) -> float:
        asked = [user("Where?")]
        said = chat(endpoint, asked)["choices"][0]["message"]
        for question in ("First?", "Second?"):
            chat(endpoint, [*asked, said, user(question)])
        chat(endpoint, [*asked, {"role": "assistant", "content": "Elsewhere"}, user("Third?")])
        return 0.5

    (found,), drawn = run(agent)
    assert (found.error, found.rewards, found.num_turns) == (None, {"environment": 0.5}, 4)
    assert (len(found.branches), found.num_conversations, found.num_edited) == (2, 2, 1)
    require_trained(found, drawn)
    assert found.first_messages is not None
    assert found.first_messages[1]["content"] == "Elsewhere"
    assert found.text == "Answer 3."


def test_calls_of_tools_come_in_the_form_of_the_protocol() -> None:
    """As one answer and as a stream; the tool is asked in the template's own words."""
    seen: list[Any] = []

    def agent(row: dict[str, Any], endpoint: Endpoint) -> None:
        asked = [user("What is 2 + 3?")]
        tools = [load_tool("calculator").schema]
        body = chat(endpoint, asked, tools=tools, tool_choice="auto")
        message = body["choices"][0]["message"]
        (call,) = message["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "5"}
        request = urllib.request.Request(
            f"{endpoint.base_url}/chat/completions",
            json.dumps(
                {
                    "model": endpoint.model,
                    "messages": [*asked, message, result],
                    "tools": tools,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
            ).encode(),
            {"Authorization": f"Bearer {endpoint.api_key}"},
        )
        with urllib.request.urlopen(request) as answer:
            seen.extend([body, answer.read().decode()])

    (found,), _ = run(agent, lambda name, index, turn: [f"I add.{CALL}", "It is 5."][turn])
    body, stream = seen
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    function = body["choices"][0]["message"]["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == (
        "calculator",
        {"expression": "2 + 3"},
    )
    events = stream.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert chunks[0]["choices"][0]["delta"]["content"] == "It is 5."
    assert chunks[1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[2]["usage"]["total_tokens"] == found.ids_T.size
    assert (found.error, found.num_calls, len(found.branches)) == (None, 1, 0)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": "gpt-5"}, "model: found 'gpt-5'; expected 'policy'"),
    ({"n": 2}, "n: found 2; expected 1"),
    ({"tool_choice": "required"}, "tool_choice: found 'required'; expected 'auto'"),
    ({"max_tokens": 0.5}, "max_tokens: found 0.5"),
    ({"stop": ["\n"]}, "stop: found"),
    ({"temprature": 1}, "did you mean 'temperature'"),
    ({"messages": []}, "expected a list of messages"),
    ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages: messages[0].role is 'robot'"),
    ({"messages": [user("Hi"), {"role": "assistant", "content": "Ho"}]}, "the role assistant"),
    ({"messages": [user("word " * 400)]}, "tokens; expected less than"),
]


def test_a_function_may_be_a_coroutine() -> None:
    async def agent(row: dict[str, Any], endpoint: Endpoint) -> float:
        chat(endpoint, [user("Well?")])
        return 0.5

    (trajectory,), _ = run(agent)
    assert (trajectory.error, trajectory.rewards) == (None, {"environment": 0.5})


def test_tools_that_the_template_does_not_write_are_an_error_of_the_trajectory() -> None:
    pool = world_of(EnvironmentConfig(name="agent:true"), renderer_of("chatml"))
    (source,) = pool.sources
    assert isinstance(source, Agents)

    def agent(row: dict[str, Any], endpoint: Endpoint) -> float:
        chat(endpoint, [user("Well?")], tools=[load_tool("calculator").schema])
        return 1.0

    source.function = agent
    with closing(pool):
        engine = Scripted(pool.bridge.renderer, lambda name, index, turn: "Five.")
        rows = [row_of(pool.bridge.renderer)]
        (trajectory,) = sample_trajectories(engine, rows, Sampling(n=1), pool)
    assert "its last request was refused: tools: the chat template" in str(trajectory.error)
    assert not engine.drawn


def test_what_is_not_in_force_is_refused_with_the_reason() -> None:
    """The trajectory goes on; a refused request is no turn."""
    reasons: list[tuple[int, str]] = []

    def agent(row: dict[str, Any], endpoint: Endpoint) -> None:
        for keys, _ in REFUSED:
            reasons.append(
                reason_of(
                    endpoint,
                    keys.get("messages", [user("Hi")]),
                    **{key: value for key, value in keys.items() if key != "messages"},
                )
            )
        chat(endpoint, [user("Hi")])

    renderer = renderer_of()
    with opened(agent) as pool:
        small = replace(pool, context=200)
        row = row_of(renderer)
        engine = Scripted(renderer, lambda *_: "Ho")
        (found,) = sample_trajectories(engine, [row], Sampling(), small)
    for (status, reason), (_, expected) in zip(reasons, REFUSED, strict=True):
        assert status == 400
        assert expected in reason, reason
    assert (found.error, found.num_turns, len(engine.drawn)) == (None, 1, 1)


def test_a_key_is_of_one_trajectory_alone() -> None:
    with closing(ChatEndpoint()) as endpoint:
        assert endpoint.url.startswith("http://127.0.0.1:")
        session = endpoint.open()
        wrong = Endpoint(endpoint.url, "guess")
        assert reason_of(wrong, [user("Hi")])[0] == 401
        request = urllib.request.Request(f"{endpoint.url}/models")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(request)
        request.add_header("Authorization", f"Bearer {session.key}")
        with urllib.request.urlopen(request) as answer:
            assert [card["id"] for card in json.load(answer)["data"]] == ["policy"]
        session.close()
        assert reason_of(Endpoint(endpoint.url, session.key), [user("Hi")])[0] == 401


def test_an_agent_that_never_ends_is_ended(tmp_path: Path) -> None:
    """With all that it started; others are not touched."""
    (tmp_path / "agent.py").write_text(
        PROGRAM
        + """
import subprocess
said = ask([user("Go?")])
if said["content"] == "hang":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(sys.argv[1], "w").write(str(child.pid))
    time.sleep(600)
"""
    )
    command = f"{sys.executable} {tmp_path}/agent.py {tmp_path}/child"
    began = time.monotonic()
    found, _ = run(
        command, lambda name, index, turn: "hang" if index == 0 else "go", n=2, timeout=3.0
    )
    assert time.monotonic() - began < 120
    assert found[0].error == (
        "the agent did not end: it has taken 3 s of its own (rollout.environment.timeout)"
    )
    assert found[1].error is None
    child = (tmp_path / "child").read_text()
    state = subprocess.run(["ps", "-o", "stat=", child], capture_output=True, text=True).stdout
    assert state.strip()[:1] in ("", "Z")


def test_what_an_agent_prints_is_bounded(tmp_path: Path) -> None:
    """It is read while the agent runs, and no more than its end is held; a last line beyond that is an error."""
    (tmp_path / "agent.py").write_text(
        PROGRAM
        + """
ask([user("Go?")])
for stream in (1, 2):
    for _ in range(32):
        os.write(stream, b"x" * 2**20)
os.write(1, sys.argv[1].encode())
"""
    )
    (found,), _ = run(f"{sys.executable} {tmp_path}/agent.py '\n{{\"reward\": 0.5}}'")
    assert (found.error, found.rewards) == (None, {"environment": 0.5})
    (found,), _ = run(f"{sys.executable} {tmp_path}/agent.py '{{\"reward\": 0.5}}'")
    assert found.error is not None
    assert "a line of output of over 1,048,576 bytes" in found.error


def test_what_an_agent_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    """A child in a session of its own, which keeps the standard streams open: it costs no time."""
    (tmp_path / "agent.py").write_text(
        PROGRAM
        + """
ask([user("Go?")])
if os.fork() == 0:
    os.setsid()
    open(sys.argv[1], "w").write(str(os.getpid()))
    time.sleep(600)
while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read():
    time.sleep(0.01)
print('{"reward": 1.0}')
"""
    )
    began = time.monotonic()
    (found,), _ = run(f"{sys.executable} {tmp_path}/agent.py {tmp_path}/child", timeout=120.0)
    assert (found.error, found.rewards) == (None, {"environment": 1.0})
    assert time.monotonic() - began < 60
    child = (tmp_path / "child").read_text()
    state = subprocess.run(["ps", "-o", "stat=", child], capture_output=True, text=True).stdout
    assert state.strip()[:1] in ("", "Z")


THIEF = """
import glob
own = os.environ.get("OPENAI_API_KEY", "")
ask([user("Go?")])
if row["goal"] != 5:  # the victim tells its key, and waits
    open(sys.argv[1] + "/key", "w").write(own)
    while not os.path.exists(sys.argv[1] + "/done"):
        time.sleep(0.02)
else:
    while not os.path.exists(sys.argv[1] + "/key") or not open(sys.argv[1] + "/key").read():
        time.sleep(0.02)
    stolen = os.environ["OPENAI_API_KEY"] = open(sys.argv[1] + "/key").read()
    found = []
    for path in glob.glob("/proc/[0-9]*/environ"):
        try:
            found.append(stolen in open(path).read())
        except OSError:
            pass
    answer = ask([user("In your name?")])
    open(sys.argv[1] + "/done", "w").write(json.dumps([answer, any(found)]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_agent_does_not_ask_in_the_name_of_another(tmp_path: Path) -> None:
    """Not even with the other's key; nor does it see the key in /proc, where it is kept apart."""
    (tmp_path / "agent.py").write_text(PROGRAM + THIEF)
    command = f"{sys.executable} {tmp_path}/agent.py {tmp_path}"
    with opened(command, timeout=60.0) as pool:
        engine = Scripted(pool.bridge.renderer, lambda name, index, turn: f"Answer {turn}.")
        rows = [row_of(pool.bridge.renderer, goal=goal, name=str(goal)) for goal in (5, 6)]
        sample_trajectories(engine, rows, Sampling(n=1), pool)
        (source,) = pool.sources
        assert isinstance(source, Agents)
        is_apart = source.is_apart
    answer, is_seen = json.loads((tmp_path / "done").read_text())
    assert answer[0] == 403
    assert "a process that its agent did not start" in answer[1]
    assert not (is_apart and is_seen)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_key_is_accepted_from_the_processes_of_its_session() -> None:
    """Or from all, where the configuration says so; by IPv6's form of the address as well."""
    with closing(ChatEndpoint()) as endpoint, socket.socket(socket.AF_INET6) as other:
        session = endpoint.open()
        own = Endpoint(endpoint.url, session.key)
        assert reason_of(own, [user("Hi")], model="x")[0] == 400
        port = int(endpoint.url.split(":")[2].split("/")[0])
        other.connect(("::ffff:127.0.0.1", port))
        assert session.is_own(other.getsockname()[1], port)
        session.owner, session.sockets = 1 << 22, set()
        assert reason_of(own, [user("Hi")], model="x")[0] == 403
        endpoint.is_checked = False
        assert reason_of(own, [user("Hi")], model="x")[0] == 400


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_key_in_a_pipe_is_in_no_environment(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(
        "import os\nassert 'OPENAI_API_KEY' not in os.environ\n"
        "os.environ['OPENAI_API_KEY'] = os.read(int(os.environ['OPENAI_API_KEY_FD']), 999).decode()\n"
        + PROGRAM
        + "print(json.dumps({'reward': len(ask([user('Go?')])['content'])}))"
    )
    command = f"{sys.executable} {tmp_path}/agent.py"
    (found,), _ = run(command, agent=AgentConfig(key="descriptor"))
    assert (found.error, found.rewards) == (None, {"environment": len("Answer 0.")})


def test_children_of_an_agent_ask_with_its_key(tmp_path: Path) -> None:
    """In a session of their own, without a parent."""
    (tmp_path / "agent.py").write_text(
        PROGRAM
        + """
ready, done = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(done, ask([user("Go?")])["content"].encode())
    os._exit(0)
os.wait()
print(json.dumps({"reward": len(os.read(ready, 99))}))
"""
    )
    (found,), _ = run(f"{sys.executable} {tmp_path}/agent.py")
    assert (found.error, found.rewards) == (None, {"environment": len("Answer 0.")})


def test_settings_of_agents_need_an_agent_that_reads_them() -> None:
    own = EnvironmentConfig(name=f"agent:{__file__}:user", agent=AgentConfig(key="descriptor"))
    with pytest.raises(ConfigError, match="a function of this process: nothing reads it"):
        world_of(own, renderer_of())
    told = r"agent.callers=any with name=tools: nothing reads it; expected name=agent:COMMAND"
    with pytest.raises(ValueError, match=told):
        EnvironmentConfig(name="tools", tools=["calculator"], agent=AgentConfig(callers="any"))


def test_a_function_that_never_ends_is_left_alone_until_they_are_many() -> None:
    over = threading.Event()

    def agent(row: dict[str, Any], endpoint: Endpoint) -> None:
        chat(endpoint, [user("Go?")])
        over.wait(60)

    try:
        (found,), _ = run(agent, timeout=0.3)
        assert found.error is not None
        assert "did not end: it has taken 0.3 s" in found.error
        with pytest.raises(UserCodeError, match="32 calls of the agent true go on"):
            run(agent, timeout=0.3, n=32, workers=32)
    finally:
        over.set()


def test_what_an_agent_does_wrong_is_an_error_with_the_reason(tmp_path: Path) -> None:
    def silent(row: dict[str, Any], endpoint: Endpoint) -> None:
        pass

    def broken(row: dict[str, Any], endpoint: Endpoint) -> None:
        chat(endpoint, [user("Hi")])
        raise KeyError("answer")

    def infinite(row: dict[str, Any], endpoint: Endpoint) -> float:
        chat(endpoint, [user("Hi")])
        return float("nan")

    def refused(row: dict[str, Any], endpoint: Endpoint) -> None:
        chat(endpoint, [user("Hi")], model="gpt-4o")

    expected = {
        silent: "the agent ended and had no answer of the policy",
        broken: "the agent raised KeyError: 'answer'",
        infinite: "nan",
        refused: "HTTP Error 400: Bad Request; its last request was refused: model: found 'gpt-4o'",
    }
    for agent, reason in expected.items():
        (found,), _ = run(agent)
        assert found.finish_reason == "error"
        assert reason in str(found.error)
        assert found.num_sampled == (0 if agent in (silent, refused) else len("Answer 0.") + 1)
    (tmp_path / "agent.py").write_text("import sys; sys.exit('no license')")
    (found,), _ = run(f"{sys.executable} {tmp_path}/agent.py")
    assert found.error == "the agent ended with exit code 1: no license"


def test_a_reward_of_the_wrong_type_stops_at_the_first() -> None:
    def agent(row: dict[str, Any], endpoint: Endpoint) -> str:
        chat(endpoint, [user("Hi")])
        return "good"

    with pytest.raises(UserCodeError, match="'good'"):
        run(agent)


def test_turns_end_and_the_agent_with_them() -> None:
    """Cut after two answers; what it would have returned is not known."""
    refused: list[int] = []
    done = threading.Event()

    def agent(row: dict[str, Any], endpoint: Endpoint) -> float:
        for number in range(2):
            chat(endpoint, [user(f"{number}?")])
        refused.append(reason_of(endpoint, [user("Third?")])[0])
        done.set()
        return 1.0

    (found,), drawn = run(agent, max_turns=2)
    assert done.wait(20)
    assert refused == [410]
    assert (found.error, found.finish_reason, found.rewards) == (None, "length", {})
    assert (found.num_turns, len(found.branches)) == (2, 1)
    require_trained(found, drawn)


def test_each_answer_has_a_random_stream_of_its_own() -> None:
    names: list[str] = []

    def script(name: str, index: int, turn: int) -> str:
        names.append(name)
        return "Ho"

    def agent(row: dict[str, Any], endpoint: Endpoint) -> None:
        for _ in range(2):
            chat(endpoint, [user("Hi")], max_tokens=1000)

    found, _ = run(agent, script, n=2)
    assert sorted(names) == ["a#0@0", "a#0@1", "a#1@0", "a#1@1"]
    assert [len(trajectory.branches) for trajectory in found] == [1, 1]


def test_an_answer_that_nobody_waits_for_is_not_trained_on() -> None:
    """The client closes its connection while the answer is sampled, and asks again."""
    gone = threading.Event()

    class Slow(Scripted):
        def generate(self, prompts: Any, sampling: Any, on_done: Any = None) -> list[Completion]:
            if not self.asked:
                gone.wait(20)
                time.sleep(0.3)
            return super().generate(prompts, sampling, on_done)

    def agent(row: dict[str, Any], endpoint: Endpoint) -> None:
        body = {"model": endpoint.model, "messages": [user("Hi")]}
        request = urllib.request.Request(
            f"{endpoint.base_url}/chat/completions",
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {endpoint.api_key}"},
        )
        with pytest.raises(TimeoutError):
            urllib.request.urlopen(request, timeout=0.3)
        gone.set()
        chat(endpoint, [user("Hi")])

    with opened(agent) as pool:
        engine = Slow(pool.bridge.renderer, lambda name, index, turn: "ab" * (turn + 1))
        row = row_of(pool.bridge.renderer)
        (found,) = sample_trajectories(engine, [row], Sampling(), pool)
    assert (found.error, found.text, found.branches) == (None, "abab", ())
    assert found.num_sampled == engine.drawn[1].ids_N.size
    assert len(engine.drawn) == 2


def test_a_server_answers_agents_side_by_side() -> None:
    """An agent that waits for another's request, and asks in two threads at once."""
    meet = threading.Barrier(2)

    def agent(row: dict[str, Any], endpoint: Endpoint) -> float:
        chat(endpoint, [user("Ready?")])
        meet.wait(20)
        asking = [
            threading.Thread(target=chat, args=(endpoint, [user(text)])) for text in ("A?", "B?")
        ]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(20)
        return 1.0

    with opened(agent) as pool:
        renderer = pool.bridge.renderer
        stop_ids = derive_stop_set(renderer).ids
        with FakeServer(ends=tuple(sorted(stop_ids)), max_model_len=4096) as server:
            engine = ServerEngine.open(
                server.url, ServerConfig(), renderer.tokenizer, stop_ids, 4096
            )
            with closing(engine), closing(RolloutQueue(engine, Sampling(n=2), pool, None)) as feed:
                feed.ask(0, row_of(renderer))
                found = feed.next().trajectories
    assert [trajectory.error for trajectory in found] == [None, None]
    assert [trajectory.rewards for trajectory in found] == [{"environment": 1.0}] * 2
    assert [(t.num_turns, t.num_conversations) for t in found] == [(3, 3)] * 2


def test_what_is_named_is_found_or_refused(tmp_path: Path) -> None:
    assert is_function("a/b.py:agent")
    assert not is_function("python a.py:agent x")
    assert not is_function("python a.py")
    assert EnvironmentConfig(name="agent:python a.py --x y:z").code == []
    assert EnvironmentConfig(name="agent:a.py:run").code == [Path("a.py")]
    for name, message in (
        ("agent:", "without a command"),
        ("agent:'a", "cannot be split"),
        (f"agent:{tmp_path}/none.py:run", "none.py"),
    ):
        with pytest.raises(ConfigError, match=message):
            world_of(EnvironmentConfig(name=name), renderer_of())
    with pytest.raises(UserCodeError, match="cannot be started: No such file"):
        run("/nowhere/agent")


def test_the_engine_gets_ids_and_the_runs_own_sampling() -> None:
    def agent(row: dict[str, Any], endpoint: Endpoint) -> None:
        chat(endpoint, [user("Hi")], temperature=0, max_completion_tokens=7)

    with opened(agent) as pool:
        names = [decision.name for decision in pool.decisions]
        engine = Scripted(pool.bridge.renderer, lambda *_: "Ho")
        sample_trajectories(engine, [row_of(pool.bridge.renderer)], Sampling(), pool)
    ((prompt,),) = engine.asked
    assert isinstance(prompt, Prompt)
    assert prompt.max_new_tokens == 7
    assert prompt.ids_T.tolist() == pool.bridge.prompt([user("Hi")], ())
    assert "the agent's sampling" in names
    assert np.isfinite(engine.drawn[0].logp_N).all()
