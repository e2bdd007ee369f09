"""A sandbox for Python programs that a model wrote. Nothing it wrote is ever executed outside of one.

    sandbox = shared()                                     # opened only after attacks on it have failed
    sandbox.run(program, [Trial(stdin="1 2")], Limits())   # -> [Ran(stdout, stderr, outcome, seconds, value)]
    run_python("print(1 + 1)").stdout                      # the Python tool

A program has no network and no socket, sees no file but Python's own library and a scratch folder of limited size, none
of our environment and no other process, and has bounds on processor time, time, memory, processes, files and output.
Each program has a fresh process that was never used before. When ``run`` returns, every process it started is dead;
they also die with this process. What the program does wrong is its ``outcome``; SandboxError is raised for failures of
the sandbox itself. Python only.

    box         Sandbox: a jail for each program, started ahead
    walls       how a jail's process is started: bubblewrap, Landlock
    gvisor      a jail by runsc
    jail        the host's side of a jail: a trial's pipes, time and output
    guest       inside: a child for each trial, under limits
    allowed     the system calls a program may make
    cgroup      a bound on all of a program together, where there are cgroups
    mechanism   finds out by attacks which mechanism works on this machine
    remote      runs programs at a service instead: Piston, E2B, Morph

``mechanism`` refuses to run programs if no mechanism works; ``docs/sandbox.md`` has the limits' reasons.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import overload

from taut.sandbox.box import Mechanism, MechanismName, Sandbox
from taut.sandbox.limits import Limits, Outcome, Ran, Trial
from taut.sandbox.mechanism import ATTEMPTS, NAMES, Finding, choose, find, open_sandbox
from taut.sandbox.remote import HERE, Remote, RemoteSandbox, open_remote

__all__ = [
    "ATTEMPTS",
    "HERE",
    "NAMES",
    "Finding",
    "Limits",
    "Mechanism",
    "MechanismName",
    "Outcome",
    "Ran",
    "Remote",
    "RemoteSandbox",
    "Sandbox",
    "Trial",
    "choose",
    "close_shared",
    "find",
    "open_remote",
    "open_sandbox",
    "run_python",
    "shared",
]

_SHARED: dict[object, Sandbox | RemoteSandbox] = {}
_LOCK = threading.Lock()


@overload
def shared(
    wanted: MechanismName | None = None,
    packages: tuple[str, ...] = (),
    *,
    files: tuple[str, ...] = (),
) -> Sandbox: ...


@overload
def shared(
    wanted: MechanismName | None = None,
    packages: tuple[str, ...] = (),
    remote: Remote = HERE,
) -> Sandbox | RemoteSandbox: ...


def shared(
    wanted: MechanismName | None = None,
    packages: tuple[str, ...] = (),
    remote: Remote = HERE,
    *,
    files: tuple[str, ...] = (),
) -> Sandbox | RemoteSandbox:
    """The sandbox of this process, or its connection to a service, opened at the first call."""
    with _LOCK:
        key = (wanted, packages, remote, files)
        if key not in _SHARED:
            _SHARED[key] = (
                open_sandbox(wanted, packages, files)
                if remote.service is None
                else open_remote(remote, None)
            )
        return _SHARED[key]


def _begin_forked() -> None:
    """In a forked process, which has no thread that could release the lock."""
    global _LOCK
    _LOCK = threading.Lock()


os.register_at_fork(after_in_child=_begin_forked)


@atexit.register
def close_shared() -> None:
    """Close what ``shared`` opened; the next call opens it again."""
    with _LOCK:
        opened = list(_SHARED.values())
        _SHARED.clear()
    for sandbox in opened:
        sandbox.close()


def run_python(
    code: str, stdin: str = "", limits: Limits | None = None, remote: Remote = HERE
) -> Ran:
    """Run a program in the shared sandbox, or at a service: the executor of the Python tool."""
    (ran,) = shared(remote=remote).run(code, [Trial(stdin=stdin)], limits)
    return ran
