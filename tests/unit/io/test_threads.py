"""One thread for each physical core that a process may use; what the user set is left alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from taut.io import threads
from taut.io.threads import Cores, described, set_defaults, usable


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(threads, "_set_by_taut", False)
    monkeypatch.setattr(threads, "_waiting", "")


def machine(
    monkeypatch: pytest.MonkeyPatch, root: Path, siblings: dict[int, str], files: dict[str, str]
) -> Path:
    """The files of a kernel whose affinity mask allows these CPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(siblings), raising=False)
    for cpu, text in siblings.items():
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = text
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


FOUR = {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}
"""Two cores with two hyperthreads each."""


def test_hyperthreads_of_a_core_count_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cores = usable(machine(monkeypatch, tmp_path, FOUR, {}))
    assert (cores, cores.num_threads) == (Cores(4, 2, None, 1), 2)
    assert str(cores) == "2 physical cores with 4 hyperthreads"


def test_the_affinity_mask_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two CPUs that are one core."""
    cores = usable(machine(monkeypatch, tmp_path, {0: "0,2", 2: "0,2"}, {}))
    assert cores.num_threads == 1
    assert str(cores) == "1 physical core with 2 hyperthreads"


def test_without_a_topology_each_cpu_is_a_core(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    assert usable(tmp_path) == Cores(2, 2, None, 1)
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert usable(tmp_path) == Cores(7, 7, None, 1)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000",
                "sys/fs/cgroup/a/cpu.max": "50000 100000",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "5:cpuset:/x\n4:cpu,cpuacct:/x\n0::/",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "100000",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            1.0,
        ),
        ({"proc/self/cgroup": "4:cpu:/gone\n0::/gone"}, None),
    ],
)
def test_a_quota_limits_them(
    files: dict[str, str], quota: float | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cores = usable(machine(monkeypatch, tmp_path, FOUR, dict(files)))
    assert cores.quota == quota
    assert cores.num_threads == (2 if quota is None else 1)
    assert ("quota" in str(cores)) == (quota is not None)


def test_ranks_share_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = machine(monkeypatch, tmp_path, FOUR, {})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert usable(root).num_threads == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert usable(root).num_threads == 1
    assert str(usable(root)).endswith(", for 8 ranks")


def test_what_the_user_set_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable", lambda root=None: Cores(4, 2, None, 1))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    set_defaults()
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert described(3) == (
        "3",
        "OMP_NUM_THREADS is set; 2 physical cores with 4 hyperthreads: some threads share a core, which is slower "
        "than one thread on each",
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    set_defaults()
    assert os.environ["OMP_NUM_THREADS"] == "2"
    assert described(2) == ("2", "one for each core: 2 physical cores with 4 hyperthreads")
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    set_defaults()
    assert os.environ["GOMP_SPINCOUNT"] == "7"


def test_a_program_has_its_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable", lambda root=None: Cores(2, 2, 1.0, 1))
    told = "set by the program; 2 physical cores, and a quota of 1 CPUs"
    assert described(2) == ("2", f"{told}: more threads than that wait for each other")
    assert described(1)[1].startswith("one for each core: ")


@pytest.mark.parametrize(
    ("files", "load", "rounds", "reason"),
    [
        ({"proc/pressure/cpu": "some avg10=0.12 avg60=80.00"}, 9.0, 20_000, "the machine is quiet"),
        (
            {"proc/pressure/cpu": "some avg10=51.59 avg60=0.00"},
            0.0,
            2_000,
            "programs waited for a CPU in 52% of the last ten seconds",
        ),
        ({}, 0.3, 20_000, "the machine is quiet"),
        ({}, 1.5, 2_000, "1.5 programs run on 4 CPUs"),
        ({"proc/pressure/cpu": "unreadable"}, 1.5, 2_000, "1.5 programs run on 4 CPUs"),
        (
            {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"},
            0.0,
            2_000,
            "the quota counts it",
        ),
    ],
)
def test_threads_wait_awake_where_the_machine_is_quiet(
    files: dict[str, str],
    load: float,
    rounds: int,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    root = machine(monkeypatch, tmp_path, FOUR, dict(files))
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setenv("GOMP_SPINCOUNT", "")
    set_defaults(root)
    assert os.environ["GOMP_SPINCOUNT"] == str(rounds)
    assert reason not in described(2, root)[1]  # another OpenMP does not read the variable
    machine(monkeypatch, root, FOUR, {"proc/self/maps": "7f00 r-xp /torch/lib/libgomp.so.1"})
    assert described(2, root)[1].endswith(reason)
