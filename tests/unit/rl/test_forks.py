"""Paths that fork at turns: what they share is sampled once, each goes on with an environment of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import numpy as np
import pytest
from tests.helpers.fake_vllm import FakeServer
from tests.helpers.refusals import ErrorCode, refused
from tests.unit.losses.test_advantages import forest, tree_of
from tests.unit.rl.test_environment import Scripted, renderer_of, row_of, world_of

from taut.config import from_mapping
from taut.data.render.stop_tokens import derive_stop_set
from taut.data.rows.tool_calls import ToolCall
from taut.errors import UserCodeError
from taut.inference.settings import Sampling, ServerConfig
from taut.inference.vllm import ServerEngine
from taut.losses.advantages import ESTIMATORS
from taut.losses.policy import PolicyGradient
from taut.methods import METHODS
from taut.rewards.reward_set import RewardResult
from taut.rl.advantages import PolicyCredit
from taut.rl.environment import EnvironmentPool, Step
from taut.rl.monitors import rollout_event
from taut.rl.rollout import Group, Rollout
from taut.rl.rollout_queue import RolloutQueue
from taut.rl.sampler import Trajectory, sample_trajectories
from taut.rl.settings import EnvironmentConfig, ForkConfig, RolloutConfig, ShapingConfig
from taut.rl.worker import add_environment_rewards


@dataclass
class Diary:
    """Repeats all that was said; "end" ends it, and the reward is the number of turns."""

    made: int = 0
    pages: list[str] = field(default_factory=list)

    def step(self, text: str, calls: list[ToolCall]) -> Step:
        self.pages.append(text)
        messages = [{"role": "user", "content": f"Heard {' / '.join(self.pages)}"}]
        return Step(messages, done=text == "end", reward=1.0)


class Locked(Diary):
    """Has what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = Lock()


def pool_of(make: Callable[[], Any] = Diary, **fork: Any) -> EnvironmentPool:
    made = world_of(EnvironmentConfig(name="tools", tools=["calculator"]), renderer_of())
    return replace(made, make=make, tools=(), fork=ForkConfig(**fork))


def played(pool: EnvironmentPool, script: Callable[[int, int], str], n: int) -> list[Trajectory]:
    """``script``: what a sample says in a turn."""

    def words(name: str, index: int, turn: int) -> str:
        return script(index, int(name.rpartition("@")[2]))

    renderer = pool.bridge.renderer
    return sample_trajectories(
        Scripted(renderer, words), [row_of(renderer, "a")], Sampling(n=n), pool
    )


def talk(index: int, turn: int) -> str:
    return "end" if turn == 3 else f"{index} in {turn}"


@pytest.mark.parametrize("state", ["copy", "replay"])
def test_paths_go_on_apart_from_what_they_share(state: str) -> None:
    """Two begin, become four after turn 1 and eight after turn 3: turns of 2 + 4 + 4 + 8 paths are asked for."""
    pool = pool_of(turns=[1, 3], n=2, state=state)
    found = played(pool, talk, n=8)
    assert [path.index for path in found] == list(range(8))
    said = [[m["content"] for m in path.messages if m["role"] == "assistant"] for path in found]
    assert said[:4] == [
        ["0 in 0", "0 in 1", "0 in 2", "end"],
        ["0 in 0", "0 in 1", "0 in 2", "end"],
        ["0 in 0", "2 in 1", "2 in 2", "end"],
        ["0 in 0", "2 in 1", "2 in 2", "end"],
    ]
    assert {words[0] for words in said[4:]} == {"4 in 0"}
    for path, words in zip(found, said, strict=True):
        heard = [m["content"] for m in path.messages if m["role"] == "user"]
        assert heard == [f"Heard {' / '.join(words[: turn + 1])}" for turn in range(4)], (
            "its own diary"
        )
        assert path.rewards == {"environment": 4.0}
        assert [reward for _, reward in path.turn_rewards] == [1.0] * 4
        ends = [n + 1 for n, _ in path.turn_rewards]
        assert path.forks == (ends[0], ends[2])
        assert path.sampled_at_N.size == path.logp_N.size == ends[3]
    assert [path.num_inherited for path in found[:4]] == [
        0,
        found[1].forks[1],
        found[2].forks[0],
        found[3].forks[1],
    ]


