"""Which mechanism holds programs on this machine: each is tried, by a program that attempts what is forbidden.

    bubblewrap    the program bwrap, where it is installed
    namespaces    our own (``jail``): needs Linux 5.12, and root or user namespaces
    landlock      Linux 6.2, no privilege: no children, threads or scratch folder; for containers without namespaces

The first that lets nothing through is taken; a mechanism that lets anything through is not. Where none is left,
programs are refused: SandboxError says what each one lacked. Other systems than Linux are refused.

Imports errors and its neighbours.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from taut.errors import SandboxError
from taut.sandbox import kernel
from taut.sandbox.box import Mechanism, MechanismName, Sandbox
from taut.sandbox.limits import Limits, Trial

_NAMES: tuple[MechanismName, ...] = get_args(MechanismName)
_REASONS = {
    "bubblewrap": "bwrap is installed and let nothing through",
    "namespaces": "no bwrap that holds; our own namespaces let nothing through",
    "landlock": "neither bwrap nor namespaces hold; Landlock let nothing through: no children, threads or files",
}
_LIMITS = Limits(memory_mb=256, processes=8, wall_seconds=20.0)

_PROBE = """
import json, os, socket
given = json.loads(input())
through = []
def attempt(name, action):
    try:
        action()
    except (OSError, MemoryError):
        return
    through.append(name)
def reach(family, kind, address):
    with socket.socket(family, kind) as made:
        made.connect(address)
        made.send(b"x")
attempt("a secret file was read", lambda: open(given["secret"]).read())
attempt("the environment of the parent was read", lambda: open(f"/proc/{given['pid']}/environ").read())
attempt("a file was written", lambda: open(given["file"], "w"))
attempt("TCP was to be had", lambda: reach(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", given["port"])))
attempt("UDP was to be had", lambda: reach(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", given["port"])))
attempt("a unix socket was reached", lambda: reach(socket.AF_UNIX, socket.SOCK_STREAM, given["unix"]))
attempt("an abstract socket was reached", lambda: reach(socket.AF_UNIX, socket.SOCK_STREAM, given["abstract"]))
attempt("more memory than allowed was had", lambda: bytearray(given["memory"]))
def bomb():
    for _ in range(given["processes"]):
        if os.fork() == 0:
            while True:
                os.read(os.pipe()[0], 1)
attempt("more processes than allowed were had", bomb)
print(json.dumps(through))
"""


def choose(wanted: MechanismName | None = None) -> Mechanism:
    """The mechanism in force: ``wanted``, or the first that holds. SandboxError where there is none."""
    lacking: list[str] = []
    for name in [wanted] if wanted else _NAMES:
        reason = "asked for, and it let nothing through" if wanted else _REASONS[name]
        lack = _lack_of(name) or _leak_of(Mechanism(name, reason))
        if lack is None:
            return Mechanism(name, reason)
        lacking.append(f"{name}: {lack}")
    raise SandboxError(
        f"found no way to hold a program on this machine ({'; '.join(lacking)}); expected one that does; install "
        "bubblewrap, allow user namespaces, or use Linux 6.2 or later with Landlock"
    )


def open_sandbox(wanted: MechanismName | None = None, packages: Sequence[str] = ()) -> Sandbox:
    """A sandbox, proven to hold. ``packages``: folders that programs may also import from; they can read them."""
    for folder in packages:
        if not Path(folder).expanduser().is_dir():
            raise SandboxError(
                f"found no folder {folder} among the sandbox's packages; expected a folder to import from; correct it"
            )
    return Sandbox(choose(wanted), packages)


def _lack_of(name: MechanismName) -> str | None:
    """What keeps a mechanism from being tried; None: nothing."""
    if sys.platform != "linux":
        return f"it needs Linux, this is {sys.platform}"
    if not kernel.IS_KNOWN:
        return f"the system calls of {os.uname().machine} are not known here"
    if name == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    if name == "landlock" and kernel.landlock_version() < kernel.LANDLOCK_OLDEST:
        return f"found version {kernel.landlock_version()} of it, expected {kernel.LANDLOCK_OLDEST} or later"
    return None


def _leak_of(mechanism: Mechanism) -> str | None:
    """What a program got through, or the error that kept it from running; None: nothing, it was held."""
    sandbox = Sandbox(mechanism)
    try:
        with _planted() as given:
            (ran,) = sandbox.run(_PROBE, [Trial(stdin=json.dumps(given))], _LIMITS)
            if Path(given["file"]).exists():
                return "a file was written"
    except SandboxError as error:
        return str(error)
    finally:
        sandbox.close()
    if ran.outcome != "ok":
        return f"the trial ended with {ran.outcome}: {ran.stderr.strip()[-200:]}"
    through = json.loads(ran.stdout)
    return ", ".join(through) if through else None


@contextlib.contextmanager
def _planted() -> Iterator[dict[str, Any]]:
    """What the trial is to try itself on: all of it open to any process of this machine."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="taut-")))
        folder.chmod(0o777)
        secret = folder / "secret"
        secret.write_text("secret")
        secret.chmod(0o644)
        abstract = f"\0taut-{os.getpid()}-{folder.name}"
        for family, address in (
            (socket.AF_UNIX, str(folder / "socket")),
            (socket.AF_UNIX, abstract),
        ):
            listener = stack.enter_context(socket.socket(family))
            listener.bind(address)
            listener.listen()
        tcp = stack.enter_context(socket.socket())
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        yield {
            "secret": str(secret),
            "file": str(folder / "written"),
            "pid": os.getpid(),
            "port": tcp.getsockname()[1],
            "unix": str(folder / "socket"),
            "abstract": abstract,
            "memory": _LIMITS.memory_mb * 2**20,
            "processes": _LIMITS.processes,
        }
