"""What the machine is, how fast it is, and which runs may be compared.

A shared machine changes its clock within minutes: the same products run at 150 or at 300 GFLOP/s. So products of one
shape are timed, by PyTorch and by oneDNN, before and after every run of every contender (``peers/rate.py``), and only
runs of one state are compared:

    steady       the rates before and after a run are within ``TOLERANCE`` of each other
    one state    steady runs whose rates are within ``TOLERANCE`` of each other

``take_turns`` runs the contenders round after round. Then it looks for the state that most of them had a run in, and
repeats those that had none, a bounded number of times. What has no run there is "not compared", which is neither met
nor missed. Imported by the benchmarks that compare.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

Result = dict[str, Any]

TOLERANCE = 1.15
"""The largest ratio of two rates of one state."""
MEMORY_TOLERANCE = 1.05
"""Of peak memory over its target: it varies from run to run."""
FLAGS = ("avx2", "avx512f", "amx_bf16")


def describe(threads: int) -> Result:
    """The processor, and what computes products on it."""
    cpus = sorted(os.sched_getaffinity(0))
    cores = {_siblings(cpu) for cpu in cpus}
    has = {"MKL": torch._C.has_mkl, "oneDNN": torch._C._has_mkldnn}
    return {
        "processor": _line_of("model name") or platform.machine(),
        "flags": [flag for flag in FLAGS if flag in _line_of("flags").split()],
        "threads": threads,
        "cpus": len(cpus),
        "cores": len(cores),
        "torch": torch.__version__,
        "libraries": [name for name, is_there in has.items() if is_there],
    }


def print_machine(machine: Result) -> None:
    cpus, cores = machine["cpus"], machine["cores"]
    shared = "" if cpus == cores else f", of which {cpus - cores} are second hyperthreads"
    print(
        f"{machine['processor']} ({', '.join(machine['flags']) or 'no wide instructions'}), "
        f"{machine['threads']} threads on {cpus} logical processors{shared}\ntorch {machine['torch']} with "
        f"{' and '.join(machine['libraries']) or 'neither MKL nor oneDNN'}",
        flush=True,
    )


def _siblings(cpu: int) -> str:
    """The logical processors of its core."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return path.read_text().strip() if path.exists() else str(cpu)


def _line_of(name: str) -> str:
    """What /proc/cpuinfo says of the first processor; empty where it says nothing."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    found = (line.partition(":")[2].strip() for line in lines if line.startswith(name))
    return next(found, "")


# -- states


@dataclass(frozen=True)
class Rate:
    """GFLOP/s of products of one shape."""

    torch: float
    onednn: float | None

    @property
    def gflops(self) -> float:
        """Of the faster library: what the machine can do."""
        return max(self.torch, self.onednn or 0.0)

    def __str__(self) -> str:
        other = "" if self.onednn is None else f"/{self.onednn:.0f}"
        return f"{self.torch:.0f}{other}"


@dataclass(frozen=True)
class Span:
    """The rates before and after a run."""

    before: float
    after: float

    @property
    def mean(self) -> float:
        return fmean((self.before, self.after))

    @property
    def is_steady(self) -> bool:
        return are_alike((self.before, self.after))

    def __str__(self) -> str:
        return (
            f"{self.mean:.0f}" if self.is_steady else f"{self.before:.0f} and then {self.after:.0f}"
        )


def are_alike(rates: Sequence[float]) -> bool:
    return max(rates) <= TOLERANCE * min(rates)


def in_one_state(spans: Mapping[str, Sequence[Span]]) -> dict[str, list[int]]:
    """The numbers of each name's runs in the state that the most names have a run in.

    Of several such states that with the most runs, then the fastest.
    """
    steady = [span.mean for some in spans.values() for span in some if span.is_steady]
    best: dict[str, list[int]] = {name: [] for name in spans}
    best_rank = (0, 0, 0.0)
    for least in steady:
        found = {
            name: [
                number
                for number, span in enumerate(some)
                if span.is_steady and least <= span.mean <= TOLERANCE * least
            ]
            for name, some in spans.items()
        }
        rank = (sum(map(bool, found.values())), sum(map(len, found.values())), least)
        if rank > best_rank:
            best, best_rank = found, rank
    return best


# -- turns


@dataclass
class Turns:
    """The runs of all contenders on a case."""

    runs: dict[str, list[Result]]
    errors: dict[str, str] = field(default_factory=dict)

    def spans(self) -> dict[str, list[Span]]:
        return {
            name: [span_of(run) for run in some]
            for name, some in self.runs.items()
            if some and "rates" in some[0]
        }

    def chosen(self, name: str) -> list[Result]:
        """Its runs in the state that is compared; all where it has none there."""
        some = self.runs[name]
        return [some[k] for k in in_one_state(self.spans()).get(name, [])] or some

    def outside(self) -> list[str]:
        """The names without a run in the state that is compared."""
        return [name for name, found in in_one_state(self.spans()).items() if not found]

    def state(self, name: str) -> Result:
        """What the table says of a contender's state; nothing of one without runs."""
        if not self.runs[name]:
            return {}
        spans = [span_of(run) for run in self.chosen(name) if "rates" in run]
        return {
            "is_in_state": name not in self.outside(),
            "gflops": " and ".join(dict.fromkeys(map(str, spans))),
            "cpu_matmul": self.chosen(name)[0].get("cpu_matmul") or "torch's default",
        }


