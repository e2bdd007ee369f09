"""``taut launch ray`` with one rank and one roll-out server on this machine: losses, exit code and state of one
process. Several nodes, and what dies: test_ray_kills.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.helpers.chat_runs import column, events
from tests.helpers.online_runs import keys_of, save_models
from tests.helpers.ray_clusters import LIMIT, begin, losses_alone, serving

from taut import cli
from taut.commands.runs import runs


@pytest.mark.slow
def test_a_rank_and_a_server_give_the_losses_of_one_process(tmp_path: Path) -> None:
    keys = keys_of("grpo", save_models(tmp_path), tmp_path, steps=2, batch__samples_per_step=2)
    keys |= {"rollout.n": 2, "rollout.stop": ["e"], "log.console": True}
    folder, out = tmp_path / "servers", tmp_path / "out"
    words = ["servers=1", "gpus_per_server=0", serving(folder)]
    process = begin({**keys, "out": str(out)}, "local", *words)
    stdout, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, stderr
    first, second = (line for line in stderr.splitlines() if line.startswith("taut: launch: "))
    assert re.fullmatch(r"taut: launch: server 0 on [\d.]+ \(\w{6}\) is ready", first)
    assert re.fullmatch(r"taut: launch: 1 rank: 1 on [\d.]+ \(\w{6}\)", second)
    assert "step 2/2" in stdout
    assert [event["servers"] for event in events(out, "rollout")] == [1, 1]
    (state,) = runs([out])
    assert (state.state, state.step) == ("finished", 2)
    assert not list(tmp_path.glob("taut-launch-*"))
    alone = losses_alone(keys, tmp_path / "alone")
    assert column(out, "loss") == pytest.approx(alone, rel=1e-9)


def test_a_cluster_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model=m", "data.train=a.jsonl", "steps=1", f"out={tmp_path / 'out'}"]
    assert cli.main(["launch", "ray", *words, "address=127.0.0.1:1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("taut: error: address=127.0.0.1:1: found none (")
