"""Run functions on untrusted input (chat templates, regular expressions of adapters) in a helper process, with limits
on processor time and memory.

    answer = limited_call.call("taut.data.render.chat_text:render", *arguments)      LimitExceeded, FunctionFailed

A Jinja template or a regular expression of one line can run for years or ask for all memory, and a thread cannot be
stopped in the middle of either. The kernel enforces both limits: a timer of processor time (ITIMER_PROF), whose signal
ends the process, and RLIMIT_AS, if /proc says how much the process has already (Linux); elsewhere memory is not
limited. Processor time depends neither on the load of the machine nor on a suspended run.

One helper process (``worker_process.py``) serves all calls of this process, one at a time. It starts at the first call,
or at ``start``, and a new one takes its place after a limit was exceeded. It gets no environment variables but those
Python and the clock need. A process that is itself a helper, which may end at any time, can run the functions itself
(``run_here``): it ends where a limit is exceeded, and ``is_limit`` tells by its exit status.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from taut.errors import TautError
from taut.io.user_code import named
from taut.io.worker_process import Helper, begin, how_it_ended

SECONDS = 10.0
"""Processor time of one call."""
MEMORY_MB = 1024
"""Memory of one call, beyond what the process holds after its imports."""
OUT_OF_MEMORY = 3
"""The exit status of a process that reached its memory limit."""
COMMAND = "from taut.io.limited_call import serve; serve({}, {})"
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


class LimitExceeded(TautError):
    """A call that needs more than its limits. The message completes "it ..."."""


class FunctionFailed(TautError):
    """An exception of the function; the message is the exception's own, or its type's name."""


_helper = Helper()
_lock = threading.Lock()
_runs_here = False


def _begin_forked() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_begin_forked)


def start() -> None:
    """Start the process, so that it is ready when it is first needed."""
    with _lock:
        _start()


def _start() -> None:
    if not _helper.is_alive:
        _helper.start(COMMAND, environment())


def environment() -> dict[str, str]:
    """The variables of a process that runs functions on untrusted input."""
    names = [name for name in ENVIRONMENT if name in os.environ]
    return {**{name: os.environ[name] for name in names}, **ONE_THREAD}


def run_here() -> None:
    """Run the functions in this process from now on: a helper, which a limit may end."""
    global _runs_here
    _runs_here = True


def is_limit(status: int | None) -> bool:
    """Whether a process with this exit status (``Helper.reap``) was ended by a limit."""
    return status in (-signal.SIGPROF, OUT_OF_MEMORY)


def call(
    function: str, *arguments: Any, seconds: float = SECONDS, memory_mb: int = MEMORY_MB
) -> Any:
    """The result of ``function`` ("module:name") in the helper process. ``arguments`` are pickled, the result is
    JSON."""
    ((outcome, value),) = call_each(function, [arguments], seconds=seconds, memory_mb=memory_mb)
    if outcome != "value":
        raise (LimitExceeded if outcome == "limit" else FunctionFailed)(value)
    return value


def call_each(
    function: str,
    arguments: Sequence[tuple[Any, ...]],
    *,
    seconds: float = SECONDS,
    memory_mb: int = MEMORY_MB,
) -> list[tuple[str, Any]]:
    """``call`` for each of several arguments, on one way there and back. Each has the limits for itself, and its
    outcome: ``value``, ``limit`` or ``failed``, and the value or the reason. Raises LimitExceeded where one of them
    ended the process; which, is not known.
    """
    if _runs_here:
        called = named(function)
        with _limited_memory(_address_space(), memory_mb):
            return _outcomes(called, arguments, seconds)
    # ask the helper; where it ended instead of answering, its status says why
    request = pickle.dumps((function, seconds, memory_mb, arguments))
    with _lock:
        _start()
        try:
            _helper.pipe.send_bytes(request)
            answer = _helper.pipe.recv_bytes()
        except (EOFError, OSError):
            status = _helper.reap()
            if status == -signal.SIGPROF:
                reason = f"needs more than {seconds:g} s of processor time"
            elif status == OUT_OF_MEMORY:
                reason = f"needs more than {memory_mb:,} MB of memory"
            else:
                reason = f"ended the process that ran it ({how_it_ended(status)})"
            raise LimitExceeded(reason) from None
        except BaseException:  # its answer would be taken for the next call's
            _helper.end()
            raise
    return [
        (outcome, value) for outcome, value in json.loads(answer.decode("utf-8", "surrogatepass"))
    ]


def serve(descriptor: int, leash: int) -> None:
    """Answer calls until the other end of the pipe is closed."""
    pipe = begin(descriptor, leash)
    known: dict[str, Callable[..., Any]] = {}
    held: int | None = None
    while True:
        try:
            name, seconds, memory_mb, each = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        if name not in known:
            known[name] = named(name)
            held = _address_space()
        with _limited_memory(held, memory_mb):
            answer = json.dumps(_outcomes(known[name], each, seconds), ensure_ascii=False)
            pipe.send_bytes(answer.encode("utf-8", "surrogatepass"))


def _outcomes(
    function: Callable[..., Any], each: Sequence[tuple[Any, ...]], seconds: float
) -> list[tuple[str, Any]]:
    """The outcome of each call. The timer of the last one goes on, for what is done with them."""
    outcomes: list[tuple[str, Any]] = []
    for arguments in each:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            outcomes.append(("value", function(*arguments)))
        except MemoryError:
            raise
        except LimitExceeded as error:
            outcomes.append(("limit", str(error)))
        except Exception as error:  # noqa: BLE001 - raised again in the process that called
            reason = (str(error).splitlines() or [""])[0] or type(error).__name__
            outcomes.append(("failed", reason))
    return outcomes


@contextmanager
def _limited_memory(held: int | None, memory_mb: int) -> Iterator[None]:
    """End this process where it needs more memory than this beyond what it held; then stop the timer."""
    if held is not None:
        _limit_address_space(held + memory_mb * 2**20)
    try:
        yield
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    signal.setitimer(signal.ITIMER_PROF, 0)
    if held is not None:
        _limit_address_space(resource.RLIM_INFINITY)


def _address_space() -> int | None:
    """Bytes of address space that this process has; None where the system does not say."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    except OSError:
        return None
    return int(pages) * resource.getpagesize()


def _limit_address_space(number: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    unlimited = resource.RLIM_INFINITY
    numbers = [limit for limit in (number, most) if limit != unlimited]
    resource.setrlimit(resource.RLIMIT_AS, (min(numbers, default=unlimited), most))
