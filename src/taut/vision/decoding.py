"""Decoding in separate processes, so that a time limit holds in the middle of one call into a C library.

    replies = list(decoding.replies({"kind": "pixels", ...}, content, seconds))

A process does one job at a time and is kept for the next; threads that decode at the same time have one each. A job
that takes longer than ``seconds``, or more memory than allowed, loses its process and is an error; so is one whose
process crashes.

Does not know what is decoded: ``decoder.py`` is the program of the processes (``taut.io.worker_process``).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from threading import BoundedSemaphore, Lock
from typing import Any

from taut.errors import DataError
from taut.io.worker_process import Helper, Late, how_it_ended

START_SECONDS = 60.0
"""Time limit of the start of a process, which does not count as a job's time."""
MAX_PROCESSES = max(4, os.cpu_count() or 1)
"""Largest number of processes."""
COMMAND = "from taut.vision.decoder import main; main({}, {})"
SETTINGS = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}


class Died(Exception):
    """The process ended before it answered; the text says how."""


_lock, _slots = Lock(), BoundedSemaphore(MAX_PROCESSES)
_idle: list[Helper] = []


def replies(
    job: dict[str, Any], content: bytes, seconds: float
) -> Iterator[tuple[dict[str, Any], bytes]]:
    """The replies of a process to a job. Raises TimeoutError, and Died."""
    with _slots:
        helper = _take_helper()
        is_done = False
        try:
            with helper.limit(seconds):
                helper.pipe.send_bytes(json.dumps(job).encode())
                helper.pipe.send_bytes(content)
                while "end" not in (reply := json.loads(helper.pipe.recv_bytes())):
                    yield reply, helper.pipe.recv_bytes()
                helper.pipe.recv_bytes()
            is_done = True
        except Late:
            raise TimeoutError from None
        except (EOFError, OSError):
            status = helper.reap()
            if status == -signal.SIGKILL:
                # not the fault of an image, so no row is left out for it
                raise DataError(
                    "the process that decodes pictures was killed, as when memory runs out; expected it to live; lower "
                    "data.images.workers, or run where there is more memory"
                ) from None
            raise Died(how_it_ended(status)) from None
        finally:
            if is_done:
                with _lock:
                    _idle.append(helper)
            else:
                helper.end()


def _take_helper() -> Helper:
    """An idle process, or a new one."""
    with _lock:
        helper = _idle.pop() if _idle else Helper()
    if helper.is_alive:
        return helper
    try:
        helper.start(COMMAND, {**os.environ, **SETTINGS}, stderr=subprocess.DEVNULL)
    except OSError as error:
        raise DataError(
            f"no process can be started to decode pictures in: {error.strerror}; expected one; end other programs"
        ) from None
    # Wait until it is ready: its imports do not count as a job's time.
    try:
        with helper.limit(START_SECONDS):
            helper.pipe.recv_bytes()
        return helper
    except Late:
        how = "did not start in time"
    except (EOFError, OSError):
        how = how_it_ended(helper.reap())
    raise DataError(
        f"the process that decodes pictures {how} at its start; expected it to start; see what "
        f'{sys.executable} -c "import taut.vision.decoder" says'
    )


def end_all() -> None:
    """End the idle processes."""
    with _lock:
        while _idle:
            _idle.pop().end()


def _begin_forked() -> None:
    global _lock, _slots
    _lock, _slots = Lock(), BoundedSemaphore(MAX_PROCESSES)
    _idle.clear()


os.register_at_fork(after_in_child=_begin_forked)
