"""``taut sandbox``: what holds a model's programs on this machine, mechanism by mechanism, and what does not.

Each mechanism that is installed runs a program that attempts what is forbidden. The first through which nothing gets is
in force, for the reward ``code`` and the Python tool. Exit code 1 where there is none.

Imports no torch. The command line imports it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from taut.config import configclass
from taut.errors import SandboxError
from taut.sandbox import ATTEMPTS, NAMES, Finding, MechanismName, allowed, find

_NOT_HELD: dict[MechanismName, tuple[str, ...]] = {
    "gvisor": ("it was tested with a stand-in for runsc only: rely on the attempts above",),
    "bubblewrap": (
        "a fault in the kernel is a hole: for programs of an enemy use a virtual machine",
    ),
    "landlock": (
        "a program can see by name which files and processes exist, their sizes and times",
        "a fault in the kernel is a hole: for programs of an enemy use a virtual machine",
    ),
}
_NO_CGROUPS = (
    "what a process holds in the kernel beyond its address space (pipes, sockets, page tables) is bounded by its open "
    "files only, and all processes together may use `processes` times the memory of one"
)


@configclass
class SandboxReport:
    """What holds a model's programs on this machine."""

    json: bool = False
    """Print a JSON object instead of lines."""


def run(config: SandboxReport) -> int:
    """Print what holds; the exit code."""
    findings = [find(name) for name in NAMES]
    in_force = next((found.name for found in findings if found.fault is None), None)
    if config.json:
        report = {
            "in_force": in_force,
            "mechanisms": [_as_mapping(found) for found in findings],
        }
        sys.stdout.write(f"{json.dumps(report, indent=2)}\n")
    else:
        for found in findings:
            sys.stdout.write("\n".join(_lines(found)) + "\n\n")
        sys.stdout.write(f"in force: {in_force or 'none; the reward code is refused'}\n")
    return 0 if in_force else 1


def _as_mapping(found: Finding) -> dict[str, object]:
    return {
        "name": found.name,
        "lack": found.lack,
        "attempts": {it: it in found.let_through for it in ATTEMPTS} if not found.lack else {},
        "cgroups": str(found.cgroups),
        "has_cgroups": isinstance(found.cgroups, Path),
        "not_held": list(_not_held(found)) if not found.lack else [],
    }


def _lines(found: Finding) -> list[str]:
    if found.lack is not None:
        return [f"{found.name}: not to be had: {found.lack}"]
    word = "lets programs through" if found.let_through else "holds"
    lines = [f"{found.name}: {word}. A program that attempted to"]
    width = max(map(len, ATTEMPTS))
    for attempt in ATTEMPTS:
        result = "COULD" if attempt in found.let_through else "could not"
        lines.append(f"  {attempt:{width}}  {result}")
    lines.append(f"  {_calls(found)}")
    lines.append(f"  a cgroup for each program: {_cgroup(found)}")
    return lines + [f"  not held: {it}" for it in _not_held(found)]


def _calls(found: Finding) -> str:
    try:
        count = allowed.count(found.name != "landlock")
    except SandboxError as error:
        return f"system calls: {error}"
    return f"{count.allowed} of {count.known} system calls are allowed, {count.partly} of them for some arguments"


def _cgroup(found: Finding) -> str:
    return f"below {found.cgroups}" if isinstance(found.cgroups, Path) else f"none: {found.cgroups}"


def _not_held(found: Finding) -> tuple[str, ...]:
    more = () if isinstance(found.cgroups, Path) else (_NO_CGROUPS,)
    return _NOT_HELD[found.name] + more
