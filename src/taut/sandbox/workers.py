"""The host's side of a jail: a process that builds jails (``jail``), asked by one thread at a time.

Imports errors only. ``mechanism`` and ``box`` import it.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from taut.errors import SandboxError

FOLDER = Path(__file__).parent
"""The files of this package."""
_GRACE = 20.0
"""Seconds an answer may take beside what the tests may: more than the jail's own."""
_ENVIRONMENT = {
    "LC_ALL": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
}
"""All that a program sees of an environment: sets have one order everywhere, threads are no more than asked for."""
KILLED_FIRST = ("/bin/sh", "-c", 'echo 1000 > /proc/self/oom_score_adj; exec "$@"', "sh")
"""Before a command line: the kernel kills it first, and what it starts, when the machine runs out of memory."""
_USERS = itertools.count()
_STUB = """
import sys, types
for name, path in (("taut", {package!r}), ("taut.sandbox", {folder!r})):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
sys.path += {packages!r}
from taut.sandbox import jail
jail.{call}
"""
"""Our package in a Python without site packages: these modules only, none of their parents' code."""


def interpreter() -> str:
    """The Python that runs us, without its virtual environment."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    path = Path(sys.base_prefix, "bin", name)
    return str(path.resolve() if path.exists() else Path(sys.executable).resolve())


def command(call: str, packages: Sequence[str], folder: Path = FOLDER) -> list[str]:
    """The command line of a process that does ``jail.call``. ``folder``: where it finds the files of this package."""
    code = _STUB.format(
        package=str(folder.parent), folder=str(folder), packages=list(packages), call=call
    )
    return [interpreter(), "-s", "-S", "-P", "-X", "utf8", "-c", code]


def readable(packages: Sequence[str]) -> list[str]:
    """All that a program may read: Python's library, the machine's shared libraries, ``packages``.

    The library is the base installation's: a virtual environment's would show its packages, and where it lies.
    """
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    paths = [sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")]
    paths += [interpreter(), str(Path(sys.base_prefix, "lib")), *packages]
    paths += ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
    return list(dict.fromkeys(os.path.realpath(path) for path in paths if Path(path).exists()))


def is_open(path: str) -> bool:
    """Whether anyone may go there and read."""
    is_reached = all(folder.stat().st_mode & 0o001 for folder in Path(path).parents)
    return is_reached and bool(Path(path).stat().st_mode & 0o004)


def links() -> list[tuple[str, str]]:
    """The links of the root directory that lead to them."""
    return [(it, os.readlink(it)) for it in ("/lib", "/lib64") if Path(it).is_symlink()]  # noqa: PTH115


def spare_user() -> int:
    """A user number that no one has, another for each jail: what the kernel counts by user is counted by jail."""
    return 0x70000000 + (os.getpid() % 2**15) * 2**12 + next(_USERS) % 2**12


class Worker:
    """A process that answers requests. Not for two threads at once."""

    def __init__(self, line: Sequence[str]) -> None:
        self.pid = os.getpid()
        try:
            self._process = subprocess.Popen(
                line,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=_ENVIRONMENT,
                cwd="/",
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise SandboxError(
                f"the sandbox's process cannot be started: {error}; expected {line[0]} to run; correct that"
            ) from error

    def ask(self, request: Mapping[str, Any]) -> list[Any]:
        """The results; SandboxError where the sandbox failed, after which the worker is of no more use."""
        body = json.dumps(request).encode()
        end = time.monotonic() + request["limits"]["total_seconds"] + _GRACE
        try:
            self._send(len(body).to_bytes(8, "big") + body, end)
            answer = json.loads(self._take(int.from_bytes(self._take(8, end), "big"), end))
        except (OSError, ValueError) as error:
            raise SandboxError(
                f"the sandbox's process failed: {error or type(error).__name__}; expected an answer; run again, and "
                "look for a lack of memory or of processes on this machine"
            ) from error
        if "error" in answer:
            raise SandboxError(
                f"the sandbox failed: {answer['error']}; expected a jail; see docs/sandbox.md"
            )
        results: list[Any] = answer["results"]
        return results

    def close(self) -> None:
        """End it, and what it holds."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        if os.getpid() != self.pid:
            return  # a fork's copy: the process is another's
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, body: bytes, end: float) -> None:
        assert self._process.stdin is not None
        writer, text = self._process.stdin.fileno(), memoryview(body)
        while text:
            if not _is_ready(writer, select.POLLOUT, end):
                raise TimeoutError("it took no request in time")
            text = text[os.write(writer, text[:4096]) :]

    def _take(self, size: int, end: float) -> bytes:
        assert self._process.stdout is not None
        reader, chunks = self._process.stdout.fileno(), []
        while size:
            if not _is_ready(reader, select.POLLIN, end):
                raise TimeoutError("it gave no answer in time")
            chunk = os.read(reader, min(size, 1 << 20))
            if not chunk:
                raise ConnectionError("it ended")
            chunks.append(chunk)
            size -= len(chunk)
        return b"".join(chunks)


def _is_ready(descriptor: int, event: int, end: float) -> bool:
    """Before ``end``; poll, for select knows small numbers only."""
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(max(end - time.monotonic(), 0) * 1000))
