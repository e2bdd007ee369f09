"""Servers of roll-outs and of rewards that Ray places on two simulated nodes, next to two ranks: what one of them was
asked is lost with no death of it. ``make test-cluster``.
"""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster
from tests.helpers.chat_runs import column, events
from tests.helpers.online_runs import keys_of, save_models, train
from tests.helpers.ray_clusters import LIMIT, NODE, begin, losses_alone, node_of, nodes, serving
from tests.tools.score.test_score import save_reward

from taut.models.settings import NewHead

pytestmark = pytest.mark.cluster
SCORES = "exit 3"
"""The command of a server of rewards that is not started."""
SERVED = {"name": "reward_server", "options": {"url": "{reward_servers}"}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Room for a rank and a server on each node."""
    with nodes(2, num_cpus=2) as cluster:
        yield cluster


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "rollout__server__concurrency": 2,
        "rollout__server__backoff": 0.01,
        "rollout__server__retries": 1,
    }
    keys = keys_of("grpo", save_models(tmp_path), tmp_path, **keys)
    return {**keys, "rollout.stop": ["e"]}


def require_gone(pid: int) -> None:
    """Raise unless a process ends soon."""
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline, f"server {pid} outlived the command"
        time.sleep(0.1)


def asked(folder: Path, but: set[str]) -> tuple[str, int]:
    """The port and the process of a server that samples, when there is one on another port than ``but``."""
    deadline = time.monotonic() + LIMIT
    while True:
        for file in folder.iterdir():
            if file.name not in but | {"hold"} and file.read_text():
                return file.name, int(file.read_text())
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_server_that_is_killed_twice_costs_no_answer(
    cluster: Cluster, keys: dict[str, Any], tmp_path: Path
) -> None:
    """Answers are a function of weights and seed, so the losses are those of one process and one server."""
    folder = tmp_path / "servers"
    command = serving(folder)
    (folder / "hold").touch()
    words = ["nodes=2", "servers=2", "gpus_per_server=0", "server_restarts=2"]
    out = tmp_path / "out"
    process = begin({**keys, "out": str(out)}, cluster.address, *words, command)
    seen: set[str] = set()
    first, pid = asked(folder, seen)
    other, _ = asked(folder, {first})
    seen = {first, other}
    for _ in range(2):
        os.kill(pid, signal.SIGKILL)
        port, pid = asked(
            folder, seen
        )  # it was started again, and samples from the weights of the run
        seen.add(port)
    (folder / "hold").unlink()
    _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, stderr
    assert stderr.count(" is ready") == 4
    for port in seen:
        require_gone(int((folder / port).read_text()))
    assert stderr.count("ended with 137") == 2
    assert [event["servers"] for event in events(out, "rollout")][-1] == 2
    assert sum(event["server_restarts"] for event in events(out, "rollout")) >= 2
    alone = losses_alone(keys, tmp_path / "alone")
    assert column(out, "loss") == pytest.approx(alone, rel=1e-9)
    assert not list(tmp_path.glob("taut-launch-*"))


def test_servers_next_to_the_ranks_sleep_while_those_train(
    cluster: Cluster, keys: dict[str, Any], tmp_path: Path
) -> None:
    """Where a node dies, the ranks of the next attempt get servers on other nodes."""
    folder = tmp_path / "servers"
    command = serving(folder)
    (folder / "hold").touch()
    words = ["nodes=2", "servers=2", "gpus_per_server=0", "colocate=true", "cpus_per_worker=2"]
    out = tmp_path / "out"
    cluster.add_node(**{**NODE, "num_cpus": 2})  # in place of the one that is killed
    process = begin({**keys, "out": str(out)}, cluster.address, *words, command)
    first, one = asked(folder, set())
    _, other = asked(folder, {first})
    (node, *_) = filter(None, (node_of(cluster, one), node_of(cluster, other)))
    cluster.remove_node(node, allow_graceful=False)
    (folder / "hold").unlink()
    _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, stderr
    assert ", restart 1" in stderr
    for pid in filter(None, (file.read_text() for file in folder.iterdir())):
        require_gone(int(pid))
    alone = losses_alone(keys, tmp_path / "alone")
    assert column(out, "loss") == pytest.approx(alone, rel=1e-9)


def test_a_reward_server_that_is_killed_costs_no_number(
    cluster: Cluster, keys: dict[str, Any], tmp_path: Path
) -> None:
    """The rewards are those of the model in the process of a run alone."""
    judge = save_reward(tmp_path / "judge", NewHead(seed=3))
    del keys["rollout.stop"]
    plain = {key: value for key, value in keys.items() if not key.startswith("rollout.server.")}
    plain |= {"steps": 8, "checkpoint.every": 0}
    words = ["nodes=2", "reward_servers=2", "gpus_per_reward_server=0"]
    words.append(f"reward_server_command={{serve}} {shlex.quote(str(judge))} dtype=float64")
    out = tmp_path / "out"
    process = begin({**plain, "rewards": [SERVED], "out": str(out)}, cluster.address, *words)
    deadline = time.monotonic() + LIMIT
    while not (out / "events.jsonl").exists() or not events(out, "step"):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    serving = [
        int(path.name)
        for path in Path("/proc").glob("[0-9]*")
        if (words := path.joinpath("cmdline").read_bytes().split(b"\0"))[3:4] == [b"serve-reward"]
        and str(judge).encode() in words
    ]
    assert len(serving) == 2
    os.kill(serving[0], signal.SIGKILL)
    _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, stderr
    assert "taut: launch: reward server " in stderr
    assert stderr.count(" ended with 137") == 1
    for pid in serving:
        require_gone(pid)
    options = {"model": str(judge), "dtype": "float64"}
    alone = [{"name": "reward_model", "options": options}]
    train({**plain, "rewards": alone, "out": str(tmp_path / "alone")})
    assert column(out, "loss") == pytest.approx(column(tmp_path / "alone", "loss"), rel=1e-9)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["servers=2", "server_command=echo no such model >&2; exit 3"],
            "ended with 3: no such model; expected",
        ),
        (
            ["servers=2", "server_command=sleep 60", "server_start=1"],
            "not all of 2 servers answer at /health after 1 s",
        ),
        (
            ["servers=1", "reward_servers=2", f"reward_server_command={SCORES}", "wait=5"],
            "no room for 2 nodes with 1 CPU each and 1 server with 1 CPU each and 2 reward servers with 1 CPU each: 5 "
            "CPU of 4 free in all, for 5 s; found 2 nodes: ",
        ),
    ],
)
def test_servers_that_do_not_start_are_one_line(
    cluster: Cluster, keys: dict[str, Any], tmp_path: Path, words: list[str], problem: str
) -> None:
    out = tmp_path / "out"
    began = time.monotonic()
    asked = ["nodes=2", "gpus_per_server=0", *words]
    if "reward_servers=2" in words:
        asked.append("gpus_per_reward_server=0")
        keys["rewards"] = [SERVED]
    process = begin({**keys, "out": str(out)}, cluster.address, *asked)
    _, stderr = process.communicate(timeout=LIMIT)
    assert time.monotonic() - began < 60
    assert process.returncode == 2
    assert problem in stderr.splitlines()[-1]
    assert stderr.splitlines()[-1].startswith("taut: error: ")
    assert not out.exists()
