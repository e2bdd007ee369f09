"""The preflight on two ranks that take themselves for two machines: each planted difference is found by its own check,
which names the machine, and two that are alike pass.

Both ranks live in one process each for all cases: joining takes longer than asking.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.chat_runs import QUIET, chats, save_model, words_of, write_rows
from tests.helpers.forked_processes import fork, worlds
from tests.helpers.selected import selected
from tests.helpers.slow_cases import slow_except

from taut.checks import OF_NODES, cluster
from taut.checks.cluster import Cluster, hash_file, odd_ones
from taut.checks.examine import before_launch, examine
from taut.checks.registry import Finding
from taut.config import load
from taut.errors import CheckFailed
from taut.methods.method import RunConfig
from taut.train import distributed
from taut.train.distributed import Ranks

Patch = pytest.MonkeyPatch
ALIKE: dict[str, Any] = {"model": "model", "data.train": "a.jsonl", "out": "../out", "seed": 1}


def another_version(patch: Patch) -> None:
    real = cluster.versions
    patch.setattr(cluster, "versions", lambda device: {**real(device), "torch": "2.12.0"})


def another_small_version(patch: Patch) -> None:
    real = cluster.versions
    patch.setattr(cluster, "versions", lambda device: {**real(device), "rich": "1.0"})


def another_clock(patch: Patch) -> None:
    real = time.time
    patch.setattr(time, "time", lambda: real() - 300)


def a_full_disk(patch: Patch) -> None:
    real = os.statvfs

    def full(place: Any) -> Any:
        found = list(real(place))
        found[4] = 10  # f_bavail
        return os.statvfs_result(found)

    patch.setattr(os, "statvfs", full)


def another_processor(patch: Patch) -> None:
    patch.setattr(cluster, "describe", lambda _: {"name": "Z80", "memory_bytes": 65536})


def a_wrong_sum(patch: Patch) -> None:
    real = Ranks.sum_in_place

    def sum_in_place(ranks: Ranks, tensor: torch.Tensor) -> None:
        real(ranks, tensor)
        tensor[3] += 1

    patch.setattr(Ranks, "sum_in_place", sum_in_place)


def other_data(patch: Patch) -> None:
    text = Path("a.jsonl").read_text()
    Path("other.jsonl").write_text(text.replace("cat", "cow"))


def fewer_data(patch: Patch) -> None:
    Path("other.jsonl").write_text("")


def another_model(patch: Patch) -> None:
    file = Path("other_model/model.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def no_model(patch: Patch) -> None:
    shutil.rmtree("other_model")


def no_permission(patch: Patch) -> None:
    patch.setattr(os, "access", lambda *_: False)


def nothing(patch: Patch) -> None:
    pass


class Case:
    """What is planted on the second rank, which check finds it, and the words that it says. ``keys``: of both ranks."""

    def __init__(
        self,
        plant: Callable[[Patch], None],
        name: str,
        says: str,
        outcome: str = "failed",
        **keys: Any,
    ) -> None:
        self.plant, self.name, self.says, self.outcome = plant, name, says, outcome
        self.keys = {key.replace("__", "."): value for key, value in keys.items()}
        self.own_keys: dict[str, Any] = {}
        """Of the second rank."""

    def own(self, **keys: Any) -> Case:
        self.own_keys = {key.replace("__", "."): value for key, value in keys.items()}
        return self


TORCH = f"node1: torch is 2.12.0; expected {torch.__version__}"
CASES = {
    "version": Case(another_version, "cluster.versions", TORCH),
    "small version": Case(
        another_small_version, "cluster.versions", "node1: rich is 1.0; expected", "warning"
    ),
    "settings": Case(nothing, "cluster.settings", "node1: seed is 2; expected 1").own(seed=2),
    "output": Case(
        nothing, "cluster.output", "out on node1: another folder of the same name", out="out"
    ),
    "output to be made": Case(
        nothing, "cluster.output", "runs/a on node1: another folder of the same name", out="runs/a"
    ),
    "no permission": Case(no_permission, "cluster.output", "on node1: no permission to write"),
    "stream": Case(
        nothing,
        "cluster.cache",
        "cache on node1: another folder of the same name; expected one folder: a stream",
        data__cache="cache",
        data__train="rows",
        data__streaming=True,
        steps=3,
    ),
    "data": Case(
        other_data,
        "cluster.data",
        "node1: other.jsonl has other content (",
        data__train="other.jsonl",
    ),
    "fewer data": Case(
        fewer_data,
        "cluster.data",
        "node1: other.jsonl has 0 bytes; expected",
        data__train="other.jsonl",
    ),
    "model": Case(
        another_model,
        "cluster.model",
        "node1: other_model/model.safetensors has other content (",
        model="other_model",
    ),
    "no model": Case(
        no_model, "cluster.model", "on node1: model=other_model does not exist", model="other_model"
    ),
    "clock": Case(
        another_clock, "cluster.clocks", "the clock of node1 is 300.0 s behind", "warning"
    ),
    "processor": Case(another_processor, "cluster.gpus", "node1, rank 1: Z80; expected", "warning"),
    "sum": Case(
        a_wrong_sum, "cluster.all_reduce", "node1, rank 1: 1 of 4,096 sums are wrong by gloo"
    ),
    "disk": Case(a_full_disk, "cluster.disk", "node1: 0.00 GB are free for out ("),
}
SOUND = {
    "alike": Case(nothing, "cluster.data", " bytes, compared whole", "passed"),
    "own caches": Case(
        nothing,
        "cluster.cache",
        "is not shared: each node tokenizes the data for itself",
        "passed",
        data__cache="cache",
    ),
}


def config_of(case: Case, rank: int) -> RunConfig:
    keys = {**QUIET, **ALIKE, "data.cache": "../cache", **case.keys}
    return load(RunConfig, None, words_of({**keys, **(case.own_keys if rank else {})}))


def a_node(folder: str, names: Sequence[str], world: dict[str, str]) -> None:
    """The body of a rank, in the folder of its machine: the cases, and what the first rank found."""
    os.environ.update(world)
    rank = int(world["RANK"])
    os.chdir(Path(folder) / f"node{rank}")
    with Patch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: f"node{rank}")
        patch.setitem(cluster.SUMMED, "cpu", 4096)
        patch.setitem(cluster.SLOWEST, "cpu", 0.0)
        ranks = distributed.start("cpu")
        found: dict[str, Any] = {}
        for name in names:
            case = {**CASES, **SOUND}[name]
            for copied, original in (("other.jsonl", "a.jsonl"), ("other_model", "model")):
                shutil.rmtree(copied, ignore_errors=True)
                (shutil.copytree if Path(original).is_dir() else shutil.copy)(original, copied)
            began = time.monotonic()
            with Patch.context() as planted:
                if rank:
                    case.plant(planted)
                run = config_of(case, rank)
                try:
                    launched = before_launch(run, ranks)
                    raised = None if launched else "nothing was asked"
                except CheckFailed as error:
                    raised = str(error)
                answered = examine(Cluster(run, ranks)).results
            found[name] = {
                "raised": raised,
                "seconds": time.monotonic() - began,
                "checks": [one.as_fields() for one in answered],
            }
        found["left"] = [str(path) for path in Path(folder).rglob("*preflight*")]
        if rank == 0:
            (Path(folder) / "found.json").write_text(json.dumps(found))
        distributed.stop(ranks)


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The findings of each case that is asked for."""
    asked = selected(request)
    names = [name for name in {**CASES, **SOUND} if any(f"[{name}]" in test for test in asked)]
    folder = tmp_path_factory.mktemp("nodes")
    for node in ("node0", "node1"):
        save_model(folder / node / "model")
        write_rows(folder / node / "a.jsonl", chats(5))
        for name in ("out", "runs", "rows"):
            (folder / node / name).mkdir()
    (folder / "out").mkdir()
    assert fork(a_node, [(str(folder), names, world) for world in worlds(2)]) == [0, 0]
    result: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return result


