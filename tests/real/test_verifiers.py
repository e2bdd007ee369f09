"""Environments of the library verifiers itself, of whichever of its interfaces is installed. From 0.4 on the library
starts its chat program with uv, which downloads what that needs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from tests.unit.rl.test_environment import Scripted, renderer_of, row_of, world_of

from taut.inference.settings import Sampling
from taut.rl.sampler import Trajectory, sample_trajectories
from taut.rl.settings import EnvironmentConfig

pytest.importorskip("verifiers", reason="the extra verifiers is not installed")
IS_BELOW = tuple(map(int, metadata.version("verifiers").split(".")[:2])) < (0, 4)
pytestmark = [pytest.mark.real, pytest.mark.slow]
below = pytest.mark.skipif(not IS_BELOW, reason="another interface of verifiers is installed")
newer = pytest.mark.skipif(IS_BELOW, reason="another interface of verifiers is installed")

GUESS = """
import verifiers as vf
from datasets import Dataset

class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        last = messages[-1]
        said = last["content"] if isinstance(last, dict) else last.content
        state["found"] = state["answer"] in said
        return [{"role": "user", "content": "Right." if state["found"] else "No. Again."}]

    @vf.stop
    async def is_found(self, state):
        return len(state["trajectory"]) > 0 and state["answer"] in str(
            state["trajectory"][-1]["completion"]
        )

def found(completion, answer, state):
    return 1.0 if answer in str(completion[-1]) else 0.0

def brief(state):
    return 1.0 / len(state["trajectory"])

def load_environment(number="7"):
    rows = [{"question": "Guess my number.", "answer": number}]
    rubric = vf.Rubric(funcs=[found, brief], weights=[1.0, 0.5])
    return Guess(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=4)
"""
TASKSET = """
import verifiers.v1 as vf

class Config(vf.TasksetConfig):
    number: str = "7"

class Data(vf.TaskData):
    number: str

class Guess(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def found(self, trace: vf.Trace) -> float:
        return float(self.data.number in (trace.last_reply or ""))

class GuessTaskset(vf.Taskset[Guess, Config]):
    def load(self):
        for n in range(3):
            prompt = f"Guess my number ({n})."
            yield Guess(Data(prompt=prompt, system_prompt="Be brief.", number=self.config.number), self.config.task)

__all__ = ["GuessTaskset"]
"""


def played(name: str, options: dict[str, Any], script: Callable[[int], str]) -> Trajectory:
    """The trajectory of an environment's first task."""
    from taut_tools.adapters.verifiers import rows

    (made,) = rows(name, 1, **options)
    renderer = renderer_of()
    row = replace(row_of(renderer, **made), prompt=tuple(made["prompt"]))
    config = EnvironmentConfig(name=f"verifiers:{name}", options=options, timeout=300)
    with closing(world_of(config, renderer, rows=[row])) as pool:
        engine = Scripted(renderer, lambda name, index, turn: script(turn))
        (trajectory,) = sample_trajectories(engine, [row], Sampling(), pool)
    return trajectory


@below
def test_a_game_of_several_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "guess_number.py").write_text(GUESS)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = played("guess-number", {"number": "9"}, lambda turn: ["Is it 3?", "Is it 9?"][turn])
    assert (found.error, found.finish_reason, found.num_turns) == (None, "stop", 2)
    assert found.rewards == {"environment": 1.25}
    assert [m["content"] for m in found.messages] == ["Is it 3?", "No. Again.", "Is it 9?"]
    assert found.branches == ()


@below
def test_an_environment_that_comes_with_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks of reasoning-gym, judged by its verifiers: the sum is worth 1, another number less."""
    gym = pytest.importorskip("reasoning_gym")
    (tmp_path / "sums_env.py").write_text(
        "from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv as Env\n"
        "load_environment = lambda gym: Env(gym, num_train_examples=2, num_eval_examples=1)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = gym.create_dataset("chain_sum", size=3, seed=0)[0]
    for answer, is_right in ((entry["answer"], True), ("no number", False)):
        said = f"<answer>{answer}</answer>"
        found = played("sums-env", {"gym": "chain_sum"}, lambda turn, said=said: said)
        assert (found.error, found.num_turns) == (None, 1)
        assert (found.rewards["environment"] == 1.0) == is_right
        assert found.first_messages is not None
        assert found.first_messages[-1]["content"] == entry["question"]


@newer
def test_a_taskset_with_the_library_s_chat_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "guess_taskset.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "guess_taskset", raising=False)
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    options = {"taskset": {"number": "9"}, "agent": agent}
    found = played("guess-taskset", options, lambda turn: "Is it 9?")
    assert (found.error, found.finish_reason, found.num_turns) == (None, "stop", 1)
    assert found.rewards == {"environment": 2.0}
    assert found.first_messages is not None
    assert [m["role"] for m in found.first_messages] == ["system", "user"]
