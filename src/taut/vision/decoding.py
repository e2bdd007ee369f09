"""Decoding in separate processes, so that a time limit holds in the middle of one call into a C library.

    replies = list(decoding.replies({"kind": "pixels", ...}, content, seconds))

A process does one job at a time and is kept for the next; threads that decode at the same time have one each. A job
that takes longer than ``seconds``, or more memory than allowed, loses its process and is an error; so is one whose
process crashes. The processes end with this one, however it ends.

Does not know what is decoded: ``decoder.py`` is the program of the processes.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from threading import BoundedSemaphore, Lock
from typing import Any

from taut.errors import DataError

START_SECONDS = 60.0
"""Time limit of the start of a process, which does not count as a job's time."""
MOST = max(4, os.cpu_count() or 1)
"""Largest number of processes."""
COMMAND = "from taut.vision.decoder import main; main({}, {})"
SETTINGS = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}


class Died(Exception):
    """The process ended before it answered; the text says how."""


def replies(
    job: dict[str, Any], content: bytes, seconds: float
) -> Iterator[tuple[dict[str, Any], bytes]]:
    """The replies of a process to a job. Raises TimeoutError, and Died."""
    with _slots:
        process = _take_process()
        is_done = False
        try:
            yield from process.replies(job, content, seconds)
            is_done = True
        finally:
            if is_done:
                with _lock:
                    _idle.append(process)
            else:
                process.end()


class _Process:
    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        held, self._leash = os.pipe()
        path = os.pathsep.join(filter(None, sys.path))
        try:
            with theirs:
                self._popen = subprocess.Popen(
                    [sys.executable, "-P", "-c", COMMAND.format(theirs.fileno(), held)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # libraries write there what is in the error, too
                    env={**os.environ, **SETTINGS, "PYTHONPATH": path},
                    pass_fds=[theirs.fileno(), held],
                    start_new_session=True,
                )
        except OSError as error:
            self._pipe.close()
            os.close(self._leash)
            raise DataError(
                f"no process can be started to decode pictures in: {error.strerror}; expected one; end other programs"
            ) from None
        finally:
            os.close(held)
        _live.add(self)
        try:
            if not self._pipe.poll(START_SECONDS):
                raise Died("did not start in time")
            self._pipe.recv_bytes()
        except (EOFError, OSError, Died) as error:
            how = str(error) if isinstance(error, Died) else self._how_it_ended()
            self.end()
            raise DataError(
                f"the process that decodes pictures {how} at its start; expected it to start; see what "
                f'{sys.executable} -c "import taut.vision.decoder" says'
            ) from None

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def replies(
        self, job: dict[str, Any], content: bytes, seconds: float
    ) -> Iterator[tuple[dict[str, Any], bytes]]:
        end = time.monotonic() + seconds
        try:
            self._pipe.send_bytes(json.dumps(job).encode())
            self._pipe.send_bytes(content)
            while True:
                if not self._pipe.poll(max(0.0, end - time.monotonic())):
                    raise TimeoutError
                reply = json.loads(self._pipe.recv_bytes())
                payload = self._pipe.recv_bytes()
                if "end" in reply:
                    return
                yield reply, payload
        except TimeoutError:
            raise
        except (EOFError, OSError):
            how = self._how_it_ended()
        if self._popen.returncode == -signal.SIGKILL:
            # not the fault of an image, so no row is left out for it
            raise DataError(
                "the process that decodes pictures was killed, as the system does when memory runs out; expected it to "
                "be left alone; set data.images.workers lower, or run where there is more memory"
            )
        raise Died(how)

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(5)
        code = self._popen.returncode
        if code is None:
            return "closed its pipe"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"

    def end(self) -> None:
        _live.discard(self)
        self._popen.kill()
        self._popen.wait()
        self._pipe.close()
        os.close(self._leash)

    def disown(self) -> None:
        """Forget the process in a forked one, which is not its parent."""
        self._popen.returncode = 0
        self._pipe.close()
        os.close(self._leash)


_lock, _slots = Lock(), BoundedSemaphore(MOST)
_idle: list[_Process] = []
_live: set[_Process] = set()
"""All processes, the busy ones included."""


def _take_process() -> _Process:
    """An idle process, or a new one."""
    while True:
        with _lock:
            process = _idle.pop() if _idle else None
        if process is None:
            return _Process()
        if process.is_alive:
            return process
        process.end()


def end_all() -> None:
    """End the idle processes."""
    with _lock:
        while _idle:
            _idle.pop().end()


def _begin_forked() -> None:
    global _lock, _slots
    _lock, _slots = Lock(), BoundedSemaphore(MOST)
    _idle.clear()
    while _live:
        _live.pop().disown()


atexit.register(end_all)
os.register_at_fork(after_in_child=_begin_forked)
