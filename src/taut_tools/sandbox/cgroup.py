"""A cgroup of version 2 for each jail: it limits memory and number of processes of a program and all its children.

A cgroup also counts memory that no limit of a single process counts: the scratch folder, pipes, sockets, page tables.
This process has to be allowed to divide a cgroup with the controllers memory and pids. Root may on a machine with
cgroups of version 2, and a user in a session of systemd; most containers do not allow it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import time
from pathlib import Path

from taut_tools.sandbox.limits import Limits

_NEEDED = {"memory", "pids"}
_OWN_MB = 64
"""Memory of the jail's own processes, in MiB."""
_OWN_PROCESSES = 8
_COUNT = itertools.count()


class Cgroup:
    """The cgroup of one jail, below ``parent``. Raises OSError if it cannot be made."""

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
        """Count the processes in it that the kernel killed for lack of memory."""
        lines = (self.path / "memory.events").read_text().splitlines()
        counts = dict(line.split() for line in lines)
        return int(counts["oom_kill"])

    def remove(self) -> None:
        """Remove it once its processes have ended, which the kernel notices a little later."""
        end = time.monotonic() + 1.0
        while True:
            try:
                self.path.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                if time.monotonic() > end:
                    return  # the next start removes it
            time.sleep(0.001)


def find_parent(root: Path | None = None) -> Path:
    """Find a directory in which jails' cgroups can be made, and remove leftovers of killed processes there. ``root`` is
    the mount point of cgroups. Raises OSError with the reasons if there is none.
    """
    if root is None:
        mounts = [
            line.partition(" - ") for line in Path("/proc/self/mountinfo").read_text().splitlines()
        ]
        places = [mount.split()[4] for mount, _, kind in mounts if kind.startswith("cgroup2 ")]
        if not places:
            raise OSError("cgroups of version 2 are not mounted")
        root = Path(places[0])
    # Try this process's own cgroup, then its parent.
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
            # Remove cgroups of processes that have ended; one with processes in it cannot be removed.
            for left in folder.glob("taut-*-*"):
                if not Path("/proc", left.name.split("-")[1]).exists():
                    with contextlib.suppress(OSError):
                        left.rmdir()
            tried = Cgroup(folder)
            try:
                _enter(tried)
            finally:
                tried.remove()
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
    """Move a process into a cgroup, as a jail does. Raises OSError if that is not allowed."""
    line = ["/bin/sh", "-c", 'echo 0 > "$0/cgroup.procs"', str(cgroup.path)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"no process can move below it: {done.stderr.strip()[-200:]}")
