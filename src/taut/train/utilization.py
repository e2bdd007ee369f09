"""Load of the machine: every few seconds a thread reads how much of its host and its GPU each rank uses.

    cpu_percent                    of this process and its descendants; 100 is one processor
    rss_bytes                      their memory; shared pages count once for each process
    disk_write_bytes_per_second    bytes that they write to disks
    gpu_percent, gpu_memory_bytes, gpu_power_watts, gpu_temperature_celsius
                                   of the rank's GPU, by all processes; read from the driver (NVML) through
                                   torch.cuda, which needs the package nvidia-ml-py
    gpu_reserved_bytes             GPU memory held by torch's allocator

The thread and the loop share a queue and no lock. The end of a step takes the readings since the last step, and the
ranks exchange them in the collective that each step has anyway. A number that cannot be read is left out, and one event
says why. Without /proc (macOS) only processor time is read.
"""

from __future__ import annotations

import math
import os
import resource
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeAlias, TypedDict

import torch

PROC = Path("/proc")
KEPT = 1000
"""Readings between two steps that are kept."""
PATIENCE = 2.0
"""Seconds that the end of a run waits for a reading that has begun."""

Reading: TypeAlias = dict[str, float]


class HostLoad(TypedDict):
    """Load that one rank reports at the end of a step."""

    host: str
    values: Reading
    missing: dict[str, str]
    """Numbers that cannot be read -> why, reported once."""


COMBINE: Mapping[str, Callable[[Sequence[float]], float]] = {
    "cpu_percent": math.fsum,
    "rss_bytes": math.fsum,
    "disk_write_bytes_per_second": math.fsum,
    "gpu_percent": fmean,
    "gpu_memory_bytes": max,
    "gpu_reserved_bytes": max,
    "gpu_power_watts": math.fsum,
    "gpu_temperature_celsius": max,
}
"""Name of a number -> how the numbers of several ranks become one."""
GPU: Mapping[str, Callable[[torch.device], float]] = {
    "gpu_percent": lambda device: torch.cuda.utilization(device),
    "gpu_memory_bytes": lambda device: torch.cuda.device_memory_used(device),
    "gpu_power_watts": lambda device: torch.cuda.power_draw(device) / 1000,
    "gpu_temperature_celsius": lambda device: torch.cuda.temperature(device),
    "gpu_reserved_bytes": lambda device: torch.cuda.memory_reserved(device),
}
"""Name of a number -> how it is read. No reading waits for the GPU's work."""


class Used(NamedTuple):
    """Resources that a process and its descendants have used up to now."""

    at: float
    """By the monotonic clock."""
    cpu_seconds: float
    rss_bytes: int | None
    written_bytes: int | None


