"""``taut launch ray`` on two simulated nodes: losses, exit code and state of one process. What dies: tests/cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.chat_runs import PLAIN, QUIET, column, events, sft
from tests.ray_clusters import LIMIT, begin, nodes

from taut.commands.runs import runs

KEYS = {**QUIET, "check": "off", "contract.prompts": 0, "steps": 2, "log.console": True}


def test_two_nodes_give_the_losses_of_one_process(model: Path, train: Path, tmp_path: Path) -> None:
    sft(model, train, tmp_path / "alone", steps=2, **PLAIN)
    keys = {**KEYS, "model": str(model), "data.train": str(train), "out": str(tmp_path / "out")}
    with nodes(2) as cluster:
        process = begin(keys, cluster.address, "nodes=2")
        stdout, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, stderr
    assert column(tmp_path / "out", "loss") == pytest.approx(
        column(tmp_path / "alone", "loss"), rel=1e-9
    )
    assert events(tmp_path / "out", "start")[0]["num_ranks"] == 2
    assert "step 2/2" in stdout
    assert stderr.startswith("taut: launch: 2 ranks: 1 on ")
    assert not list(tmp_path.glob("taut-launch-*"))
    (state,) = runs([tmp_path / "out"])
    assert (state.state, state.step) == ("finished", 2)


def test_a_cluster_that_is_not_there_is_one_line(model: Path, train: Path, tmp_path: Path) -> None:
    keys = {**KEYS, "model": str(model), "data.train": str(train), "out": str(tmp_path / "out")}
    process = begin(keys, "127.0.0.1:1")
    _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == 2
    (line,) = stderr.splitlines()
    assert line.startswith("taut: error: address=127.0.0.1:1: found none (")
