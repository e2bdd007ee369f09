"""A cgroup of version 2 for each jail: a bound on the memory and the processes of all of a program together.

It also counts memory that no limit of a single process counts: the scratch folder, pipes, sockets, page tables. It
needs a cgroup with the controllers memory and pids that this process may divide: as root on a machine with cgroups of
version 2, or in a user's session of systemd. In most containers it may not.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import time
from pathlib import Path

from taut.sandbox.limits import Limits

_NEEDED = {"memory", "pids"}
_OWN_MB = 64
"""Memory of the jail's own processes, in MiB."""
_OWN_PROCESSES = 8
_COUNT = itertools.count()


class Cgroup:
    """One jail's cgroup, below ``parent``. Raises OSError if it cannot be made."""

    def __init__(self, parent: Path) -> None:
        self.path = parent / f"taut-{os.getpid()}-{next(_COUNT)}"
        self.path.mkdir()

    def limit(self, limits: Limits) -> None:
        """Bound all processes of the jail together to the memory of one process and the scratch folder."""
        megabytes = limits.memory_mb + limits.scratch_mb + _OWN_MB
        (self.path / "memory.max").write_text(str(megabytes * 2**20))
        with contextlib.suppress(FileNotFoundError):  # a kernel without swap
            (self.path / "memory.swap.max").write_text("0")
        (self.path / "pids.max").write_text(str(limits.processes + _OWN_PROCESSES))

    def num_killed(self) -> int:
        """Number of its processes that the kernel killed for lack of memory."""
        lines = (self.path / "memory.events").read_text().splitlines()
        counts = dict(line.split() for line in lines)
        return int(counts["oom_kill"])

    def remove(self) -> None:
        """Remove it once its processes have ended, which the kernel notices a little later."""
        _remove(self.path)


def find_parent(root: Path | None = None) -> Path:
    """The directory in which jails' cgroups can be made; leftovers of killed processes there are removed.

    Raises OSError with the reason if there is none. ``root``: where cgroups are mounted.
    """
    if root is None:
        mounts = [
            line.partition(" - ") for line in Path("/proc/self/mountinfo").read_text().splitlines()
        ]
        places = [mount.split()[4] for mount, _, kind in mounts if kind.startswith("cgroup2 ")]
        if not places:
            raise OSError("cgroups of version 2 are not mounted")
        root = Path(places[0])
    current = root / _own_name().lstrip("/")
    reasons = []
    for folder in (current, current.parent) if current != root else (current,):
        try:
            lacking = _NEEDED - set((folder / "cgroup.controllers").read_text().split())
            if lacking:
                raise OSError(f"it has no controller {' and '.join(sorted(lacking))}")
            if not os.access(folder / "cgroup.procs", os.W_OK):
                raise OSError("this user may not write it")
            control = folder / "cgroup.subtree_control"
            if _NEEDED - set(control.read_text().split()):
                control.write_text(" ".join(f"+{name}" for name in sorted(_NEEDED)))
            # cgroups of processes that have ended; one with processes in it cannot be removed
            for left in folder.glob("taut-*-*"):
                if not Path("/proc", left.name.split("-")[1]).exists():
                    with contextlib.suppress(OSError):
                        left.rmdir()
            tried = Cgroup(folder)
            try:
                _enter(tried)
            finally:
                _remove(tried.path)
            return folder
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror or error}")
    raise OSError("; ".join(reasons))


def _own_name() -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return line.removeprefix("0::")
    raise OSError("this process is in no cgroup of version 2")


def _enter(cgroup: Cgroup) -> None:
    """Move a process there, as a jail does. Raises OSError if it may not."""
    line = ["/bin/sh", "-c", 'echo 0 > "$0/cgroup.procs"', str(cgroup.path)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"no process can move below it: {done.stderr.strip()[-200:]}")


def _remove(path: Path) -> None:
    end = time.monotonic() + 1.0
    while True:
        try:
            path.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > end:
                return  # the next start removes it
        time.sleep(0.001)
