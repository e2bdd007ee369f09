"""The environment that the page shows is one."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.pages import ROOT
from tests.unit.rl.test_environment import Scripted, renderer_of, row_of, world_of

from taut.inference.engine import Sampling
from taut.rl.environment import EnvironmentConfig
from taut.rl.sampler import sample_trajectories


def test_the_example_plays(tmp_path: Path) -> None:
    (code,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/environments.md").read_text(), re.DOTALL
    )
    file = tmp_path / "guess.py"
    file.write_text(code)
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
