"""The host's side of one program: its jail (a process that runs ``runner``), its trials, their limits of time and
output.

The host makes a trial's pipes and sends their ends to the runner, writes the program and its input, reads its output,
and ends it at a limit. Only descriptors and numbers go through the runner itself.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import marshal
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from taut.errors import SandboxError
from taut_tools.sandbox import runner
from taut_tools.sandbox.cgroup import Cgroup
from taut_tools.sandbox.limits import Limits, Outcome, Ran, Trial

GRACE = 20.0
"""Seconds that a runner may take to be ready, or to answer after the end of a trial."""
_CHUNK = 65536
SHOWN = 500
"""Maximum characters of a failed runner's message that an error repeats."""
ENVIRONMENT = {
    "LC_ALL": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "HOME": runner.SCRATCH,
    "TMPDIR": runner.SCRATCH,
}
"""The whole environment of a program: sets have one order everywhere, libraries start no threads by themselves."""
_LIVE: set[Streams] = set()
"""The pipes of the trials that run."""
_STARTING = threading.RLock()
"""Held while pipes or a process are made, and while this process forks. A forked copy of a pipe that nobody closes
would keep a program's input open, or keep Popen waiting for its own pipe."""


class JailDied(Exception):
    """The jail's process ended during a trial."""


class Jail:
    """A process that runs the trials of one program and is used once. It has the command line ``line``, and starts in
    ``cgroup`` if there is one.
    """

    def __init__(self, line: Sequence[str], cgroup: Cgroup | None) -> None:
        self._cgroup = cgroup
        with _STARTING:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                self._process = subprocess.Popen(
                    line,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    env=ENVIRONMENT,
                    cwd="/",
                    start_new_session=True,
                )
            except OSError as error:
                self._control.close()
                if cgroup is not None:
                    cgroup.remove()
                raise SandboxError(
                    f"the sandbox's process cannot be started: {error}; expected {line[0]} to run; correct that"
                ) from error
            finally:
                theirs.close()

    def begin(self, limits: Limits, settings: Mapping[str, Any]) -> None:
        """Wait until the jail is ready for a program. Raises SandboxError if it fails."""
        if self._cgroup is not None:
            self._cgroup.limit(limits)
        message = {
            **settings,
            "scratch_mb": limits.scratch_mb,
            "scratch_files": limits.scratch_files,
        }
        us = os.pidfd_open(os.getpid())
        try:
            self._send(marshal.dumps(message), [us])
            answer = self._answer(time.monotonic() + GRACE)
        except JailDied as error:
            raise SandboxError(
                f"the sandbox's process failed: {self._last_words() or error}; expected it to start; see taut sandbox"
            ) from error
        finally:
            os.close(us)
        if answer != runner.READY:
            reason = answer.decode(errors="replace")
            raise SandboxError(f"the sandbox failed: {reason}; expected a jail; see taut sandbox")

    def run(self, program: str, trial: Trial, limits: Limits, seconds: float) -> Ran:
        """Run one trial; its result, once no process of it is left. Raises JailDied."""
        streams = Streams(as_request(program, trial, limits), limits)
        start = time.monotonic()
        killed_before = self._num_killed()
        try:
            self._send(b"run", streams.childs_ends)
            streams.close_childs_ends()
            reason = streams.pass_on(
                self._control.fileno(), start + min(limits.wall_seconds, seconds)
            )
            if reason is not None:
                self._send(b"kill", [])
            status, cpu_seconds = self._answer(time.monotonic() + GRACE).split(maxsplit=1)
            if status == b"error":
                message = cpu_seconds.decode(errors="replace")
                raise SandboxError(
                    f"the sandbox failed before the program: {message}; expected a process for it; raise the limit of "
                    "processes or run fewer programs at a time"
                )
            reason = streams.rest() or reason
        finally:
            streams.close()
        took = time.monotonic() - start
        ran = result_of(int(status), float(cpu_seconds), streams, reason, took, trial, limits)
        is_killed = ran.outcome == "crash" and self._num_killed() > killed_before
        return ran._replace(outcome="memory") if is_killed else ran

    def is_out_of_memory(self) -> bool:
        """Whether the kernel killed processes of the jail for lack of memory."""
        return self._num_killed() > 0

    def close(self) -> None:
        """End the jail with all its processes."""
        # Shut down the socket itself, not only our descriptor: a fork of this process may have a copy.
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self.forget()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._cgroup is not None:
            self._cgroup.remove()

    def forget(self) -> None:
        """Close this process's descriptors, which is all that a fork does with a jail of its parent."""
        self._control.close()
        if self._process.stderr is not None:
            self._process.stderr.close()

    def _send(self, message: bytes, descriptors: Sequence[int]) -> None:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        try:
            self._control.sendmsg([message], [rights] if descriptors else [])
        except OSError as error:
            raise JailDied(f"it ended: {error}") from error

    def _answer(self, end: float) -> bytes:
        if not wait_for([(self._control.fileno(), select.POLLIN)], end):
            raise JailDied(f"it gave no answer in {GRACE:.0f} s")
        try:
            answer = self._control.recv(1 << 16)
        except OSError as error:
            raise JailDied(f"it ended: {error}") from error
        if not answer:
            raise JailDied("it ended")
        return answer

    def _num_killed(self) -> int:
        return self._cgroup.num_killed() if self._cgroup is not None else 0

    def _last_words(self) -> str:
        assert self._process.stderr is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        os.set_blocking(self._process.stderr.fileno(), False)
        message = self._process.stderr.read() or b""
        return " ".join(message.decode(errors="replace").split())[-SHOWN:]


