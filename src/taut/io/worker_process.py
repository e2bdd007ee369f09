"""A helper process: a new Python interpreter that serves this process through a pipe, and ends with it.

    helper = Helper()
    helper.start("from package.module import main; main({}, {})", environment)      {}: pipe, leash
    with helper.limit(seconds):                                                      Late
        helper.pipe.send(...)
        ... = helper.pipe.recv()
    helper.end()

A new interpreter, not a fork: no lock of this process is copied, and its main script is not run again. The helper is in
a session of its own, so Ctrl-C in a terminal does not reach it, and it is killed with all processes that it started. It
ends with this process, however that ends: at exit it is killed, and the other end of its leash, a pipe on which nothing
is written, is closed by the kernel. A fork of this process has no helpers.

``limited_call.py`` (limited functions), vision/decoding.py and rewards/workers.py run helpers; ``begin`` is for the
helper's side.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from taut.io import keeper

PATIENCE = 5.0
"""Seconds from the end of a process's pipe to its own end; an interpreter closes files before it exits."""


class Late(Exception):
    """The helper did not answer in time and has been ended."""


class Helper:
    """At most one process at a time. One thread at a time uses it; ``kill`` may be called from any."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._leash = -1
        self._is_kept = False

    @property
    def pipe(self) -> Connection:
        """This end of the pipe. OSError: there is no process."""
        if self._pipe is None:
            raise OSError("the process has been ended")
        return self._pipe

    @property
    def is_alive(self) -> bool:
        """Whether the process runs. If the system allows, one that ended is not reaped here: its number stays that of
        its session until the session is killed."""
        if self.process is None or self.process.returncode is not None:
            return False
        if not hasattr(os, "waitid"):
            return self.process.poll() is None
        try:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self.process.pid, options) is None
        except ChildProcessError:
            return False

    def start(
        self,
        command: str,
        environment: Mapping[str, str],
        *,
        stdout: int | None = subprocess.DEVNULL,
        stderr: int | None = None,
        is_kept: bool = False,
    ) -> None:
        """Start a process in place of the last one. OSError: the system starts none.

        ``command``: Python source with two ``{}``, for the descriptors that ``begin`` takes. It has this process's
        path of imports. ``is_kept``: it runs the user's code, and what that starts in sessions of its own ends with it
        (``keeper.py``).
        """
        self.end()
        self._pipe, theirs = Pipe()

        def line(leash: int) -> list[str]:
            source = command.format(theirs.fileno(), leash)
            words = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {source}"]
            return keeper.kept(words, leash) if is_kept else words

        streams = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr}
        with theirs:
            self._open(line, environment, [theirs.fileno()], is_kept, streams)

    def _open(
        self,
        line: Callable[[int], list[str]],
        environment: Mapping[str, str],
        descriptors: Sequence[int],
        is_kept: bool,
        streams: Mapping[str, Any],
    ) -> None:
        """``line``: the command line, of the descriptor of its end of the leash."""
        held, self._leash = os.pipe()
        self._is_kept = is_kept
        _live.add(self)
        try:
            self.process = subprocess.Popen(
                line(held),
                env=dict(environment),
                pass_fds=[*descriptors, held],
                start_new_session=True,
                **streams,
            )
        except OSError:
            self.end()
            raise
        finally:
            os.close(held)

    @contextlib.contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """Kill the process if the block takes longer; reading or writing then fails, and Late is raised.

        A process that was stopped (SIGSTOP) reads nothing, so sending may block, too. The limit needs no signal and
        holds in any thread.
        """
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            self.kill()
            # what the process started may hold its end of the pipe, too
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as ours:
                ours.shutdown(socket.SHUT_RDWR)

        pipe = self.pipe
        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        except (EOFError, OSError):
            if is_late.is_set():
                raise Late from None
            raise
        finally:
            timer.cancel()
            timer.join()
            if is_late.is_set():
                self.end()
        if is_late.is_set():  # the answer came while the process was being ended
            raise Late

    def kill(self) -> None:
        """Kill the process and what it started; a call that waits for it fails. A reaped process is left alone: its
        number may belong to another process by now."""
        process = self.process
        if process is None or process.returncode is not None:
            return
        if self._is_kept:
            keeper.end_tree(process.pid)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def reap(self) -> int | None:
        """End the process after it closed its pipe, and what it started. Its exit status, negative for a signal; None:
        it did not end by itself."""
        process = self.process
        if process is None:  # the interpreter exits, and has ended it
            return None
        deadline = time.monotonic() + PATIENCE
        # an interpreter closes files before it exits
        while (is_alive := self.is_alive) and time.monotonic() < deadline:
            time.sleep(0.005)
        self.kill()
        status = process.wait()
        self.end()
        return None if is_alive else status

    def end(self) -> None:
        """Kill the process, if there is one, and forget it."""
        self.kill()
        if self.process is not None:
            self.process.wait()
        self._forget()

    def _forget(self) -> None:
        _live.discard(self)
        if self._pipe is not None:
            self._pipe.close()
        if self._leash >= 0:
            os.close(self._leash)
        self.process, self._pipe, self._leash = None, None, -1


_live: set[Helper] = set()
"""Helpers with a process."""


def _end_all() -> None:
    for helper in list(_live):
        helper.end()


def _forget_all() -> None:
    """Forget the helpers in a forked process, which is not their parent."""
    for helper in list(_live):
        if helper.process is not None:
            helper.process.returncode = 0  # else Popen waits for it
        helper._forget()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_all)


def how_it_ended(status: int | None) -> str:
    """The result of ``Helper.reap`` in words."""
    if status is None:
        return "closed its pipe"
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"


def begin(descriptor: int, leash: int) -> Connection:
    """Open the helper's end of the pipe, in the helper; processes that it starts do not get it.

    When the machine runs out of memory, the kernel kills this process before the one that trains.
    """
    end_with_parent(leash)
    with contextlib.suppress(OSError), Path("/proc/self/oom_score_adj").open("w") as file:
        file.write("1000")
    os.set_inheritable(descriptor, False)
    return Connection(descriptor)


def end_with_parent(leash: int) -> None:
    """End this process when the other end of its leash, a pipe on which nothing is written, is closed: the kernel then
    sends SIGIO, whose default is to end the process, even inside C code.
    """
    fcntl.fcntl(leash, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(leash, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    os.set_inheritable(leash, False)
