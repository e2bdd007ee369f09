"""Environments of verifiers are agents. A stand-in has the names of the library that are used, in both of its
interfaces; ``tests/real/test_verifiers.py`` plays the library's own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.unit.rl.test_environment import Scripted, renderer_of, row_of, world_of

from taut.errors import ConfigError, DataError
from taut.inference.settings import Sampling
from taut.rl.sampler import Trajectory, sample_trajectories
from taut.rl.settings import EnvironmentConfig

ASK = '''
import asyncio, json, os, urllib.request

async def ask(url, key, model, messages):
    """The text of an answer, as the library's own client would get it."""
    request = urllib.request.Request(
        url + "/chat/completions",
        json.dumps({"model": model, "messages": messages}).encode(),
        {"Authorization": "Bearer " + key, "Content-Type": "application/json"},
    )
    answer = await asyncio.to_thread(urllib.request.urlopen, request, timeout=30)
    return json.load(answer)["choices"][0]["message"]["content"]

async def twice(url, key, model, messages, wanted):
    """1 for each of two answers that has the text."""
    first = await ask(url, key, model, messages)
    if first == "Raise.":
        return None, "it was  raised"
    said = [*messages, {"role": "assistant", "content": first}, {"role": "user", "content": "Sure?"}]
    return float((wanted in first) + (wanted in await ask(url, key, model, said))), None