def test_what_is_asked_is_asked_once_and_has_streams_of_its_own() -> None:
    pool = pool_of(turns=[1])
    engine = Scripted(pool.bridge.renderer, lambda name, index, turn: "end" if turn else f"{index}")
    sample_trajectories(engine, [row_of(pool.bridge.renderer, "a")], Sampling(n=4), pool)
    assert [[prompt.id for prompt in asked] for asked in engine.asked] == [
        ["a#0@0", "a#2@0"],
        ["a#0@1", "a#1@1", "a#2@1", "a#3@1"],
    ]


def credit_of() -> PolicyCredit:
    shaping = ShapingConfig()
    return PolicyCredit(
        PolicyGradient(), ESTIMATORS["tree"], shaping, limit=99, temperature=1.0, has_old=False
    )


def test_turns_have_the_advantages_of_their_nodes_by_hand() -> None:
    """Rewards 1, 0, 0, 0 with mean 1/4 and deviation 1/2: leaves 3/2 and three of -1/2. First turns 1/2 and -1/2, the
    second ones 1, -1, 0, 0; the three letters with which both of a fork begin change nothing, and have 0.
    """
    script = {0: "so good", 1: "so bad", 2: "so so", 3: "so what"}
    pool = pool_of(turns=[1])
    paths = played(pool, lambda index, turn: [f"{index}", script[index], "end"][turn], 4)
    judged = [
        replace(path, reward_result=RewardResult({}, reward))
        for path, reward in zip(paths, [1.0, 0.0, 0.0, 0.0], strict=True)
    ]
    (made,), _ = credit_of().assign([Group(tuple(judged))], {})
    for sample, path, first, second in zip(
        made.tree.samples, paths, [0.5, 0.5, -0.5, -0.5], [1.0, -1.0, 0.0, 0.0], strict=True
    ):
        (fork,) = path.forks
        advantage_N = sample.streams["advantage_N"] * 0.5001 / 0.5
        np.testing.assert_allclose(advantage_N[:fork], first, atol=1e-12)
        np.testing.assert_allclose(advantage_N[fork : fork + 3], 0.0, atol=1e-12)
        np.testing.assert_allclose(advantage_N[fork + 3 :], second, atol=1e-12)


def test_a_segment_ends_at_a_fork_by_hand() -> None:
    """Rewards 1, 2, 4 with the mean 7/3. The first two fork after a, with 3/2 - 7/3 = -5/6, and go on with b both,
    which changes nothing, before they part: -1/2 and 1/2.
    """
    outcomes = forest("aXbc", "aXbd", "e")._replace(forks=[[1], [1], []])
    first, second, third = tree_of(outcomes)
    assert first == pytest.approx([-5 / 6, 0.0, -0.5], abs=1e-12)
    assert second == pytest.approx([-5 / 6, 0.0, 0.5], abs=1e-12)
    assert third == pytest.approx([5 / 3], abs=1e-12)


def test_an_early_end_is_all_the_leaves_it_would_have_been() -> None:
    """The first ends after one turn, with reward 1; the other goes on as two, with 2 each: 1, 1, 2, 2."""
    pool = pool_of(turns=[1])
    script = lambda index, turn: "end" if index < 2 or turn else "on"  # noqa: E731
    paths = played(pool, script, n=4)
    assert [(path.index, path.num_turns) for path in paths] == [(0, 1), (1, 1), (2, 2), (3, 2)]
    assert [(path.forks, path.num_inherited) for path in paths[:2]] == [((), 0), ((), 4)]
    judged = tuple(
        replace(path, reward_result=add_environment_rewards(RewardResult({}, None), path))
        for path in paths
    )
    assert [path.reward for path in judged] == [1.0, 1.0, 2.0, 2.0]
    config = RolloutConfig(
        n=4,
        environment=EnvironmentConfig(name="tools", tools=["calculator"]),
        fork=ForkConfig(turns=[1]),
    )
    event = rollout_event(Rollout([Group(judged)]), [], {}, 3, config, is_judged=True)
    sizes = [path.num_sampled for path in paths]
    new = [sizes[0], 0, sizes[2], sizes[3] - paths[3].forks[0]]
    assert event["fork_distinct"] == 0.75
    assert event["fork_new_tokens"] == pytest.approx(sum(new) / sum(sizes))
    assert event["completions"] == 4


