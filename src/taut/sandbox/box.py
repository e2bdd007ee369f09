"""``Sandbox``: runs programs that a model wrote. What is needed to hold them is in ``jail``, ``guest`` and ``kernel``.

Imports errors and its neighbours. ``mechanism`` imports it; others import the package.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from taut.errors import SandboxError
from taut.sandbox import kernel, workers
from taut.sandbox.limits import Limits, Ran, Trial

MechanismName = Literal["bubblewrap", "namespaces", "landlock"]


_INSIDE = Path("/taut/sandbox")
"""Where bubblewrap's jail has the files of this package: their own path would show where we are installed."""


class Mechanism(NamedTuple):
    """What holds the programs, and why it was chosen: a decision for the run log."""

    name: MechanismName
    reason: str


class Sandbox:
    """Runs programs, any number of threads at a time. Made by ``open_sandbox``."""

    def __init__(self, mechanism: Mechanism, packages: Sequence[str] = ()) -> None:
        self._packages = tuple(str(Path(it).expanduser().resolve()) for it in packages)
        self._readable = workers.readable(self._packages)
        is_root = mechanism.name == "landlock" and os.getuid() == 0
        self._stays_root = is_root and not all(map(workers.is_open, self._readable))
        if self._stays_root:
            more = "programs stay root, for nobody else may read what they need"
            mechanism = mechanism._replace(reason=f"{mechanism.reason}; {more}")
        self.mechanism = mechanism
        self._idle: list[workers.Worker] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def run(
        self,
        program: str,
        trials: Sequence[Trial],
        limits: Limits | None = None,
        stop_early: bool = False,
    ) -> list[Ran]:
        """What became of each trial of the program, in their order, when no process of it is left.

        ``stop_early``: the trials after the first that does not end in order are not run. Raises SandboxError where
        the sandbox failed; whatever the program does is in the results.
        """
        limits = limits or Limits()
        request = {
            "program": program.encode(errors="replace").decode(),
            "tests": [_as_test(trial) for trial in trials],
            "limits": limits.as_mapping(),
            "stop_early": stop_early,
            "readable": self._readable,
            "links": workers.links(),
            "uid": 0 if self._stays_root else workers.spare_user(),
        }
        worker = self._take(limits)
        try:
            results = worker.ask(request)
        except BaseException:
            worker.close()
            raise
        self._give_back(worker)
        return [Ran(out, err, outcome, took, value) for outcome, out, err, took, value in results]

    def close(self) -> None:
        """End the processes that wait for work; those at work end with it."""
        with self._lock:
            idle, self._idle, self._is_closed = self._idle, [], True
        for worker in idle:
            worker.close()

    def _take(self, limits: Limits) -> workers.Worker:
        if self._is_closed:
            raise SandboxError("the sandbox is closed; expected it open; open another")
        if self.mechanism.name == "bubblewrap":
            line = _bubblewrap(self._readable, limits)
            return workers.Worker(line + workers.command("once()", self._packages, _INSIDE))
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.pid == os.getpid():
                    return worker
                worker.close()  # the copy that a fork of this process has of its parent's
        return workers.Worker(workers.command(f"serve({self.mechanism.name!r})", self._packages))

    def _give_back(self, worker: workers.Worker) -> None:
        with self._lock:
            is_kept = self.mechanism.name != "bubblewrap" and not self._is_closed
            if is_kept:
                self._idle.append(worker)
        if not is_kept:
            worker.close()


def _as_test(trial: Trial) -> dict[str, Any]:
    return {
        "stdin": trial.stdin.encode(errors="replace").decode(),
        "call": trial.call,
        "arguments": trial.arguments,
        "check": trial.check,
    }


def _bubblewrap(readable: Sequence[str], limits: Limits) -> list[str]:
    """The jail as bubblewrap's options. It cannot bound the number of files; their sizes it can."""
    line = [
        *workers.KILLED_FIRST,
        shutil.which("bwrap") or "bwrap",
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
    ]
    line += ["--unshare-cgroup-try", "--die-with-parent", "--as-pid-1", "--cap-drop", "ALL"]
    if os.getuid() == 0:  # to become another user, by whom the kernel can count
        line += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        line += ["--unshare-user"]
    line += ["--perms", "1777", "--size", str(limits.scratch_mb * 2**20), "--tmpfs", "/tmp"]
    bound = {**{path: path for path in readable}, str(workers.FOLDER): str(_INSIDE)}
    for folder in sorted(
        {str(it) for path in bound.values() for it in Path(path).parents} - {"/"} | {"/dev"}
    ):
        line += ["--dir", folder]  # which bubblewrap by itself makes for its own user alone
    for path, place in bound.items():
        line += ["--ro-bind", path, place]
    for path in kernel.DEVICES:
        line += ["--dev-bind", path, path]
    for link, target in workers.links():
        line += ["--symlink", target, link]
    return [*line, "--remount-ro", "/", "--chdir", "/tmp", "--"]
