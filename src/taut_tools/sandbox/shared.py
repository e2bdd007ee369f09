"""The sandboxes of this process and its connections to services, each opened at the first call that needs it.

shared().run(program, [Trial(stdin="1 2")], Limits())   # -> [Ran(stdout, stderr, outcome, seconds, value)]
run_python("print(1 + 1)").stdout
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import overload

from taut.rl.settings import HERE, Remote
from taut_tools.sandbox.box import MechanismName, Sandbox
from taut_tools.sandbox.limits import Limits, Ran, Trial
from taut_tools.sandbox.probe import open_sandbox
from taut_tools.sandbox.remote import RemoteSandbox, open_remote

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
    """The sandbox of this process with these settings, or its connection to a service, opened at the first call."""
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
    """Replace the lock in a forked process, which has no thread that could release it."""
    global _LOCK
    _LOCK = threading.Lock()


os.register_at_fork(after_in_child=_begin_forked)


@atexit.register
def close_shared() -> None:
    """Close all that ``shared`` opened; the next call opens it again."""
    with _LOCK:
        opened = list(_SHARED.values())
        _SHARED.clear()
    for sandbox in opened:
        sandbox.close()


def run_python(
    code: str, stdin: str = "", limits: Limits | None = None, remote: Remote = HERE
) -> Ran:
    """Run a program in the shared sandbox, or at a service, as the Python tool does."""
    (ran,) = shared(remote=remote).run(code, [Trial(stdin=stdin)], limits)
    return ran