def test_at_a_server_paths_fork_as_they_come_to_it() -> None:
    """As in this process: names, shares and environments; and a path that ends early is repeated."""
    pool = pool_of(turns=[1])
    renderer = pool.bridge.renderer
    stop_ids = derive_stop_set(renderer).ids
    row = row_of(renderer, "a")
    with FakeServer(ends=tuple(sorted(stop_ids)), max_model_len=4096) as server:
        config = from_mapping(ServerConfig, {"retries": 0})
        engine = ServerEngine.open(server.url, config, renderer.tokenizer, stop_ids, 4096)
        num_probes = len(server.requests)

        def judge(trajectories: Any) -> list[RewardResult]:
            return [RewardResult({}, float(t.index)) for t in trajectories]

        with closing(engine), closing(RolloutQueue(engine, Sampling(n=4), pool, judge)) as feed:
            feed.ask(0, row)
            group = feed.next()
            assert not feed.is_busy
    paths = group.trajectories
    assert [(path.index, path.reward) for path in paths] == [(i, float(i)) for i in range(4)]
    for one, other in (paths[:2], paths[2:]):
        (fork,) = one.forks
        assert one.forks == other.forks
        assert (one.num_inherited, other.num_inherited) == (0, fork)
        stop = int(one.sampled_at_N[fork])
        assert one.ids_T[:stop].tolist() == other.ids_T[:stop].tolist()
    asked = [body["seed"] for body in server.requests[num_probes:]]
    num_turns = sum(path.num_turns for path in paths)
    assert len(set(asked)) == len(asked) == num_turns - 2, "a first turn is asked once for two"


def test_an_environment_that_cannot_be_copied_is_refused_or_replayed() -> None:
    with pytest.raises(UserCodeError, match=r"environment Locked cannot be copied .*state=replay"):
        played(pool_of(Locked, turns=[1]), talk, n=2)
    found = played(pool_of(Locked, turns=[1], state="replay"), talk, n=2)
    assert [path.error for path in found] == [None, None]
    with pytest.raises(UserCodeError, match="Locked cannot be copied"):
        pool_of(Locked, turns=[1]).require_copies(row_of(renderer_of(), "a"))


def test_an_environment_that_answers_otherwise_the_second_time_is_refused() -> None:
    count = iter(range(99))

    class Dice(Diary):
        def reset(self, row: dict[str, Any]) -> None:
            self.pages.append(f"{next(count)}")

    with pytest.raises(UserCodeError, match="Dice does not repeat itself: its answer to turn 1"):
        played(pool_of(Dice, turns=[1], state="replay"), talk, n=2)


def test_a_copy_that_does_not_come_is_an_error_of_all_its_leaves() -> None:
    class Slow(Diary):
        def __deepcopy__(self, memo: object) -> Slow:
            raise SystemExit("no")

    found = played(pool_of(Slow, turns=[1]), talk, n=4)
    assert [path.error for path in found] == ["the environment's copy raised SystemExit: no"] * 4


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rollout.fork.turns": [2, 1]}, r"set rollout.fork.turns=\[1, 2\]"),
        ({"rollout.fork.turns": [8]}, "no turn comes after turn 8"),
        ({"rollout.n": 6, "rollout.fork.turns": [1, 2]}, "set rollout.n=8"),
        (
            {"rollout.fork.turns": None, "rollout.fork.n": 3},
            ErrorCode("rollout.fork.n/rollout.fork.turns"),
        ),
        (
            {"rollout.environment.name": None},
            ErrorCode("rollout.fork.turns/rollout.environment.name"),
        ),
        (
            {"rollout.environment.name": "agent:true"},
            "rollout.environment.name=agent:true: an agent branches by itself",
        ),
        ({"grpo.advantage": "group"}, "grpo.advantage=tree"),
        ({"method": "ppo", "grpo.advantage": None}, "grpo.advantage=tree"),
        (
            {
                "rollout.environment.name": None,
                "rollout.fork.turns": None,
                "rollout.local.prefix_cache_gib": 1,
            },
            "answers of one turn keep nothing for a next one",
        ),
        ({}, None),
    ],
)
def test_keys_that_contradict_are_refused(keys: dict[str, Any], message: str | None) -> None:
    given = {
        "method": "grpo",
        "model": "m",
        "data.train": "a.jsonl",
        "out": "o",
        "rollout.n": 4,
        "rollout.environment.name": "own.py:Game",
        "rollout.fork.turns": [1],
        "grpo.advantage": "tree",
        **keys,
    }
    given = {key: value for key, value in given.items() if value is not None}
    if message is None:
        assert from_mapping(METHODS["grpo"], given).rollout.fork.leaves == 2  # type: ignore[attr-defined]
        return
    with refused(message):
        from_mapping(METHODS[given["method"]], given)
