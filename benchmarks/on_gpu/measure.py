"""What is measured of a step: its time, the largest memory, the times the host waits for the GPU, the kernels that ran.

    seconds     from one synchronization to the next, over several steps after ``WARM_UP`` of them
    host syncs  torch.cuda.set_sync_debug_mode over one step more: every operation that makes the host wait, by its line
    kernels     torch.profiler over one step more: the largest by time, and those of attention

On a CPU there are no host syncs, memory is the process's, and "kernels" are operators.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import torch

Result = dict[str, Any]

WARM_UP = 2
LEAST, MOST = 3, 20
"""Timed steps."""
SECONDS = 4.0
"""Timed steps are taken until they come to this."""
ATTENTION = re.compile(r"flash|fmha|attention|flex|sdpa|triton_tem|mem_eff|softmax", re.IGNORECASE)
NUM_KERNELS = 8
BROKEN = 3
"""Exit status of a process whose device is broken."""
PACKAGES = ("torch", "transformers", "peft", "trl", "flash_attn", "pydantic", "triton")
ROOT = str(Path(__file__).parents[2])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_broken(device: torch.device) -> bool:
    """Whether a kernel's error has broken the device for this process: every later call repeats that error."""
    try:
        synchronize(device)
    except RuntimeError:
        return True
    return False


def leave() -> NoReturn:
    """End this process, whose device is broken, without freeing anything there."""
    sys.stdout.flush()
    os._exit(BROKEN)


def steps(take: Callable[[int], object], device: torch.device, *, is_quick: bool) -> Result:
    """Everything about ``take(step)``, a training step. ``is_quick``: one timed step."""
    began = time.perf_counter()
    for step in range(1, WARM_UP + 1):
        take(step)
    synchronize(device)
    warmed_up = time.perf_counter() - began
    seconds: list[float] = []
    while len(seconds) < (1 if is_quick else LEAST) or (
        not is_quick and len(seconds) < MOST and sum(seconds) < SECONDS
    ):
        step += 1
        began = time.perf_counter()
        take(step)
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    peak = peak_bytes(device)
    waits = host_syncs(lambda: take(step + 1), device)
    return {
        "seconds": sorted(seconds)[len(seconds) // 2],
        "num_steps": len(seconds),
        "warm_up_seconds": warmed_up,
        "peak_bytes": peak,
        **waits,
        **kernels(lambda: take(step + 2), device),
    }


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def host_syncs(act: Callable[[], object], device: torch.device) -> Result:
    """How often the host waits for the GPU, and where."""
    if device.type != "cuda":
        return {"host_syncs": None, "waits_at": {}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        caught.clear()  # that this mode is a prototype
        try:
            act()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize(device)
    lines = Counter(
        f"{shorten(one.filename)}:{one.lineno}"
        for one in caught
        if "called a synchronizing" in str(one.message)
    )
    return {"host_syncs": lines.total(), "waits_at": dict(lines.most_common(NUM_KERNELS))}


def shorten(path: str) -> str:
    """The part of a path that names a file of this tree, or of an installed package."""
    return path.removeprefix(ROOT + "/").rpartition("site-packages/")[2]


def kernels(act: Callable[[], object], device: torch.device) -> Result:
    """The kernels of a step by their time on the device."""
    from torch.profiler import ProfilerActivity, profile

    is_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=activities) as profiler:
        act()
        synchronize(device)
    spent: Counter[str] = Counter()
    for event in profiler.key_averages():
        # a named range, e.g. an optimizer's step, spans kernels that are counted by themselves
        is_range = getattr(event, "is_user_annotation", False)
        is_kernel = not is_cuda or (
            event.device_type == torch.autograd.DeviceType.CUDA and not is_range
        )
        micros = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        if is_kernel and micros > 0:
            spent[event.key[:120]] += micros
    total = spent.total() or 1
    attention = {name: micros for name, micros in spent.items() if ATTENTION.search(name)}
    return {
        "kernel_seconds": total / 1e6,
        "kernels": {name: micros / total for name, micros in spent.most_common(NUM_KERNELS)},
        "attention_kernels": {
            name: micros / total for name, micros in Counter(attention).most_common(4)
        },
    }


# -- the device, and its own rates


def describe(device: torch.device) -> Result:
    """The device, and the versions that ran on it."""
    found: Result = {
        "device": platform.processor() or platform.machine(),
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        found |= {
            "device": about.name,
            "bytes": about.total_memory,
            "capability": list(torch.cuda.get_device_capability(device)),
            "cuda": torch.version.cuda,
        }
    found["packages"] = {name: installed(name) for name in PACKAGES}
    return found


def installed(name: str) -> str | None:
    if name == "torch":
        return torch.__version__
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def rates(device: torch.device, *, is_quick: bool) -> Result:
    """Products of square matrices, in FLOP/s by dtype, and a copy on the device, in bytes read and written a second."""
    width = 256 if is_quick else 8192
    found: Result = {"width": width}
    for dtype in (torch.bfloat16, torch.float32):
        left, right = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
        seconds = fastest(lambda left=left, right=right: left @ right, device)
        found[str(dtype).removeprefix("torch.")] = 2 * width**3 / seconds
    block = torch.empty(2**20 if is_quick else 2**31, dtype=torch.uint8, device=device)
    other = torch.empty_like(block)
    found["copy"] = 2 * block.numel() / fastest(lambda: other.copy_(block), device)
    return found


def fastest(act: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Mean seconds over a few repeats after a warm-up."""
    for _ in range(2):
        act()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        act()
    synchronize(device)
    return (time.perf_counter() - began) / repeats
