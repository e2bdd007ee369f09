"""Several environments in one run: each row is answered by its own, and each has its metrics."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.refusals import ErrorCode, refused
from tests.unit.rl.test_environment import CALL, Scripted, renderer_of, row_of, world_of

from taut.config import from_mapping
from taut.errors import ConfigError, DataError
from taut.inference.settings import Sampling
from taut.rewards.reward_set import RewardResult
from taut.rl.monitors import rollout_event
from taut.rl.rollout import Group, Rollout
from taut.rl.sampler import sample_trajectories
from taut.rl.settings import EnvironmentConfig, RolloutConfig
from taut.rl.worker import add_environment_rewards

GAME = """
from taut.rl.environment import Step

class Game:
    def step(self, text, calls):
        if text == "stop":
            return Step(done=True, reward=len(text))
        if text == "break":
            raise RuntimeError("broken")
        return Step(messages=[{"role": "user", "content": "And?"}])
"""


ASKS = """
import json, urllib.request

def ask(endpoint, text):
    body = {"model": endpoint.model, "messages": [{"role": "user", "content": text}]}
    head = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
    url = f"{endpoint.base_url}/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)

def once(row, endpoint):
    ask(endpoint, "Now?")
    return 1

def twice(row, endpoint):
    ask(endpoint, "First?")
    ask(endpoint, "Second?")
    return 2
"""


@pytest.fixture
def config(tmp_path: Path) -> EnvironmentConfig:
    (tmp_path / "game.py").write_text(GAME)
    by_row = {"sums": "tools", "game": f"{tmp_path}/game.py:Game"}
    return EnvironmentConfig(by_row=by_row, tools=["calculator"])


def test_each_row_is_answered_by_its_own(config: EnvironmentConfig) -> None:
    """The tools are shown to their rows alone; the event has the mean of each, errors apart."""
    renderer = renderer_of()
    rows = [
        row_of(renderer, "a", environment="sums"),
        row_of(renderer, "b", environment="game"),
        row_of(renderer, "c", environment="game"),
    ]
    said = {"a": [f"I add.{CALL}", "5."], "b": ["hm", "stop"], "c": ["break"]}
    pool = world_of(config, renderer, rows=rows)
    engine = Scripted(renderer, lambda name, index, turn: said[name[0]][turn])
    sums, game, broken = sample_trajectories(engine, rows, Sampling(), pool)
    assert (sums.num_calls, sums.messages[1]["content"], sums.rewards) == (1, "5", {})
    assert (game.num_calls, game.messages[1]["content"]) == (0, "And?")
    assert game.rewards == {"environment": 4.0}
    assert "calculator" in renderer.template.decode(sums.ids_T.tolist())
    assert "calculator" not in renderer.template.decode(game.ids_T.tolist())
    assert "broken" in str(broken.error)
    assert [d.value for d in pool.decisions if d.name == "environments"] == [
        "sums: 1 rows, game: 2 rows"
    ]
    scored = [
        replace(sums, reward_result=RewardResult({}, 1.0)),
        replace(game, reward_result=add_environment_rewards(RewardResult({}, None), game)),
        broken,
    ]
    rollout = Rollout([Group((trajectory,)) for trajectory in scored])
    full = RolloutConfig(environment=config)
    event = rollout_event(rollout, [], {}, 3, full, is_judged=True)
    of_each = {key: value for key, value in event.items() if key.startswith("environment/")}
    assert of_each == {
        "environment/sums/share": pytest.approx(1 / 3),
        "environment/sums/errors": 0,
        "environment/sums/reward": 1.0,
        "environment/sums/turns_mean": 2.0,
        "environment/game/share": pytest.approx(2 / 3),
        "environment/game/errors": 1,
        "environment/game/reward": 4.0,
        "environment/game/turns_mean": 1.5,
    }


def test_rows_and_environments_name_each_other(config: EnvironmentConfig) -> None:
    renderer = renderer_of()
    named = row_of(renderer, "a", environment="sums")
    for wrong in ({}, {"environment": "chess"}, {"environment": ["sums"]}):
        with pytest.raises(DataError, match=r"b: environment is .*expected one of sums, game"):
            world_of(config, renderer, rows=[named, row_of(renderer, "b", **wrong)])
    with pytest.raises(ConfigError, match="has game, which no row names"):
        world_of(config, renderer, rows=[named])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "game.py:Game"}, ErrorCode("by_row/name")),
        ({"tools": ["calculator"]}, ErrorCode("tools/name/by_row")),
        ({"by_row": {"a": "tools"}}, ErrorCode("by_row/tools")),
        ({"options": {"size": 3}}, ErrorCode("options/name")),
    ],
)
def test_keys_that_contradict_are_refused(keys: dict[str, Any], message: str) -> None:
    with refused(message):
        from_mapping(EnvironmentConfig, {"by_row": {"a": "game.py:Game"}, **keys})


def test_code_of_all_is_the_users_own() -> None:
    by_row = {"a": "game.py:Game", "b": "gym:CartPole-v1", "c": "tools"}
    by_row |= {"d": "agent:python other.py", "e": "agent:agent.py:solve"}
    config = EnvironmentConfig(by_row=by_row, tools=["calculator", "own.py:area"])
    assert config.code == [Path("agent.py"), Path("game.py"), Path("own.py")]
    assert config.is_on and len(config.agents) == 2


def test_agents_and_environments_answer_their_rows_in_one_run(tmp_path: Path) -> None:
    """Two agents, of one of which the function says so itself, and a game; metrics of agents are of their rows."""
    (tmp_path / "game.py").write_text(GAME)
    (tmp_path / "agent.py").write_text(ASKS)
    by_row = {"game": f"{tmp_path}/game.py:Game"}
    by_row |= {name: f"agent:{tmp_path}/agent.py:{name}" for name in ("once", "twice")}
    config, renderer = EnvironmentConfig(by_row=by_row, timeout=20.0), renderer_of()
    rows = [row_of(renderer, name[0], environment=name) for name in by_row]
    pool = world_of(config, renderer, rows=rows)
    engine = Scripted(renderer, lambda name, index, turn: "stop")
    with closing(pool):
        game, once, twice = sample_trajectories(engine, rows, Sampling(), pool)
    assert [path.error for path in (game, once, twice)] == [None] * 3
    assert [path.num_turns for path in (game, once, twice)] == [1, 1, 2]
    assert [path.rewards["environment"] for path in (game, once, twice)] == [4.0, 1.0, 2.0]
    assert len(twice.branches) == 1 and not once.branches
    judged = [
        replace(t, reward_result=add_environment_rewards(RewardResult({}, None), t))
        for t in (game, once, twice)
    ]
    rollout = Rollout([Group((trajectory,)) for trajectory in judged])
    full = RolloutConfig(environment=config)
    event = rollout_event(rollout, [], {}, 3, full, is_judged=True)
    assert (event["paths_mean"], event["conversations"]) == (1.5, 3)
    assert event["environment/twice/reward"] == 2.0
