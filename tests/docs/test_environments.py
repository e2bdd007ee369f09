"""The environment and the agent that the page shows are such."""

from __future__ import annotations

import re
import sys
from contextlib import closing
from pathlib import Path

import pytest
from tests.docs.pages import ROOT
from tests.unit.rl.test_environment import Scripted, renderer_of, row_of, world_of

from taut.inference.settings import Sampling
from taut.rl.sampler import sample_trajectories
from taut.rl.settings import EnvironmentConfig


def code_of(number: int) -> str:
    """The page's piece of Python with this number."""
    page = (ROOT / "docs/environments.md").read_text()
    pieces: list[str] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    return pieces[number]


def test_the_agent_asks(tmp_path: Path) -> None:
    pytest.importorskip("openai", reason="the client of the example is not installed")
    (tmp_path / "agent.py").write_text(code_of(1))
    renderer = renderer_of()
    config = EnvironmentConfig(name=f"agent:{sys.executable} {tmp_path}/agent.py")
    row = row_of(renderer, task="What is 2 + 3?", answer="5")
    with closing(world_of(config, renderer)) as environments:
        engine = Scripted(renderer, lambda name, index, turn: "It is 5.")
        (found,) = sample_trajectories(engine, [row], Sampling(), environments)
    assert (found.error, found.rewards) == (None, {"environment": 1.0})


def test_the_example_plays(tmp_path: Path) -> None:
    file = tmp_path / "guess.py"
    file.write_text(code_of(0))
    renderer = renderer_of()
    environments = world_of(EnvironmentConfig(name=f"{file}:Guess"), renderer)
    said = [["50", "hm", "42"], ["7"] * 6, ["50", "hm", "and so on and on"]]
    engine = Scripted(
        renderer,
        lambda name, index, turn: said["abc".index(name[0])][turn],
        most=8,
    )
    rows = [row_of(renderer, name, secret=42) for name in "abc"]
    found, lost, cut = sample_trajectories(engine, rows, Sampling(), environments)
    assert found.rewards == {"found": 1.0, "speed": 0.5}
    assert [m["content"] for m in found.messages[1::2]] == ["Lower.", "That is no number."]
    assert (lost.rewards, lost.num_turns, lost.finish_reason) == ({"found": 0.0}, 6, "stop")
    assert (cut.rewards, cut.num_turns, cut.finish_reason) == ({"found": 0.0}, 3, "length")