class Streams:
    """The pipes of a trial: its input, and its output under a limit."""

    def __init__(self, content: bytes, limits: Limits) -> None:
        with _STARTING:
            pipes: list[tuple[int, int]] = []
            try:
                for _ in runner.STREAMS:
                    pipes.append(os.pipe())
            except OSError:
                for end in itertools.chain(*pipes):
                    os.close(end)
                raise
            child_in, self._feed = pipes[0]
            self._readers, writers = zip(*pipes[1:], strict=True)
            self.childs_ends = [child_in, *writers]
            _LIVE.add(self)
        self.printed = [bytearray() for _ in self._readers]
        self._room = limits.output_kb * 1024
        self._unfed = memoryview(content)
        for descriptor in (self._feed, *self._readers):
            os.set_blocking(descriptor, False)
        self.begun = self._readers[-1]

    def close_childs_ends(self) -> None:
        while self.childs_ends:
            os.close(self.childs_ends.pop())

    def close(self) -> None:
        _LIVE.discard(self)
        self.close_childs_ends()
        self._close_feed()
        for reader in self._readers:
            os.close(reader)

    def pass_on(self, ended: int, end: float) -> Outcome | None:
        """Feed and read until ``ended`` can be read, which gives None, or until a limit, which gives the outcome."""
        open_readers = set(self._readers)
        while True:
            wanted = [(reader, select.POLLIN) for reader in (ended, *open_readers)]
            wanted += [(self._feed, select.POLLOUT)] if self._feed >= 0 else []
            ready = wait_for(wanted, end)
            if not ready:
                return "time"
            if self._feed in ready:
                self._write()
            for reader in open_readers & ready:
                if not self._read(reader):
                    open_readers.remove(reader)
            if self._room < 0:
                return "output"
            if ended in ready:
                return None

    def rest(self) -> Outcome | None:
        """Read the rest of the output, when no process is left that could write."""
        for reader in self._readers:
            while self._room >= 0 and wait_for([(reader, select.POLLIN)], 0) and self._read(reader):
                pass
        return "output" if self._room < 0 else None

    def _read(self, reader: int) -> bool:
        """Read from a pipe; False at its end."""
        try:
            chunk = os.read(reader, _CHUNK)
        except BlockingIOError:  # with /proc a program can read its own pipe back
            return True
        printed = self.printed[self._readers.index(reader)]
        if reader == self.begun:  # a few bytes of the runner, which no limit of output touches
            printed += chunk
        else:
            printed += chunk[: max(self._room, 0)]
            self._room -= len(chunk)
        return bool(chunk)

    def _write(self) -> None:
        try:
            self._unfed = self._unfed[os.write(self._feed, self._unfed[:_CHUNK]) :]
        except BrokenPipeError:  # no process reads it
            self._unfed = self._unfed[:0]
        if not self._unfed:
            self._close_feed()

    def _close_feed(self) -> None:
        if self._feed >= 0:
            with _STARTING:
                os.close(self._feed)
                self._feed = -1


def _begin_forked() -> None:
    """Close a fork's copies: while it held the end that feeds a program, the program's input would have no end."""
    for streams in list(_LIVE):
        with contextlib.suppress(OSError):  # a thread of the parent was about to close it
            streams.close()
    _STARTING.release()


os.register_at_fork(
    before=_STARTING.acquire, after_in_parent=_STARTING.release, after_in_child=_begin_forked
)


def as_request(
    program: str, trial: Trial, limits: Limits, more: Mapping[str, str] | None = None
) -> bytes:
    """The bytes that a child reads: a frame with program and test, then the program's own input."""
    request = {
        "program": _plain(program),
        "limits": limits.as_mapping(),
        "call": _plain(trial.call),
        "arguments": _plain(trial.arguments),
        "check": _plain(trial.check),
        **(more or {}),
    }
    body = marshal.dumps(request)
    return len(body).to_bytes(8, "big") + body + _plain(trial.stdin).encode()


def result_of(
    status: int,
    cpu_seconds: float,
    streams: Streams,
    reason: Outcome | None,
    took: float,
    trial: Trial,
    limits: Limits,
) -> Ran:
    """The result of a trial. ``status`` is the child's as wait tells it, ``reason`` the limit at which it was ended."""
    stdout, stderr, report, begun = (
        bytes(stream).decode(errors="replace") for stream in streams.printed
    )
    if not begun and reason is None:
        if os.WIFEXITED(status):
            raise SandboxError(
                f"the sandbox failed before the program: {stderr[-SHOWN:]}; expected its limits set; see taut sandbox"
            )
        raise JailDied("a signal ended the child before the program")
    outcome: Outcome
    if reason is not None:
        outcome = reason
    elif os.WIFSIGNALED(status):
        is_cpu = os.WTERMSIG(status) == signal.SIGXCPU or cpu_seconds >= limits.cpu_seconds
        outcome = "cpu" if is_cpu else "crash"
    elif report == runner.MEMORY.decode():
        outcome = "memory"
    else:
        is_done = report.startswith(runner.DONE.decode()) or not (trial.call or trial.check)
        outcome = "ok" if os.WEXITSTATUS(status) == 0 and is_done else "error"
    value = report[len(runner.DONE) :] if outcome == "ok" and trial.call else None
    return Ran(stdout, stderr, outcome, took, value)


def wait_for(wanted: Sequence[tuple[int, int]], end: float) -> set[int]:
    """The descriptors that are ready before ``end``. Uses poll, as select takes small numbers only."""
    poll = select.poll()
    for descriptor, event in wanted:
        poll.register(descriptor, event)
    return {descriptor for descriptor, _ in poll.poll(max(end - time.monotonic(), 0) * 1000)}


def _plain(text: str) -> str:
    """Replace lone surrogates by question marks."""
    return text.encode(errors="replace").decode()
