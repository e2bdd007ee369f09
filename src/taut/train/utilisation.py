"""How busy the machine is: a reading every few seconds, in a thread, of what each rank takes of its host and its GPU.

    cpu_percent                    of this process and those it started; 100 is one processor
    rss_bytes                      their memory; pages that they share count for each
    disk_write_bytes_per_second    what they had written to a disk
    gpu_percent, gpu_memory_bytes, gpu_power_watts, gpu_temperature_celsius
                                   of the rank's GPU, whatever runs there; the driver (NVML) tells torch.cuda, which
                                   needs the package nvidia-ml-py to ask it
    gpu_reserved_bytes             what torch's allocator holds of the GPU

The thread shares a queue with the loop and no lock. A step's end takes what was read since the last one that took some,
and the ranks hand it over with what they tell each other anyway; a run that ends within the first seconds has none. A
number that cannot be read is left out, and the event says once why. Where there is no /proc (macOS) processor time is
all.
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
from typing import Any, NamedTuple, TypeAlias

import torch

PROC = Path("/proc")
KEPT = 1000
"""Readings between two steps that are kept."""
PATIENCE = 2.0
"""Seconds that the end of a run waits for a reading that has begun."""

Reading: TypeAlias = dict[str, float]
Told: TypeAlias = dict[str, Any]
"""What a rank hands over: ``host``, ``values`` and ``missing``."""

TOGETHER: Mapping[str, Callable[[Sequence[float]], float]] = {
    "cpu_percent": math.fsum,
    "rss_bytes": math.fsum,
    "disk_write_bytes_per_second": math.fsum,
    "gpu_percent": fmean,
    "gpu_memory_bytes": max,
    "gpu_reserved_bytes": max,
    "gpu_power_watts": math.fsum,
    "gpu_temperature_celsius": max,
}
"""What a number of several ranks is."""
GPU: Mapping[str, Callable[[torch.device], float]] = {
    "gpu_percent": lambda device: torch.cuda.utilization(device),
    "gpu_memory_bytes": lambda device: torch.cuda.device_memory_used(device),
    "gpu_power_watts": lambda device: torch.cuda.power_draw(device) / 1000,
    "gpu_temperature_celsius": lambda device: torch.cuda.temperature(device),
    "gpu_reserved_bytes": lambda device: torch.cuda.memory_reserved(device),
}
"""None of them waits for what the GPU computes."""


class Used(NamedTuple):
    """What a process and those it started have used up to now."""

    at: float
    """By the monotonic clock."""
    cpu_seconds: float
    rss_bytes: int | None
    written_bytes: int | None


@dataclass
class Meter:
    """Reads every ``seconds``; 0: never. Until ``running`` it does nothing."""

    seconds: float = 0.0
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (it is frozen)
    _readings: deque[Reading] = field(default_factory=lambda: deque(maxlen=KEPT), init=False)
    _missing: dict[str, str] = field(default_factory=dict, init=False)
    """Numbers that cannot be read -> why."""
    _told: int = field(default=0, init=False)
    """How many of them the loop has heard of."""
    _of_ranks: dict[int, Told] = field(default_factory=dict, init=False)
    """The newest of each rank."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Read until the end of the block."""
        if self.seconds == 0:
            yield
            return
        ended = threading.Event()
        thread = threading.Thread(
            target=self._read_on, args=(ended,), name="taut-utilisation", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(PATIENCE)

    def take(self) -> Told | None:
        """The mean of the readings since the last call, of bytes the largest; None: there are none."""
        taken = []
        while self._readings:
            taken.append(self._readings.popleft())
        if not taken:
            return None
        values = {}
        for name in TOGETHER:
            if found := [reading[name] for reading in taken if name in reading]:
                values[name] = (max if name.endswith("_bytes") else fmean)(found)
        missing = dict(list(self._missing.items())[self._told :])
        self._told += len(missing)
        return {"host": socket.gethostname(), "values": values, "missing": missing}

    def together(self, of_ranks: Sequence[Told | None]) -> dict[str, Any] | None:
        """The fields of an event, where the first rank has a reading: over all ranks, and for each host. A rank without
        a new one counts with its last.
        """
        self._of_ranks |= {rank: told for rank, told in enumerate(of_ranks) if told is not None}
        if not of_ranks or of_ranks[0] is None:
            return None
        hosts: dict[str, list[int]] = {}
        for rank, told in sorted(self._of_ranks.items()):
            hosts.setdefault(told["host"], []).append(rank)
        values = {rank: told["values"] for rank, told in self._of_ranks.items()}
        event: dict[str, Any] = _summed(list(values.values()))
        event["hosts"] = [
            {
                "host": host,
                **_summed([values[rank] for rank in ranks]),
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
        missing = {name: why for told in of_ranks if told for name, why in told["missing"].items()}
        return event | ({"missing": missing} if missing else {})

    def _read_on(self, ended: threading.Event) -> None:
        """The thread."""
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


def _summed(readings: Sequence[Reading]) -> Reading:
    return {
        name: how(found)
        for name, how in TOGETHER.items()
        if (found := [reading[name] for reading in readings if name in reading])
    }


def _between(before: Used, now: Used) -> Reading:
    """The reading between two looks, never below 0: a process that ended unseen by its parent takes its share along."""
    seconds = max(now.at - before.at, 1e-3)
    reading = {"cpu_percent": max(0.0, 100 * (now.cpu_seconds - before.cpu_seconds) / seconds)}
    if now.rss_bytes is not None:
        reading["rss_bytes"] = float(now.rss_bytes)
    if now.written_bytes is not None and before.written_bytes is not None:
        written = max(0, now.written_bytes - before.written_bytes)
        reading["disk_write_bytes_per_second"] = written / seconds
    return reading


def used(pid: int) -> Used:
    """What a process and its descendants have used, those that have ended included."""
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
        seconds += (
            sum(map(int, fields[11:15])) / ticks
        )  # its own, and of children it has waited for
        pages += resident
        try:
            found = dict(line.split(b": ") for line in (place / "io").read_bytes().splitlines())
        except OSError:  # a kernel without it, or another user's
            continue
        written = (written or 0) + int(found[b"write_bytes"])
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