@pytest.mark.parametrize("name", slow_except(["version", "data"], CASES))
def test_a_planted_difference_is_found_by_its_check_alone(name: str, found: dict[str, Any]) -> None:
    case = CASES[name]
    wrong = {one["name"]: one for one in found[name]["checks"] if one["remedy"]}
    assert list(wrong) == [case.name]
    finding = wrong[case.name]
    assert finding["outcome"] == case.outcome
    assert case.says in finding["says"]
    assert "expected" in f"{finding['says']}; {finding['remedy']}"
    if case.outcome == "failed":  # and no run starts
        assert found[name]["raised"].startswith(f"{case.name}: {finding['says']}")
    else:
        assert found[name]["raised"] is None


@pytest.mark.parametrize("name", slow_except(["alike"], SOUND))
def test_machines_that_are_alike_pass(name: str, found: dict[str, Any]) -> None:
    case, checks = SOUND[name], {one["name"]: one for one in found[name]["checks"]}
    assert list(checks) == list(OF_NODES)
    assert {one["outcome"] for one in checks.values()} == {"passed"}
    assert case.says in checks[case.name]["says"]
    assert checks["cluster.processes"]["says"] == "2 processes on 2 nodes"
    assert checks["cluster.processes"]["notes"] == ["node0: rank 0", "node1: rank 1"]
    assert checks["cluster.all_reduce"]["number"] > 0
    assert found[name]["raised"] is None