@dataclass
class Meter:
    """Reads every ``seconds`` inside ``running``; with 0 never."""

    seconds: float = 0.0
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (it is frozen)
    _readings: deque[Reading] = field(default_factory=lambda: deque(maxlen=KEPT), init=False)
    _missing: dict[str, str] = field(default_factory=dict, init=False)
    """Numbers that cannot be read -> why."""
    _num_reported: int = field(default=0, init=False)
    """How many of ``_missing`` a step has reported."""
    _newest: dict[int, HostLoad] = field(default_factory=dict, init=False)
    """Newest load of each rank."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Read until the end of the block."""
        if self.seconds == 0:
            yield
            return
        ended = threading.Event()
        thread = threading.Thread(
            target=self._read_on, args=(ended,), name="taut-utilization", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(PATIENCE)

    def sample(self) -> HostLoad | None:
        """Mean of the readings since the last call, or for bytes the maximum. None without a reading."""
        readings = []
        while self._readings:
            readings.append(self._readings.popleft())
        if not readings:
            return None
        # what was read since the last step, and what could not be read since it was last reported
        values = {}
        for name in COMBINE:
            if found := [reading[name] for reading in readings if name in reading]:
                values[name] = (max if name.endswith("_bytes") else fmean)(found)
        missing = dict(list(self._missing.items())[self._num_reported :])
        self._num_reported += len(missing)
        return {"host": socket.gethostname(), "values": values, "missing": missing}

    def combine(self, of_ranks: Sequence[HostLoad | None]) -> dict[str, Any] | None:
        """Fields of an event over all ranks and for each host. None unless the first rank has a new reading; of the
        other ranks the last one counts.
        """
        self._newest |= {rank: load for rank, load in enumerate(of_ranks) if load is not None}
        if not of_ranks or of_ranks[0] is None:
            return None
        # over all ranks, then by host, with each GPU by its rank
        hosts: dict[str, list[int]] = {}
        for rank, load in sorted(self._newest.items()):
            hosts.setdefault(load["host"], []).append(rank)
        values = {rank: load["values"] for rank, load in self._newest.items()}
        event: dict[str, Any] = _combined(list(values.values()))
        event["hosts"] = [
            {
                "host": host,
                **_combined([values[rank] for rank in ranks]),
                "gpus": [
                    {
                        "rank": rank,
                        **{name: values[rank][name] for name in GPU if name in values[rank]},
                    }
                    for rank in ranks
                    if not GPU.keys().isdisjoint(values[rank])
                ],
            }
            for host, ranks in hosts.items()
        ]
        missing = {name: why for load in of_ranks if load for name, why in load["missing"].items()}
        return event | ({"missing": missing} if missing else {})

    def _read_on(self, ended: threading.Event) -> None:
        """Body of the thread."""
        before = used(os.getpid())
        while not ended.wait(self.seconds):
            now = used(os.getpid())
            self._readings.append({**_between(before, now), **self._of_gpu()})
            before = now

    def _of_gpu(self) -> Reading:
        if self.device.type != "cuda":
            return {}
        found = {}
        for name, read in GPU.items():
            if name in self._missing:
                continue
            try:
                found[name] = float(read(self.device))
            except Exception as error:  # noqa: BLE001 (whatever a driver raises must not end the thread; it is recorded)
                self._missing[name] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return found


def _combined(readings: Sequence[Reading]) -> Reading:
    return {
        name: how(found)
        for name, how in COMBINE.items()
        if (found := [reading[name] for reading in readings if name in reading])
    }


def _between(before: Used, now: Used) -> Reading:
    """The reading between two looks, never below 0: a process that no parent waits for takes its share along."""
    seconds = max(now.at - before.at, 1e-3)
    reading = {"cpu_percent": max(0.0, 100 * (now.cpu_seconds - before.cpu_seconds) / seconds)}
    if now.rss_bytes is not None:
        reading["rss_bytes"] = float(now.rss_bytes)
    if now.written_bytes is not None and before.written_bytes is not None:
        written = max(0, now.written_bytes - before.written_bytes)
        reading["disk_write_bytes_per_second"] = written / seconds
    return reading


def used(pid: int) -> Used:
    """Resources used by a process and its descendants, including those that have ended."""
    at = time.monotonic()
    seconds, pages, written = 0.0, 0, None
    is_there = False
    ticks = os.sysconf("SC_CLK_TCK")
    for place in _tree(PROC / str(pid)):
        try:
            fields = (place / "stat").read_bytes().rpartition(b")")[2].split()
            resident = int((place / "statm").read_bytes().split()[1])
        except OSError:  # it has ended
            continue
        is_there = True
        # its own, and of children it has waited for
        seconds += sum(map(int, fields[11:15])) / ticks
        pages += resident
        try:
            found = dict(line.split(b": ") for line in (place / "io").read_bytes().splitlines())
        except OSError:  # a kernel without it, or another user's
            continue
        written = (written or 0) + int(found[b"write_bytes"])
    # without /proc: processor time of this process and of children it has waited for
    if not is_there:
        parts = [
            resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        ]
        return Used(at, sum(part.ru_utime + part.ru_stime for part in parts), None, None)
    return Used(at, seconds, pages * resource.getpagesize(), written)


def _tree(place: Path) -> Iterator[Path]:
    """The directories in /proc of a process and its descendants."""
    yield place
    children: list[bytes] = []
    try:
        threads = list((place / "task").iterdir())
    except OSError:  # it has ended
        return
    for thread in threads:
        with suppress(OSError):  # one that has ended, or a kernel that does not list children
            children += (thread / "children").read_bytes().split()
    for child in children:
        yield from _tree(PROC / child.decode())
