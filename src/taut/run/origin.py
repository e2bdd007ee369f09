"""The origin of a run, for its start event: command, code, machine and versions.

    argv           command line; the log hides its secrets as in every event (taut/errors.py)
    git            {"commit", "is_dirty"} of the directory in which the run was started; absent outside of a repository
    host           name of the machine that writes the run
    devices        for each rank {"host", "name", "memory_bytes"} of its GPU, or of its processor and the host's memory
    versions       python, each package that taut requires and finds; with a GPU also cuda, driver and nccl
    num_cpus, num_threads    logical processors that the process may use, and threads that compute

What cannot be found out is left out; nothing here ends a run. A call of git has ``GIT_SECONDS``.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement

from taut.io import threads
from taut.models.quantized.frozen_storage import host_memory
from taut.train.distributed import Ranks, nccl_version

GIT_SECONDS = 5.0
"""Time limit of each call of git: the directory may be on a network."""
PACKAGES = ("torch", "transformers", "peft", "tokenizers")
"""Reported in any case, beside the packages that taut's metadata require."""
DRIVER = Path("/proc/driver/nvidia/version")
PROCESSOR = Path("/proc/cpuinfo")


def origin(ranks: Ranks) -> dict[str, Any]:
    """The fields of the start event. Every rank calls it."""
    device = ranks.device
    code = git_state(Path.cwd()) if ranks.is_writer else None
    return {
        "argv": list(sys.orig_argv),
        **({} if code is None else {"git": code}),
        "host": platform.node(),
        "devices": ranks.gather({"host": platform.node(), **describe(device)}),
        "versions": versions(device),
        "num_cpus": threads.usable().num_cpus,
        "num_threads": torch.get_num_threads(),
    }


def git_state(directory: Path) -> dict[str, Any] | None:
    """The commit that is checked out, and whether tracked files differ from it. None outside of a repository, or where
    git does not answer.
    """
    commit = _git(directory, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    changed = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit} | ({} if changed is None else {"is_dirty": bool(changed)})


def _git(directory: Path, *words: str) -> str | None:
    """The output of git, which runs no program that the repository's configuration names, and takes no lock."""
    try:
        done = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", "-C", str(directory), *words],
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None


def describe(device: torch.device) -> dict[str, Any]:
    """Name and memory of a GPU, or of the processor and the host."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"name": properties.name, "memory_bytes": properties.total_memory}
    return {"name": _processor(), "memory_bytes": host_memory()}


def _processor() -> str:
    """The model of the processor."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", PROCESSOR.read_text(), re.MULTILINE)
    except OSError:  # macOS has none
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def versions(device: torch.device) -> dict[str, str]:
    """Name -> version of Python, the packages, and with a GPU of CUDA, driver and NCCL."""
    found = {"python": platform.python_version(), **_of_packages()}
    # torch built for ROCm has hip instead of cuda
    if device.type == "cuda":
        compiled = torch.version.cuda or getattr(torch.version, "hip", None)
        found |= {"cuda": compiled} if compiled else {}
        with suppress(
            OSError
        ):  # another vendor's, or a container that does not show the kernel's file
            driver = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d[\d.]+)", DRIVER.read_text())
            found |= {"driver": driver[1]} if driver else {}
        found |= {"nccl": nccl} if (nccl := nccl_version()) else {}
    return found


@cache
def _of_packages() -> dict[str, str]:
    """Name -> version of the packages that taut and its extras require. Read once in a process: parsing them takes a
    tenth of the time of a run of a tiny model.
    """
    try:
        required = [Requirement(line) for line in metadata.requires("taut") or []]
    except metadata.PackageNotFoundError:  # taut is not installed
        required = []
    names = [p.name for p in required if p.name != "taut" and "dev" not in str(p.marker)]
    found = {}
    for name in dict.fromkeys((*PACKAGES, *names)):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # an extra that is not installed
            continue
    return found