def test_every_check_has_a_planted_difference() -> None:
    assert {case.name for case in CASES.values()} == set(OF_NODES) - {"cluster.processes"}


def test_it_takes_seconds_and_leaves_nothing(found: dict[str, Any]) -> None:
    seconds = [one["seconds"] for name, one in found.items() if name != "left"]
    assert max(seconds) < 60  # two examinations
    assert found["left"] == []


def test_the_node_that_most_disagree_with_is_named() -> None:
    """Of three, the one; of two, the second. ``counts`` by value: {"a": 1, "b": 2} -> b is expected."""
    assert odd_ones({"x": "a", "y": "b", "z": "b"}) == [("x", "a", "b")]
    assert odd_ones({"x": "a", "y": "b"}) == [("y", "b", "a")]
    assert odd_ones({"x": 1, "y": 1}) == []


def examined(ranks: int, *nodes: Sequence[int]) -> Finding:
    """What the first check says of these ranks of each node."""
    one = Cluster(
        load(RunConfig, None, ["model=m", "data.train=a.jsonl"]),
        Ranks(0, ranks, torch.device("cpu")),
    )
    vars(one)["nodes"] = {f"node{i}": list(members) for i, members in enumerate(nodes)}
    finding: Finding = OF_NODES["cluster.processes"].ask(one)
    return finding


def test_processes_are_counted_on_each_node() -> None:
    assert "one process, on node0; to compare nodes, start it on all" in examined(1, [0]).says
    uneven = examined(7, [0, 1, 2], [3, 4, 5], [6])
    assert uneven.outcome == "warning"
    assert uneven.says == "7 processes on 3 nodes: node2 has 1, expected 3 as on the others"
    assert uneven.evidence == ("node0: ranks 0 to 2", "node1: ranks 3 to 5", "node2: rank 6")


def test_a_slow_network_is_a_warning(monkeypatch: Patch) -> None:
    slow = cluster.Measured(1e6, [0, 0])
    monkeypatch.setattr(cluster, "measure_sum", lambda *_: slow)
    one = Cluster(
        load(RunConfig, None, ["model=m", "data.train=a.jsonl"]), Ranks(0, 2, torch.device("cpu"))
    )
    vars(one)["nodes"] = {"a": [0], "b": [1]}
    finding: Finding = OF_NODES["cluster.all_reduce"].ask(one)
    assert finding.outcome == "warning"
    assert finding.says == "all sums are exact; 0.001 GB/s a link by gloo; expected 0.05 or more"


def test_a_large_file_is_read_in_blocks(tmp_path: Path, monkeypatch: Patch) -> None:
    """Of 10 bytes with blocks of 2 and 6 bytes to read: [0, 2), [4, 6), [8, 10). Byte 3 is not seen, 4 and 9 are."""
    monkeypatch.setattr(cluster, "BLOCK", 2)
    file = tmp_path / "file"

    def digest(content: bytes, most: int) -> tuple[int, str, int]:
        file.write_bytes(content)
        return hash_file(file, most)

    content = b"0123456789"
    base = digest(content, 6)
    assert (base[0], base[2]) == (10, 6)
    assert digest(b"012x456789", 6) == base
    assert digest(b"0123x56789", 6) != base
    assert digest(b"012345678x", 6) != base
    assert digest(b"012x456789", 10) != digest(content, 10)
    assert digest(content, 10)[2] == 10


def waits(folder: str, world: dict[str, str]) -> None:
    """The body of a rank of which the second does not come."""
    os.environ.update(world)
    with Patch.context() as patch:
        patch.setattr(cluster, "DEADLINE", 1.0)
        errors = (Path(folder) / world["RANK"]).open("wb")
        os.dup2(errors.fileno(), 2)
        if world["RANK"] == "0":
            with cluster.deadline("for the others to connect"):
                distributed.start("cpu")
        time.sleep(600)


def test_a_rank_that_does_not_come_ends_the_wait_in_a_line(tmp_path: Path) -> None:
    began = time.monotonic()
    codes = fork(waits, [(str(tmp_path), world) for world in worlds(2)])
    assert codes is not None and codes[0] == 1
    assert time.monotonic() - began < 120
    line = (tmp_path / "0").read_text()
    assert line.count("\n") == 1
    assert "has waited 1 s for the others to connect; expected all ranks" in line
