"""How many threads compute on a CPU, and how long they wait awake.

There is one for each physical core that this process may use, or OMP_NUM_THREADS:

    CPUs of the affinity mask -> their cores (two hyperthreads of one core count once) -> the cgroups' quota -> / ranks

Two threads on the hyperthreads of one core share its arithmetic units, and wait for each other. A quota of 2.5 CPUs is
two threads: with three, all would be stopped for part of each period. It is a rule and no measurement: other programs
change what is fast from one minute to the next, and another number of threads is another rounding.

A thread that has done its part of a product waits for the next: awake, for a number of rounds, then asleep. To be woken
takes it as long as a small product does, and a step has thousands; but while it waits awake it takes its core's time
from other programs, and these take that of the thread it waits for. A second of generation with a small model takes
1.0 s where nothing else runs and threads sleep at once, 0.75 s with ``QUIET_ROUNDS`` (about a millisecond); beside two
busy programs 1.5 s and 3.1 s. So the default depends on how busy the machine is at the start.

The command line sets the variables before torch reads them (``set_defaults``). In a program that imports taut, they
are the program's; ``described`` says how its number of threads compares, and how they wait if it is taut that decides.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

VARIABLE = "OMP_NUM_THREADS"
ROUNDS = "GOMP_SPINCOUNT"
"""Rounds of waiting awake, in GNU's OpenMP, which PyTorch's packages have. Others know OMP_WAIT_POLICY alone."""
POLICY = "OMP_WAIT_POLICY"
QUIET_ROUNDS, BUSY_ROUNDS = 20_000, 2_000
PRESSURE_LIMIT = 10.0
"""Percent of the last ten seconds in which a program waited for a CPU: from there on a machine is busy."""
LOAD_LIMIT = 0.25
"""Programs that run, for each CPU: the same where the kernel does not measure pressure."""
ROOT = Path("/")
_set_by_taut = False
_waiting = ""


class Cores(NamedTuple):
    """The processors that this process may use."""

    num_cpus: int
    """Logical ones, hyperthreads included."""
    num_cores: int
    """Physical ones."""
    quota: float | None
    """CPUs by the cgroups' limit, if there is one."""
    num_ranks: int
    """Ranks on this machine, which share them."""

    @property
    def num_threads(self) -> int:
        limited = self.num_cores if self.quota is None else min(self.num_cores, int(self.quota))
        return max(1, limited // self.num_ranks)

    def __str__(self) -> str:
        text = f"{self.num_cores} physical core{'s' * (self.num_cores != 1)}"
        if self.num_cpus > self.num_cores:
            text += f" with {self.num_cpus} hyperthreads"
        if self.quota is not None and self.quota < self.num_cores:
            text += f", and a quota of {self.quota:g} CPUs"
        return text + (f", for {self.num_ranks} ranks" if self.num_ranks > 1 else "")


def usable(root: Path = ROOT) -> Cores:
    """The processors that this process may use. ``root``: where /sys and /proc are."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    if cpus is None:  # not Linux
        cpus = list(range(os.cpu_count() or 1))
    # hyperthreads of one core count once
    cores = {_siblings(root, cpu) for cpu in cpus}
    quota = min(_quotas(root), default=None)
    return Cores(len(cpus), len(cores), quota, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def set_defaults(root: Path = ROOT) -> None:
    """Set the number of threads, and how they wait, for a torch that is not imported yet, unless the user has."""
    global _set_by_taut, _waiting
    cores = usable(root)
    if not os.environ.get(VARIABLE):
        os.environ[VARIABLE] = str(cores.num_threads)
        _set_by_taut = True
    if not os.environ.get(ROUNDS) and not os.environ.get(POLICY):
        busy = _why_busy(root, cores)
        os.environ[ROUNDS] = str(BUSY_ROUNDS if busy else QUIET_ROUNDS)
        _waiting = f"; they wait awake for {'a short while' if busy else 'a millisecond'}: "
        _waiting += busy or "the machine is quiet"


def described(num_threads: int, root: Path = ROOT) -> tuple[str, str]:
    """The number of threads in use, and its reason."""
    cores, variable = usable(root), os.environ.get(VARIABLE)
    try:  # GNU's OpenMP is loaded with torch, when a run is described
        waiting = _waiting if "libgomp" in (root / "proc/self/maps").read_text() else ""
    except OSError:  # not Linux
        waiting = ""
    if num_threads == cores.num_threads and (_set_by_taut or not variable):
        return str(num_threads), f"one for each core: {cores}{waiting}"
    is_by_variable = variable and variable.split(",")[0] == str(num_threads)
    reason = f"{f'{VARIABLE} is set' if is_by_variable else 'set by the program'}; {cores}"
    if num_threads > cores.num_cores and cores.num_cpus > cores.num_cores:
        reason += ": some threads share a core, which is slower than one thread on each"
    elif num_threads > cores.num_threads:
        reason += ": more threads than that wait for each other"
    return str(num_threads), reason + waiting


def _why_busy(root: Path, cores: Cores) -> str:
    """Why a thread that waits awake would take time from others; empty on a quiet machine."""
    if cores.quota is not None and cores.quota < cores.num_cores:
        return "the quota counts it"
    try:
        text = (root / "proc/pressure/cpu").read_text()
        percent = float(text.split("avg10=")[1].split()[0])
    except (OSError, IndexError, ValueError):
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        num_cpus = os.cpu_count() or 1
        return f"{load:.1f} programs run on {num_cpus} CPUs" if load > LOAD_LIMIT * num_cpus else ""
    if percent < PRESSURE_LIMIT:
        return ""
    return f"programs waited for a CPU in {percent:.0f}% of the last ten seconds"


def _siblings(root: Path, cpu: int) -> str:
    """The hyperthreads of a CPU's core, as the kernel lists them; its own number where it does not."""
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)


def _quotas(root: Path) -> Iterator[float]:
    """The limits of this process's cgroups, of both versions, in CPUs."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        group = Path(path.lstrip("/"))
        mounts: tuple[str, ...]
        names: tuple[str, ...]
        if not controllers:
            mounts, names = ("sys/fs/cgroup",), ("cpu.max",)
        elif "cpu" in controllers.split(","):
            mounts = (f"sys/fs/cgroup/{controllers}", "sys/fs/cgroup/cpu")
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        else:
            continue
        for mount in mounts:
            for part in (group, *group.parents):
                words = _words(root / mount / part, names)
                if len(words) == 2 and words[0] not in ("max", "-1"):
                    yield int(words[0]) / int(words[1])


def _words(folder: Path, names: tuple[str, ...]) -> list[str]:
    """The words in the files of a cgroup; none where it is not mounted."""
    try:
        return [word for name in names for word in (folder / name).read_text().split()]
    except OSError:
        return []