'''
BELOW = {
    "openai.py": """
class DefaultAsyncHttpxClient:
    def __init__(self, *, trust_env): assert trust_env is False

class AsyncOpenAI:
    def __init__(self, *, base_url, api_key, max_retries, timeout, http_client):
        assert max_retries == 0 and timeout is None
        self.base_url, self.api_key = base_url, api_key
    async def __aenter__(self): return self
    async def __aexit__(self, *error): self.api_key = "closed"
""",
    "verifiers/__init__.py": """
import importlib
def load_environment(name, **options):
    try:
        return importlib.import_module(name.replace("-", "_")).load_environment(**options)
    except ImportError as error:
        raise ValueError(f"could not import {name}") from error
""",
    "verifiers/clients.py": """
class OpenAIChatCompletionsClient:
    def __init__(self, client): self.client = client
""",
    "asks_twice.py": ASK
    + """
class Environment:
    requires_group_rollouts = False
    def get_dataset(self):
        user = {"role": "user", "content": "What is 5?"}
        return [{"prompt": [user], "example_id": n, "answer": self.wanted} for n in range(3)]
    async def run_rollout(self, task, client, model, sampling_args):
        asked = client.client
        assert (task["example_id"], sampling_args) == (0, {})
        reward, error = await twice(asked.base_url, asked.api_key, model, task["prompt"], task["answer"])
        return {"reward": reward, "error": error}

def load_environment(wanted="5", compares=False):
    made = Environment()
    made.wanted, made.requires_group_rollouts = wanted, compares
    return made
""",
}
FROM = {
    "verifiers/__init__.py": "",
    "verifiers/v1/configs/__init__.py": "",
    "verifiers/v1/configs/agent.py": """
def agent_config_fields(config): return dict.fromkeys(config.agents)
""",
    "verifiers/v1/__init__.py": ASK
    + """
from contextlib import asynccontextmanager
from types import SimpleNamespace as Some

class Data:
    def __init__(self, values): self.__dict__.update(values)
    def model_dump(self, mode, exclude_none): return dict(self.__dict__)
    model_validate = classmethod(lambda cls, values: cls(values))

class Task:
    def __init__(self, data, config): self.data, self.config = data, config
    data_type = classmethod(lambda cls: Data)

class Taskset:
    def __init__(self, wanted): self.wanted = wanted
    task_type = classmethod(lambda cls: Task)
    def __iter__(self):
        number = 0
        while True:
            data = {"idx": number, "prompt": "What is 5?", "system_prompt": "Be brief.", "wanted": self.wanted}
            yield Task(Data(data), "config")
            number += 1

def EvalClientConfig(*, base_url, api_key_var): return Some(url=base_url, key=os.environ[api_key_var])
def ModelContext(*, model, client): return Some(model=model, client=client)

def resolve_env_config(data):
    taskset = dict(data["taskset"])
    if taskset.pop("id") != "asks-twice":
        raise ModuleNotFoundError("taskset not found")
    taskset = Some(wanted=taskset.pop("wanted", "5"), task="config", **taskset)
    return Some(taskset=taskset, agents=data.get("agents", ["agent"]))

class Environment:
    is_serving = False
    @asynccontextmanager
    async def serving(self):
        self.is_serving = True
        yield
        self.is_serving = False
    async def run_episode(self, task, context):
        assert self.is_serving and task.config == "config" and task.data.idx == 0
        user = {"role": "user", "content": task.data.prompt}
        at = context.client
        reward, error = await twice(at.url, at.key, context.model, [user], task.data.wanted)
        errors = [] if error is None else [Some(message=error)]
        return Some(ok=not errors, errors=[], traces=[Some(reward=reward, errors=errors)])

def load_environment(config):
    made = Environment()
    made.taskset = Taskset(config.taskset.wanted)
    return made
""",
}


@pytest.fixture(params=["below 0.4", "from 0.4"])
def wanted(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """The options with which the environment wants a text, of the library that takes the place of verifiers."""
    ours = ("verifiers", "openai", "asks_twice", "taut_tools.adapters.verifiers")
    for name in [name for name in sys.modules if name in ours or name.startswith("verifiers.")]:
        monkeypatch.delitem(sys.modules, name)
    for name, text in (BELOW if request.param == "below 0.4" else FROM).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    is_below = request.param == "below 0.4"
    yield lambda text: {"wanted": text} if is_below else {"taskset": {"wanted": text}}
    for name in [name for name in sys.modules if name in ours or name.startswith("verifiers.")]:
        del sys.modules[name]


def played(options: dict[str, Any], said: list[str], **keys: Any) -> Trajectory:
    """The trajectory of the environment's first task."""
    from taut_tools.adapters.verifiers import rows

    (made,) = rows("asks-twice", 1, **options)
    renderer = renderer_of()
    row = replace(row_of(renderer, **made), prompt=tuple(made["prompt"]))
    config = EnvironmentConfig(name="verifiers:asks-twice", options=options, **keys)
    with closing(world_of(config, renderer, rows=[row])) as pool:
        engine = Scripted(renderer, lambda name, index, turn: said[turn])
        (trajectory,) = sample_trajectories(engine, [row], Sampling(), pool)
    return trajectory


def test_its_rollout_is_trained_on_with_its_own_reward(wanted: Any) -> None:
    found = played(wanted("Yes"), ["Yes, 5.", "Yes, yes."])
    assert (found.error, found.finish_reason, found.num_turns) == (None, "stop", 2)
    assert found.rewards == {"environment": 2.0}
    assert [message["content"] for message in found.messages] == ["Yes, 5.", "Sure?", "Yes, yes."]
    assert played(wanted("No"), ["Yes, 5.", "No."]).rewards == {"environment": 1.0}
    assert not [name for name in os.environ if name.startswith("TAUT_API_KEY_")]


def test_rows_have_the_prompt_and_the_task(wanted: Any) -> None:
    from taut_tools.adapters.verifiers import rows

    first, second = rows("asks-twice", 2, **wanted("ünd"))
    assert (first["id"], second["id"]) == ("asks-twice-0", "asks-twice-1")
    assert first["prompt"][-1] == {"role": "user", "content": "What is 5?"}
    assert "ünd" in json.loads(first["verifiers"]).values() and "ünd" in first["verifiers"]


def test_what_ends_a_rollout_is_its_error(wanted: Any) -> None:
    found = played(wanted("5"), ["Raise."])
    assert found.error == "the agent raised RuntimeError: it was raised" and not found.rewards


def test_a_rollout_that_a_limit_ends_leaves_nothing(wanted: Any) -> None:
    found = played(wanted("5"), ["5", "5"], max_turns=1)
    assert (found.finish_reason, found.num_turns, found.rewards) == ("length", 1, {})


@pytest.mark.parametrize("name", ["asks-thrice", "asks-twice"])
def test_an_environment_that_cannot_be_used_is_refused_at_the_start(wanted: Any, name: str) -> None:
    options: dict[str, Any] = {}
    says = r"verifiers:asks-thrice, which cannot be made: .*; expected an environment that is inst"
    if name == "asks-twice":
        is_below = "taskset" not in wanted("")
        options = {"compares": True} if is_below else {"agents": ["player", "judge"]}
        says = "compares rollouts of a group" if is_below else r"several agents \(player, judge"
    with pytest.raises(ConfigError, match=says):
        world_of(EnvironmentConfig(name=f"verifiers:{name}", options=options), renderer_of())


def test_rows_without_a_task_are_refused_by_their_place(wanted: Any) -> None:
    renderer = renderer_of()
    config = EnvironmentConfig(name="verifiers:asks-twice")
    with pytest.raises(DataError, match=r"^a: the column verifiers is null; .*verifiers\.rows$"):
        world_of(config, renderer, rows=[row_of(renderer, goal=5)])


@pytest.mark.skipif(find_spec("verifiers") is not None, reason="verifiers is installed")
def test_without_the_library_the_extra_is_named() -> None:
    with pytest.raises(ConfigError, match=r"needs verifiers, not installed here; .* extra verif"):
        world_of(EnvironmentConfig(name="verifiers:any"), renderer_of())
