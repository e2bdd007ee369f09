"""``taut sandbox``: test the sandbox mechanisms of this machine.

Each installed mechanism runs a program that attempts forbidden actions. The first mechanism that prevents all of them
is used for the reward ``code`` and the Python tool. The exit code is 1 if there is none.

Imports no torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from taut.config import configclass
from taut.errors import SandboxError
from taut_tools.sandbox import seccomp_rules
from taut_tools.sandbox.box import MechanismName
from taut_tools.sandbox.probe import ATTEMPTS, NAMES, Finding, find

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
    """Test the sandbox mechanisms of this machine."""

    json: bool = False
    """Print a JSON object instead of lines."""


def run(config: SandboxReport) -> int:
    """Print the result of each mechanism; the exit code."""
    findings = [find(name) for name in NAMES]
    in_use = next((finding.name for finding in findings if finding.fault is None), None)
    if config.json:
        mechanisms = [
            {
                "name": finding.name,
                "lack": finding.lack,
                "attempts": {}
                if finding.lack
                else {attempt: attempt in finding.let_through for attempt in ATTEMPTS},
                "cgroups": str(finding.cgroups),
                "has_cgroups": isinstance(finding.cgroups, Path),
                "not_held": [] if finding.lack else _not_held(finding),
            }
            for finding in findings
        ]
        report = {"in_force": in_use, "mechanisms": mechanisms}
        sys.stdout.write(f"{json.dumps(report, indent=2)}\n")
    else:
        for finding in findings:
            sys.stdout.write("\n".join(_lines(finding)) + "\n\n")
        sys.stdout.write(f"in force: {in_use or 'none; the reward code is refused'}\n")
    return 0 if in_use else 1


def _lines(finding: Finding) -> list[str]:
    if finding.lack is not None:
        return [f"{finding.name}: not available: {finding.lack}"]
    word = "lets programs through" if finding.let_through else "holds"
    lines = [f"{finding.name}: {word}. A program that attempted to"]
    width = max(map(len, ATTEMPTS))
    for attempt in ATTEMPTS:
        result = "COULD" if attempt in finding.let_through else "could not"
        lines.append(f"  {attempt:{width}}  {result}")
    try:
        count = seccomp_rules.count(finding.name != "landlock")
        calls = f"{count.allowed} of {count.known} system calls are allowed, {count.partly} of them for some arguments"
    except SandboxError as error:
        calls = f"system calls: {error}"
    has_cgroups = isinstance(finding.cgroups, Path)
    cgroup = f"below {finding.cgroups}" if has_cgroups else f"none: {finding.cgroups}"
    lines += [f"  {calls}", f"  a cgroup for each program: {cgroup}"]
    return lines + [f"  not held: {text}" for text in _not_held(finding)]


def _not_held(finding: Finding) -> tuple[str, ...]:
    more = () if isinstance(finding.cgroups, Path) else (_NO_CGROUPS,)
    return _NOT_HELD[finding.name] + more