def span_of(run: Result) -> Span:
    before, after = (Rate(**run["rates"][when]) for when in ("before", "after"))
    return Span(before.gflops, after.gflops)


def take_turns(
    case: str,
    contenders: Mapping[str, Callable[[int], Result]],
    *,
    rate: Callable[[], Rate] | None,
    show: Callable[[Result], str],
    rounds: int,
    tries: int,
) -> Turns:
    """Run the contenders (each is given the number of its round) in alternation; repeat what cannot be compared.

    ``rate``: None where nothing is timed. ``show``: what is printed of a run. ``tries``: rounds more, at most.
    """
    turns = Turns({name: [] for name in contenders})
    for number in range(rounds + tries):
        names = [name for name in contenders if name not in turns.errors]
        if number >= rounds:
            names = [name for name in turns.outside() if name in names]
            if len(contenders) == 1 or not names:
                break
            print(f"{case}: again, as the machine changed: {', '.join(names)}", flush=True)
        before = rate() if rate else None
        for name in names:
            load = os.getloadavg()[0]
            try:
                run = contenders[name](number)
            except RuntimeError as error:
                turns.errors[name] = str(error)
                print(f"{case}: {name}: {error}", file=sys.stderr, flush=True)
                before = rate() if rate else None
                continue
            after = rate() if rate else None
            shown = f"{case}, round {number + 1}: {name:33} {show(run)}"
            if before and after:
                run |= {"rates": {"before": vars(before), "after": vars(after)}}
                shown += f"; products before {before}, after {after} GFLOP/s (torch/oneDNN)"
            turns.runs[name].append(run | {"load_before": load})
            print(f"{shown}; load before {load:.1f}", flush=True)
            before = after
    return turns


# -- verdicts


def not_compared(rows: Sequence[Result]) -> str:
    """Why rows of the table cannot be compared; empty if they can be."""
    if all(row["is_in_state"] for row in rows):
        return ""
    return (
        f"the machine ran at {' and '.join(dict.fromkeys(row['gflops'] for row in rows))} GFLOP/s"
    )


def verdict(line: Result) -> str:
    """Of a comparison that has a target."""
    if line.get("not_compared"):
        return f"not compared: {line['not_compared']}"
    return "met" if line["is_met"] else "MISSED"


def memory_line(row: Result, target: float | None) -> Result | None:
    """taut's peak memory against its target, whatever the state."""
    if target is None or "peak_mb" not in row:
        return None
    is_met = row["peak_mb"] <= MEMORY_TOLERANCE * target
    return {"peak_mb": row["peak_mb"], "target": target, "is_met": is_met}


def print_memory(line: Result | None) -> None:
    if line is not None:
        print(f"  taut: {line['peak_mb']:.0f} MB (target {line['target']:.0f}: {verdict(line)})")


def print_uncompared(lines: Sequence[Result]) -> None:
    """How many comparisons with a target could not be made."""
    count = sum(bool(line.get("not_compared")) for line in lines)
    print(f"\n{count} comparison{'' if count == 1 else 's'} not made, as the machine changed")
