"""Environments of the library verifiers: ``rollout.environment.name="verifiers:ENV_ID"``.

Such an environment asks a model by itself, over HTTP, and judges its rollouts. So it is an agent (``agent.py``): a
trajectory is one of its rollouts, whose model is the run's endpoint, and its rubric gives the reward.

    verifiers    ENV_ID                                     options
    below 0.4    a module with ``load_environment``         its keywords
    from 0.4     a taskset                                  the environment's configuration, without the taskset's id

``rows`` makes the rows to train on: the prompt, and in the column ``verifiers`` the task as the environment reads it.

Rewards that compare the rollouts of a group, and environments of several agents, are refused: a trajectory is judged
by itself. The library is imported here only.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from threading import Thread
from typing import Any, Protocol, TypeAlias

import verifiers

from taut.data.read.json_io import shown
from taut.data.rows.prompts import PromptRow
from taut.errors import ConfigError, DataError, TautError
from taut.rl.environments.agent import Endpoint

COLUMN = "verifiers"
"""The column of a row with its task."""
LEAVING = 5.0
"""Seconds that rollouts have to end, once the run is over."""
Task: TypeAlias = Mapping[str, Any]
"""A task as JSON."""


class _Environment(Protocol):
    """An environment of one of the library's two interfaces."""

    def tasks(self) -> Iterator[tuple[Any, Task]]:
        """The prompt of each task, messages or a text, and the task."""

    async def play(self, task: Task, endpoint: Endpoint) -> float:
        """The reward of one rollout. Raises RuntimeError with the error that ended it."""


class _Module:
    """An environment of verifiers below 0.4: what a module's ``load_environment`` returns."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._environment = verifiers.load_environment(name, **options)
        if self._environment.requires_group_rollouts:
            raise ConfigError(
                f"rollout.environment.name is verifiers:{name}, whose rubric compares rollouts of a group; expected "
                "rewards of one rollout; take those out, and name rewards of your own in rewards"
            )

    def tasks(self) -> Iterator[tuple[Any, Task]]:
        for row in self._environment.get_dataset():
            yield row["prompt"], row

    async def play(self, task: Task, endpoint: Endpoint) -> float:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient
        from verifiers.clients import OpenAIChatCompletionsClient

        # taut answers each request once, as late as its server does; a proxy leads nowhere
        async with AsyncOpenAI(
            base_url=endpoint.base_url,
            api_key=endpoint.api_key,
            max_retries=0,
            timeout=None,
            http_client=DefaultAsyncHttpxClient(trust_env=False),
        ) as client:
            made = await self._environment.run_rollout(
                dict(task), OpenAIChatCompletionsClient(client), endpoint.model, {}
            )
        if made["error"] is not None:
            raise RuntimeError(_line(made["error"]))
        return float(made["reward"])


class _Taskset:
    """An environment of verifiers 0.4 and newer: a taskset, and the agent that plays it."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        import verifiers.v1 as v1
        from verifiers.v1.configs.agent import agent_config_fields

        self._v1 = v1
        taskset = {**options.get("taskset", {}), "id": name}
        self._config = v1.resolve_env_config({**options, "taskset": taskset})
        self._taskset = v1.load_environment(self._config).taskset
        agents = [*agent_config_fields(self._config)]
        if len(agents) > 1:
            raise ConfigError(
                f"rollout.environment.name is verifiers:{name}, of several agents ({', '.join(agents)}); expected one, "
                "which is the policy; choose another environment with rollout.environment.options.id"
            )

    def tasks(self) -> Iterator[tuple[Any, Task]]:
        for task in self._taskset:
            data = task.data.model_dump(mode="json", exclude_none=True)
            messages = data.get("prompt") or "(the environment begins)"
            if isinstance(messages, str):
                messages = [{"role": "user", "content": messages}]
            if system := data.get("system_prompt"):
                messages = [{"role": "system", "content": system}, *messages]
            yield messages, data

    async def play(self, task: Task, endpoint: Endpoint) -> float:
        # the library takes a key from a variable only; programs that it starts get none whose name has API_KEY in it
        variable = f"TAUT_API_KEY_{endpoint.api_key}"
        os.environ[variable] = endpoint.api_key
        try:
            client = self._v1.EvalClientConfig(base_url=endpoint.base_url, api_key_var=variable)
            context = self._v1.ModelContext(model=endpoint.model, client=client)
            environment = self._v1.load_environment(self._config)
            kind = type(environment.taskset).task_type()
            data = kind.data_type().model_validate(dict(task))
            async with environment.serving():
                episode = await environment.run_episode(
                    kind(data, self._config.taskset.task), context
                )
        finally:
            del os.environ[variable]
        if not episode.ok:
            errors = [
                *episode.errors,
                *(error for trace in episode.traces for error in trace.errors),
            ]
            raise RuntimeError(_line(errors[-1].message if errors else "it gives no reason"))
        return float(sum(trace.reward for trace in episode.traces))


def _line(error: object) -> str:
    return " ".join(str(error).split())


def _load(name: str, options: Mapping[str, Any]) -> _Environment:
    """Raises ConfigError for an environment that there is not."""
    make: Callable[[str, Mapping[str, Any]], _Environment] = _Taskset
    if hasattr(verifiers, "load_environment"):
        make = _Module
    try:
        return make(name, options)
    except TautError:
        raise
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"rollout.environment.name is verifiers:{name}, which cannot be made: {_line(error)[:300]}; expected an "
            "environment that is installed here, and its rollout.environment.options; correct them"
        ) from None


def rows(name: str, count: int, **options: Any) -> Iterator[dict[str, Any]]:
    """The first ``count`` tasks of an environment as rows for ``data.train``. ``options``: those of the run."""
    for number, (prompt, task) in enumerate(islice(_load(name, options).tasks(), count)):
        text = json.dumps(task, ensure_ascii=False, default=str)
        yield {"id": f"{name}-{number}", "prompt": prompt, COLUMN: text}


class VerifiersAgent:
    """Plays rollouts, each for the thread that calls. ``close`` ends those that are left."""

    def __init__(
        self, name: str, options: Mapping[str, Any], prompts: Sequence[PromptRow] = ()
    ) -> None:
        """``prompts``: of the run. Raises DataError for one without a task, ConfigError for an environment that cannot
        be made.
        """
        for row in prompts:
            if not isinstance(row.columns.get(COLUMN), str):
                raise DataError(
                    f"{row.place}: the column {COLUMN} is {shown(row.columns.get(COLUMN))}; expected the task as JSON; "
                    "make the rows with taut_tools.adapters.verifiers.rows"
                )
        self._environment = _load(name, options)
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="verifiers", daemon=True)
        self._thread.start()

    def __call__(self, row: Mapping[str, Any], endpoint: Endpoint) -> float:
        play = self._environment.play(json.loads(row[COLUMN]), endpoint)
        return asyncio.run_coroutine_threadsafe(play, self._loop).result()

    def close(self) -> None:
        """End the rollouts that are left, within ``LEAVING`` seconds."""

        async def end() -> None:
            playing = asyncio.all_tasks() - {asyncio.current_task()}
            for task in playing:
                task.cancel()
            if playing:
                await asyncio.wait(playing, timeout=LEAVING)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
