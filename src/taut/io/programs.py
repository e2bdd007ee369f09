"""Programs that the user names, run by taut: what they start ends with them, and their output is bounded.

    program = Program(["python", "agent.py"], environment, stdin=file)      OSError
    program.wait()                          its exit status
    program.out.end()       -> the last of what it printed
    program.end()           ends it, with all that it started

Each is started by a keeper (``keeper.py``), so it ends with taut, too. Its output is read to the end while it runs, and
of it no more than the last ``KEPT`` bytes are held.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from errno import ENOENT
from functools import partial
from threading import Thread
from typing import IO, Any

from taut.io import keeper
from taut.io.worker_process import Helper

KEPT = 2**20
"""Bytes of a program's output that are held, and of each of an MCP server's messages."""


class Tail:
    """Reads a pipe to its end in a thread, and holds the last of it."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._kept = bytearray()
        self.is_cut = False
        self._thread = Thread(target=self._read, args=(pipe,), name="output", daemon=True)
        self._thread.start()

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            while chunk := os.read(pipe.fileno(), 65536):
                self._kept += chunk
                self.is_cut |= len(self._kept) > KEPT
                del self._kept[:-KEPT]

    def end(self, seconds: float = 1.0) -> list[str]:
        """The lines of it, once the program has ended: a process that got away may hold the pipe open."""
        self._thread.join(seconds)
        return bytes(self._kept).decode(errors="replace").strip().splitlines()


class Program(Helper):
    """A program that runs. ``end`` ends it, with all that it started."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdin: IO[bytes] | int = subprocess.DEVNULL,
        descriptors: Sequence[int] = (),
        **settings: Any,
    ) -> None:
        """``descriptors``: those that it inherits. ``settings``: ``keeper.kept``. OSError: it cannot be started."""
        super().__init__()
        if shutil.which(command[0], path=environment.get("PATH", os.defpath)) is None:
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT), command[0])
        line = partial(keeper.kept, command, **settings)
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        self._open(line, environment, descriptors, True, {"stdin": stdin, **pipes})
        assert self.process is not None
        self.pid, self.wait = self.process.pid, self.process.wait
        assert self.process.stdout is not None and self.process.stderr is not None
        self.out, self.err = Tail(self.process.stdout), Tail(self.process.stderr)
