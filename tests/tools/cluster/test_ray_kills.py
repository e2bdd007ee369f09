"""Launches on simulated nodes that are killed at an exact point, grow, shrink or are refused: the losses are those of
one process, and every end is one line. ``make test-cluster``.

A rank of the launches here that is to die does nothing any more when it begins to do what ``plant`` says, until the
test kills its node, its process or the command.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from tests.helpers import online_runs
from tests.helpers.chat_runs import QUIET, chats, column, events, save_model, write_rows
from tests.helpers.ray_clusters import LIMIT, NODE, begin, node_of, nodes, processes_of

import taut
from taut.commands.runs import runs
from taut.errors import ClusterError
from taut_tools.cluster import ray_cluster
from taut_tools.cluster.placement import Ranks
from taut_tools.cluster.preflight import Expected, versions
from taut_tools.cluster.relay import Job

pytestmark = pytest.mark.cluster
STEPS = 6
HEALTH = {"period_ms": "1000", "timeout_ms": "5000", "failure_threshold": "3"}
"""A node that does not answer is dead after less than 20 seconds, where Ray's defaults take a minute."""
PAIRS = [
    {
        "prompt": "the cat saw",
        "chosen": "a big red dog " * (1 + n % 3),
        "rejected": "some birds " * (1 + n % 2),
    }
    for n in range(9)
]
PLANTED = """
import os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "taut.commands.train":
            sys.meta_path.remove(self)
            import json, time
            from taut.train import distributed
            real = distributed.Ranks.doing
            def doing(ranks, what):
                real(ranks, what)
                folder = os.environ["PLANTED"]
                try:
                    wanted = json.load(open(f"{folder}/wanted"))
                except FileNotFoundError:
                    return
                if ranks.rank == wanted["rank"] and what == wanted["what"] and ranks.size in wanted["sizes"]:
                    if len(wanted["sizes"]) == 1:
                        os.rename(f"{folder}/wanted", f"{folder}/done")
                    with open(f"{folder}/pid.new", "w") as file:
                        file.write(str(os.getpid()))
                    os.rename(f"{folder}/pid.new", f"{folder}/pid")
                    time.sleep(600)
            distributed.Ranks.doing = doing
if "MASTER_PORT" in os.environ and "PLANTED" in os.environ:
    sys.meta_path.insert(0, Finder())
    if "NODE_NAME" in os.environ:
        import socket
        socket.gethostname = lambda: os.environ["NODE_NAME"]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def cluster(place: Path) -> Iterator[Cluster]:
    """A head node, on which no rank has room, and none beside it: each test adds its own."""
    (place / "planted").mkdir()
    (place / "planted" / "sitecustomize.py").write_text(PLANTED)
    patch = pytest.MonkeyPatch()
    paths = [str(place / "planted"), os.environ.get("PYTHONPATH", "")]
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    patch.setenv("PLANTED", str(place / "planted"))
    for name, value in HEALTH.items():
        patch.setenv(f"RAY_health_check_{name}", value)
    with nodes(1, num_cpus=0) as cluster:
        yield cluster
    patch.undo()


@pytest.fixture
def three(cluster: Cluster) -> Iterator[Cluster]:
    """Room for three ranks, each on a node of its own; two are used where nothing else is said."""
    yield from _with_nodes(cluster, 3)


@pytest.fixture
def two(cluster: Cluster) -> Iterator[Cluster]:
    yield from _with_nodes(cluster, 2)


def _with_nodes(cluster: Cluster, number: int) -> Iterator[Cluster]:
    for _ in range(number):
        cluster.add_node(**NODE)
    yield cluster
    for node in list(cluster.worker_nodes):
        cluster.remove_node(node, allow_graceful=False)


@pytest.fixture(scope="module")
def keys(place: Path) -> dict[str, Any]:
    """A run of SFT."""
    return {
        **QUIET,
        "method": "sft",
        "model": str(save_model(place / "model", dtype=torch.float64)),
        "data.train": str(write_rows(place / "train.jsonl", chats(23))),
        "steps": STEPS,
        "check": "off",
        "contract.prompts": 0,
        "checkpoint.every": 2,
    }


@pytest.fixture(scope="module")
def losses(place: Path, keys: dict[str, Any]) -> list[float]:
    """Of one process."""
    return alone(keys, place / "alone")


def alone(keys: dict[str, Any], out: Path) -> list[float]:
    method = getattr(taut, keys["method"])
    method(**{key: value for key, value in keys.items() if key != "method"} | {"out": str(out)})
    return column(out, "loss")


def plant(place: Path, what: str, *, rank: int = 1, sizes: Sequence[int] = (2,)) -> None:
    """Which rank is to stop, of how many, when it begins to do what: once, or of each of several numbers of ranks."""
    (place / "planted" / "pid").unlink(missing_ok=True)
    wanted = {"rank": rank, "sizes": list(sizes), "what": what}
    (place / "planted" / "wanted").write_text(json.dumps(wanted))


def stopped(place: Path, process: subprocess.Popen[str]) -> int:
    """The process of the rank that has stopped."""
    path, deadline = place / "planted" / "pid", time.monotonic() + LIMIT
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return int(path.read_text())


def kill_node_of(cluster: Cluster, pid: int) -> None:
    cluster.remove_node(node_of(cluster, pid), allow_graceful=False)


def finished(process: subprocess.Popen[str], code: int = 0) -> str:
    """What it printed on stderr, at its end."""
    _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == code, stderr
    return stderr


def require_same(out: Path, losses: list[float]) -> None:
    assert column(out, "loss") == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize("what", ["taking step 4", "saving step-000004"])
def test_a_node_that_dies_is_replaced(
    three: Cluster,
    place: Path,
    keys: dict[str, Any],
    losses: list[float],
    tmp_path: Path,
    what: str,
) -> None:
    plant(place, what)
    process = begin({**keys, "out": str(tmp_path / "out")}, three.address, "nodes=2")
    kill_node_of(three, stopped(place, process))
    stderr = finished(process)
    assert ", restart 1" in stderr
    require_same(tmp_path / "out", losses)
    (resumed,) = events(tmp_path / "out", "resume")[1:]
    assert resumed["from_step"] >= 2  # at most the steps since the last checkpoint are lost


def test_a_node_that_falls_silent_is_replaced(
    three: Cluster, place: Path, keys: dict[str, Any], losses: list[float], tmp_path: Path
) -> None:
    """All of its processes are stopped: its connections stay open, and nothing answers on them."""
    plant(place, "taking step 4")
    process = begin({**keys, "out": str(tmp_path / "out")}, three.address, "nodes=2")
    silent = processes_of(node_of(three, stopped(place, process)))
    try:
        for pid in silent:
            os.kill(pid, signal.SIGSTOP)
        stderr = finished(process)
    finally:
        for pid in silent:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert ", restart 1" in stderr
    require_same(tmp_path / "out", losses)


def test_dpo_on_two_nodes(two: Cluster, place: Path, keys: dict[str, Any], tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "pairs.jsonl", PAIRS)
    preferences = {**keys, "method": "dpo", "data.train": str(rows), "steps": 3}
    process = begin({**preferences, "out": str(tmp_path / "out")}, two.address, "nodes=2")
    finished(process)
    require_same(tmp_path / "out", alone(preferences, tmp_path / "alone"))


def test_grpo_where_a_node_dies_in_a_rollout(three: Cluster, place: Path, tmp_path: Path) -> None:
    model = online_runs.save_models(tmp_path)
    asked = online_runs.keys_of("grpo", model, tmp_path / "asked", checkpoint__every=1)
    plant(place, "preparing step 3")
    process = begin({**asked, "out": str(tmp_path / "out")}, three.address, "nodes=2")
    kill_node_of(three, stopped(place, process))
    finished(process)
    require_same(tmp_path / "out", alone(asked, tmp_path / "alone"))


def test_two_ranks_become_one_and_three(
    two: Cluster, place: Path, keys: dict[str, Any], losses: list[float], tmp_path: Path
) -> None:
    plant(place, "taking step 3")
    words = ["nodes=3", "min_workers=1", "resize_every=1"]
    process = begin({**keys, "out": str(tmp_path / "out")}, two.address, *words)
    first = stopped(place, process)
    plant(place, "taking step 5", rank=0, sizes=(1, 2))
    kill_node_of(two, first)
    stopped(place, process)
    for _ in range(2):
        two.add_node(**NODE)
    stderr = finished(process)
    require_same(tmp_path / "out", losses)
    sizes = [event["num_ranks"] for event in events(tmp_path / "out", "start")]
    assert (sizes[0], sizes[-1]) == (2, 3), stderr
    assert 1 in sizes


def test_a_rank_that_dies_once_too_often_ends_the_launch(
    two: Cluster, place: Path, keys: dict[str, Any], tmp_path: Path
) -> None:
    plant(place, "taking step 4")
    out = tmp_path / "out"
    process = begin({**keys, "out": str(out)}, two.address, "nodes=2", "restarts=0")
    os.kill(stopped(place, process), signal.SIGKILL)
    stderr = finished(process, 1)
    assert stderr.splitlines()[-1].startswith("taut: error: rank 1 on ")
    assert "was ended by SIGKILL, after 0 restarts (restarts=0)" in stderr
    (state,) = runs([out])
    assert state.resumes_after == 2


def test_the_command_is_killed_and_given_again(
    two: Cluster, place: Path, keys: dict[str, Any], losses: list[float], tmp_path: Path
) -> None:
    plant(place, "taking step 4")
    out = tmp_path / "out"
    process = begin({**keys, "out": str(out)}, two.address, "nodes=2")
    rank = stopped(place, process)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{rank}").exists():
        assert time.monotonic() < deadline, "the ranks outlived the command"
        time.sleep(0.1)
    (state,) = runs([out])
    assert (state.state, state.resumes_after) == ("died", 2)
    finished(begin({**keys, "out": str(out), "resume": True}, two.address, "nodes=2"))
    require_same(out, losses)
    assert not list(tmp_path.glob("taut-launch-*"))


def test_ctrl_c_saves_the_state_and_one_machine_goes_on(
    two: Cluster, keys: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    plain = {**keys, "checkpoint.every": 0, "optim.warmup_steps": 0}  # of any number of steps
    process = begin({**plain, "out": str(out), "steps": 400}, two.address, "nodes=2")
    deadline = time.monotonic() + LIMIT
    while not (out / "events.jsonl").exists() or len(events(out, "step")) < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    stderr = finished(process, 75)
    assert "taut: error: interrupted by SIGINT: the state after step " in stderr
    (state,) = runs([out])
    assert state.state == "interrupted"
    done = state.step
    taut.resume(out, steps=done + 1)
    require_same(out, alone({**plain, "steps": done + 1}, tmp_path / "alone"))


def test_what_cannot_be_placed_is_told_within_a_minute(
    two: Cluster, keys: dict[str, Any], tmp_path: Path
) -> None:
    began = time.monotonic()
    process = begin({**keys, "out": str(tmp_path / "out")}, two.address, "nodes=3", "wait=5")
    (line,) = finished(process, 2).splitlines()
    assert time.monotonic() - began < 60
    assert line.startswith(
        "taut: error: no room for 3 nodes with 1 CPU each, for 5 s; found 3 nodes: "
    )
    assert line.count("has room") == 2
    assert "0 of 0 CPU free" in line  # the head node


def test_a_run_that_taut_refuses_ends_once(
    two: Cluster, keys: dict[str, Any], tmp_path: Path
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": 3}\n')
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = begin(
            {**keys, "out": str(tmp_path / "a")}, two.address, "nodes=2", f"port={port}"
        )
        line = finished(process, 2).splitlines()[-1]
        assert line.startswith(f"taut: error: port {port} of ")
    process = begin(
        {**keys, "data.train": str(bad), "out": str(tmp_path / "b")}, two.address, "nodes=2"
    )
    lines = finished(process, 2).splitlines()
    assert [line for line in lines if line.startswith("taut: error: ")] == [lines[-1]]
    assert "bad.jsonl:1" in lines[-1]
    assert not (tmp_path / "b").exists()


def test_nodes_and_clusters_that_do_not_fit_are_refused(
    two: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = Expected(str(tmp_path), str(tmp_path), versions())
    options: dict[str, Any] = {"restarts": 0, "wait": 30, "resize_every": 60}
    options["address"] = two.address
    job, ranks = Job([], str(tmp_path), {}, 0), Ranks(1, 1, 1, 1, 1, 0)
    with pytest.raises(ClusterError, match=r"^node \S+ \(\w+\) does not see /nowhere/8B, in which"):
        ray_cluster.launch(job, ranks, replace(fits, directory="/nowhere/8B"), **options)
    monkeypatch.setattr(ray, "__version__", "1.0")
    with pytest.raises(ClusterError, match=r"Ray: 1\.0 .*; expected the same versions; "):
        ray_cluster.launch(job, ranks, fits, **options)
    assert not ray.is_initialized()
    ray._private.worker.global_worker.node = None  # else its nodes could not be removed


def test_a_node_that_does_not_see_the_model_is_named(
    cluster: Cluster, keys: dict[str, Any], tmp_path: Path
) -> None:
    """It has another home directory, in which there is none."""
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir()
    other.mkdir()
    (home / "model").symlink_to(keys["model"])
    nodes = [
        cluster.add_node(**NODE, env_vars={"HOME": str(place), "NODE_NAME": f"node-{place.name}"})
        for place in (home, other)
    ]
    try:
        asked = {**keys, "model": "~/model", "check": "quick", "out": str(tmp_path / "out")}
        process = begin(asked, cluster.address, "nodes=2", HOME=str(home))
        lines = finished(process, 1).splitlines()
    finally:
        for node in nodes:
            cluster.remove_node(node, allow_graceful=False)
    (line,) = (line for line in lines if line.startswith("taut: error: "))
    assert "node-other" in line
    assert "~/model" in line
    assert not (tmp_path / "out").exists()
