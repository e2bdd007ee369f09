"""``Sandbox``: runs programs that a model wrote, each in a jail of its own that is used once.

The next jail starts while the last one works, so that programs seldom wait.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from taut.config import home_path
from taut.errors import SandboxError
from taut_tools.sandbox import cgroup, launch, seccomp_rules
from taut_tools.sandbox.gvisor import Gvisor
from taut_tools.sandbox.jail import Jail, JailDied
from taut_tools.sandbox.limits import Limits, Ran, Trial

MechanismName = Literal["gvisor", "bubblewrap", "landlock"]

_Jail = Jail | Gvisor

_OUTPUTS = 16
"""Output of all trials of a program together, as a multiple of the limit of one."""
_USERS = itertools.count()
_OPEN: weakref.WeakSet[Sandbox] = weakref.WeakSet()
"""The sandboxes of this process, which a fork copies."""


class Mechanism(NamedTuple):
    """The mechanism that contains programs, and the reason for it: a decision for the run log."""

    name: MechanismName
    reason: str


class Sandbox:
    """Runs programs, from any number of threads. Made by ``open_sandbox``."""

    def __init__(
        self, mechanism: Mechanism, packages: Sequence[str] = (), files: Sequence[str] = ()
    ) -> None:
        """Prepare a sandbox. Programs may import from the folders ``packages``, and read ``files`` besides."""
        self._packages = tuple(str(home_path(package).resolve()) for package in packages)
        readable = launch.readable(self._packages)
        others = (file for file in files if not any(map(Path(file).is_relative_to, readable)))
        self._readable = [*readable, *others]
        self._has_namespaces = mechanism.name != "landlock"
        is_root = os.getuid() == 0
        self._stays_root = not self._has_namespaces and not all(map(launch.is_open, self._readable))
        if is_root and self._stays_root:
            more = "programs stay root, for no other user may read what they need"
            mechanism = mechanism._replace(reason=f"{mechanism.reason}; {more}")
        self.mechanism = mechanism
        self._ahead: collections.deque[_Jail] = collections.deque()
        self._num_running = 0
        self._lock = threading.Lock()
        self._is_closed = False
        _OPEN.add(self)
        self.cgroups = "not for gVisor's" if mechanism.name == "gvisor" else _cgroups()
        """The parent of the jails' cgroups, or the reason why there are none."""

    def run(
        self,
        program: str,
        trials: Sequence[Trial],
        limits: Limits | None = None,
        stop_early: bool = False,
    ) -> list[Ran]:
        """Run the trials of a program; their results in order, once no process of the program is left.

        ``stop_early`` runs no trial after the first that is not ok. Raises SandboxError if the sandbox fails; anything
        that the program does is in the results.
        """
        try:
            return self._run(program, trials, limits or Limits(), stop_early)
        except OSError as error:
            raise SandboxError(
                f"the sandbox failed on this side of its wall: {error}; expected descriptors and processes; raise the "
                "limit or run fewer programs at a time"
            ) from error

    def _run(
        self, program: str, trials: Sequence[Trial], limits: Limits, stop_early: bool
    ) -> list[Ran]:
        results: list[Ran] = []
        modules = ["json"] if any(trial.call for trial in trials) else []  # once, not in each trial
        jail = self._take(limits, modules)
        try:
            end = time.monotonic() + limits.total_seconds
            for trial in trials:
                left = end - time.monotonic()
                printed = sum(len(ran.stdout) + len(ran.stderr) for ran in results)
                is_over = left <= 0 or printed > _OUTPUTS * 1024 * limits.output_kb
                if is_over or (stop_early and results and results[-1].outcome != "ok"):
                    results.append(Ran("", "", "not_run", 0.0))
                    continue
                for _ in range(2):  # a program in which two jails die is at fault itself
                    try:
                        ran = jail.run(program, trial, limits, left)
                        break
                    except JailDied:
                        ran = Ran("", "", "memory" if jail.is_out_of_memory() else "crash", 0.0)
                        jail.close()
                        jail = self._begun(self._start(), limits, modules)
                results.append(ran)
            return results
        finally:
            with self._lock:  # first: an interrupt may end the other
                self._num_running -= 1
            jail.close()

    def close(self) -> None:
        """End the jails that wait for a program."""
        with self._lock:
            self._is_closed = True
            waiting, self._ahead = self._ahead, collections.deque()
        for jail in waiting:
            jail.close()

    def begin_forked(self) -> None:
        """Start anew in a forked process: the jails are the parent's, and no thread could release the lock."""
        self._lock = threading.Lock()
        self._num_running = 0
        while self._ahead:
            self._ahead.pop().forget()

    def _take(self, limits: Limits, modules: Sequence[str]) -> _Jail:
        """Take a jail that is ready, and start others for the next programs."""
        with self._lock:
            if self._is_closed:
                raise SandboxError("the sandbox is closed; expected it open; open another")
            jail = self._ahead.popleft() if self._ahead else self._start()
            try:
                while len(self._ahead) < min(self._num_running + 1, os.cpu_count() or 1):
                    self._ahead.append(self._start())
            except BaseException:
                jail.close()
                raise
            self._num_running += 1
        try:
            with contextlib.suppress(SandboxError):  # it died while it waited, say without memory
                return self._begun(jail, limits, modules)
            return self._begun(self._start(), limits, modules)
        except BaseException:
            with self._lock:
                self._num_running -= 1
            raise

    def _begun(self, jail: _Jail, limits: Limits, modules: Sequence[str]) -> _Jail:
        """Wait until a jail is ready for a program."""
        try:
            jail.begin(limits, {**self._settings(), "modules": modules})
        except BaseException:
            jail.close()
            raise
        return jail

    def _start(self) -> _Jail:
        if self.mechanism.name == "gvisor":
            return Gvisor(self._readable, self._packages)
        jail_cgroup = cgroup.Cgroup(self.cgroups) if isinstance(self.cgroups, Path) else None
        wall = launch.bubblewrap if self._has_namespaces else launch.landlock
        return Jail(
            launch.prepared(jail_cgroup) + wall(self._readable, self._packages), jail_cgroup
        )

    def _settings(self) -> dict[str, Any]:
        is_another = os.getuid() == 0 and not self._stays_root
        return {
            "has_namespaces": self._has_namespaces,
            "readable": self._readable,
            "calls": seccomp_rules.compiled(self._has_namespaces).hex(),
            # An unused number for each jail, so that the kernel, which counts by user, counts by jail.
            "user": 0x70000000 + (os.getpid() % 2**15) * 2**12 + next(_USERS) % 2**12
            if is_another
            else 0,
        }


def _begin_forked() -> None:
    for sandbox in _OPEN:
        sandbox.begin_forked()


os.register_at_fork(after_in_child=_begin_forked)


@functools.cache
def _cgroups() -> Path | str:
    try:
        return cgroup.find_parent()
    except OSError as error:
        return str(error)
