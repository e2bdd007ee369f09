"""Where a run comes from, for its start event: the command, the code, the machine and the versions.

    argv           the command line; the log hides its secrets as in every event (taut/errors.py)
    git            {"commit", "is_dirty"} of the directory that the run was started in; absent where there is none
    host           the name of the machine that writes the run
    devices        of each rank: {"host", "name", "memory_bytes"}, of a GPU, or of the processor and the host's memory
    versions       python, each package of taut's that is installed here, and cuda, driver and nccl where there is a GPU
    num_cpus, num_threads    logical processors that the process may use, and threads that compute

What cannot be found out is left out, and nothing here ends a run: git has ``GIT_SECONDS``.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement

from taut.io import threads
from taut.models.frozen import host_memory
from taut.train.distributed import Ranks, nccl_version

GIT_SECONDS = 5.0
"""Time limit of each call of git: the directory may be on a network."""
PACKAGES = ("torch", "transformers", "peft", "tokenizers")
"""Named in any case; the others are what taut's metadata require."""
DRIVER = Path("/proc/driver/nvidia/version")
PROCESSOR = Path("/proc/cpuinfo")


def origin(ranks: Ranks) -> dict[str, Any]:
    """The fields; every rank calls it."""
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
    """The commit that is checked out, and whether tracked files differ from it; None where there is no repository, or
    git does not answer.
    """
    commit = _git(directory, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    changed = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit} | ({} if changed is None else {"is_dirty": bool(changed)})


def _git(directory: Path, *words: str) -> str | None:
    """What git prints. It runs no program that the repository's configuration names, and takes no lock."""
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
    """A device's name and memory; of a CPU those of the host."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"name": properties.name, "memory_bytes": properties.total_memory}
    return {"name": _processor(), "memory_bytes": host_memory()}


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", PROCESSOR.read_text(), re.MULTILINE)
    except OSError:  # macOS has none
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def versions(device: torch.device) -> dict[str, str]:
    """The versions of Python, the packages, and of what drives the GPU, by name."""
    found = {"python": platform.python_version(), **_of_packages()}
    if device.type == "cuda":
        compiled = torch.version.cuda or getattr(torch.version, "hip", None)
        found |= {"cuda": compiled} if compiled else {}
        found |= {"driver": driver} if (driver := _driver()) else {}
        found |= {"nccl": nccl} if (nccl := nccl_version()) else {}
    return found


@cache
def _of_packages() -> dict[str, str]:
    """Read once in a process: each run of a tiny model would take a tenth of its time to parse them."""
    found = {}
    for name in dict.fromkeys((*PACKAGES, *_required())):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # an extra that is not installed
            continue
    return found


def _required() -> list[str]:
    """The packages that taut and its extras are made with; none where taut runs from its source."""
    try:
        lines = metadata.requires("taut") or []
    except metadata.PackageNotFoundError:
        return []
    packages = [Requirement(line) for line in lines]
    return [
        package.name
        for package in packages
        if package.name != "taut" and "dev" not in str(package.marker)
    ]


def _driver() -> str | None:
    """The version of NVIDIA's driver, as the kernel tells it."""
    try:
        found = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d[\d.]+)", DRIVER.read_text())
    except OSError:  # another vendor's, or a container that does not show it
        return None
    return found[1] if found else None
