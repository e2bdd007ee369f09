"""Run functions on untrusted input (chat templates, regular expressions of adapters) in a helper process, with limits
on processor time and memory.

    answer = processes.call("taut.data.chat_text:render", *arguments)      LimitExceeded, FunctionFailed

A Jinja template or a regular expression of one line can run for years or ask for all memory, and a thread cannot be
stopped in the middle of either. The kernel enforces both limits: a timer of processor time (ITIMER_PROF), whose signal
ends the process, and RLIMIT_AS, if /proc says how much the process has already (Linux); elsewhere memory is not
limited. Processor time depends neither on the load of the machine nor on a suspended run.

One process serves all calls of this process, one at a time. It starts at the first call, or at ``start``, and a new one
takes its place after a limit was exceeded. It gets no environment variables but those Python and the clock need, is in
a session of its own (Ctrl-C does not reach it), and the kernel ends it together with this process.
"""

from __future__ import annotations

import atexit
import fcntl
import importlib
import json
import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from taut.errors import TautError

SECONDS = 10.0
"""Processor time of one call."""
MEMORY_MB = 1024
"""Memory of one call, beyond what the process holds after its imports."""
OUT_OF_MEMORY = 3
"""The exit status of a process that reached its memory limit."""
COMMAND = "import sys; sys.path[:] = {path!r}; from taut.io.processes import serve; serve({alive})"
ENVIRONMENT = (
    "PATH",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "TZ",
    "LANG",
    "LC_ALL",
    "HOME",
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "USE_TORCH": "0"}
"""Added to its environment: it computes nothing, and torch would take seconds and memory to load."""
_LENGTH = struct.Struct("=Q")


class LimitExceeded(TautError):
    """A call needed more than it may have. The message completes "it ..."."""


class FunctionFailed(TautError):
    """The function raised an exception; the message is that of the exception, or its type's name."""


class _Server:
    """The process, and the pipes to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._alive = -1
        """The write end of a pipe on which nothing is written: the process gets a signal when it is closed."""

    def start(self) -> None:
        with self._lock:
            self._started()

    def call(
        self, function: str, arguments: tuple[Any, ...], seconds: float, memory_mb: int
    ) -> Any:
        request = pickle.dumps((function, seconds, memory_mb, arguments))
        with self._lock:
            process = self._started()
            assert process.stdin is not None and process.stdout is not None
            try:
                _write(process.stdin.fileno(), request)
                answer = _read(process.stdout.fileno())
            except BrokenPipeError:
                answer = None
            except BaseException:  # its answer would be taken for the next call's
                self.stop()
                raise
            if answer is None:
                raise LimitExceeded(self._why_it_ended(process, seconds, memory_mb))
        outcome, value = json.loads(answer.decode("utf-8", "surrogatepass"))
        if outcome == "limit":
            raise LimitExceeded(value)
        if outcome == "failed":
            raise FunctionFailed(value)
        return value

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.stop()
        theirs, self._alive = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", COMMAND.format(path=sys.path, alive=theirs)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env={
                    **{name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
                    **ONE_THREAD,
                },
                pass_fds=[theirs],
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        return self._process

    def _why_it_ended(
        self, process: subprocess.Popen[bytes], seconds: float, memory_mb: int
    ) -> str:
        status = process.wait()
        self.stop()
        if status == -signal.SIGPROF:
            return f"needs more than {seconds:g} s of processor time"
        if status == OUT_OF_MEMORY:
            return f"needs more than {memory_mb:,} MB of memory"
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return f"ended the process that ran it ({how})"

    def stop(self) -> None:
        process = self._process
        if process is not None:
            process.kill()
            process.wait()
        self._close()

    def forget(self) -> None:
        """In a forked process, which is not the helper's parent."""
        if self._process is not None:
            self._process.returncode = 0  # else Popen waits for it
        self._close()
        self._lock = threading.Lock()

    def _close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.stdout.close()
        if self._alive >= 0:
            os.close(self._alive)
            self._alive = -1


_server = _Server()
os.register_at_fork(after_in_child=_server.forget)
atexit.register(_server.stop)


def start() -> None:
    """Start the process, so that it is ready when it is first needed."""
    _server.start()


def call(
    function: str, *arguments: Any, seconds: float = SECONDS, memory_mb: int = MEMORY_MB
) -> Any:
    """The result of ``function`` ("module:name") in the helper process. ``arguments`` are pickled, the result is
    JSON."""
    return _server.call(function, arguments, seconds, memory_mb)


def serve(alive: int) -> None:
    """Answer calls on standard input and output until standard input is closed."""
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, fcntl.F_SETFL, os.O_ASYNC)  # SIGIO, whose default is to end the process
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints is no answer
    known: dict[str, Callable[..., Any]] = {}
    held: int | None = None
    while (request := _read(0)) is not None:
        name, seconds, memory_mb, arguments = pickle.loads(request)
        if name not in known:
            module, _, attribute = name.partition(":")
            known[name] = getattr(importlib.import_module(module), attribute)
            held = _address_space()
        if held is not None:
            _limit_address_space(held + memory_mb * 2**20)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            _write(answers, _answer(known[name], arguments))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if held is not None:
            _limit_address_space(resource.RLIM_INFINITY)


def _answer(function: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    try:
        answer = ["value", function(*arguments)]
    except MemoryError:
        raise
    except LimitExceeded as error:
        answer = ["limit", str(error)]
    except Exception as error:  # noqa: BLE001 - raised again in the process that called
        answer = ["failed", (str(error).splitlines() or [""])[0] or type(error).__name__]
    return json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _limit_address_space(number: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    unlimited = resource.RLIM_INFINITY
    numbers = [one for one in (number, most) if one != unlimited]
    resource.setrlimit(resource.RLIMIT_AS, (min(numbers, default=unlimited), most))


def _address_space() -> int | None:
    """Bytes of address space that the process has; None where the system does not say."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    except OSError:
        return None
    return int(pages) * resource.getpagesize()


def _write(descriptor: int, message: bytes) -> None:
    rest = memoryview(_LENGTH.pack(len(message)) + message)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _read(descriptor: int) -> bytearray | None:
    """One message; None: the stream ended before it did."""
    message = bytearray()
    length = _LENGTH.size
    while len(message) < length:
        part = os.read(descriptor, min(length - len(message), 2**20))
        if not part:
            return None
        message += part
        if length == _LENGTH.size and len(message) == length:
            length += _LENGTH.unpack(message)[0]
    del message[: _LENGTH.size]
    return message
