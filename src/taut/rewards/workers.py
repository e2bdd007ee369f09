"""Worker processes: verifiers that may hang, crash or run arbitrary code run here, never in the process that trains.

Each answer has a time limit from the moment its worker begins. A worker that exceeds it is killed with every process
it started, the answer is an error, and the next answer gets a new worker. The same holds for a worker that dies, and
for one that is stopped (SIGSTOP), whether before an answer or during it. Workers are sessions of their own: Ctrl-C in a
terminal does not reach them, and they print nothing of it. The time limit needs no signal and holds in any thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import LifoQueue
from typing import Any

from taut.errors import ConfigError
from taut.rewards.registry import Part
from taut.rewards.verifier import Answered, Judged, Score
from taut.rewards.worker import Loaded

START_SECONDS = 120.0
"""Time limit for starting a process and loading a verifier, apart from the answers' limits."""
COMMAND = "from taut.rewards.worker import main; main({})"
SETTINGS = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Environment of a worker: sets have the same order everywhere, and workers leave the cores to the trainer."""


class Workers:
    """At most ``count`` processes with the verifiers of ``parts``, started when they are needed."""

    def __init__(self, parts: Sequence[Part], count: int) -> None:
        self._parts = parts
        self._num_drops = 0
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="taut-rewards")
        self._idle: LifoQueue[_Worker] = LifoQueue()
        workers = [_Worker(parts) for _ in range(count)]
        for worker in workers:
            self._idle.put(worker)
        self._workers = workers
        self._at_exit = weakref.finalize(self, _let_go, workers)

    def require_loadable(self) -> dict[str, Judged]:
        """Load each verifier; what it judges, by label. Raises ConfigError for one that cannot be loaded."""
        worker = self._idle.get()
        try:
            return {
                part.label: worker.load(number, part)[1] for number, part in enumerate(self._parts)
            }
        finally:
            self._idle.put(worker)

    def start(self, number: int, answered: Answered) -> Future[Score]:
        """The word of ``parts[number]`` on an answer, to be."""
        return self._threads.submit(self._ask, number, answered)

    def drop(self) -> None:
        """End the running call, whose result is no longer needed. The next answer gets a new process."""
        self._num_drops += 1
        for worker in self._workers:
            worker.kill()

    def close(self) -> None:
        """End all processes, in the middle of an answer where there is one."""
        for worker in self._workers:
            worker.stop()
        self._threads.shutdown(cancel_futures=True)
        self._at_exit()

    def _ask(self, number: int, answered: Answered) -> Score:
        """The word on an answer. One that cannot be judged counts as wrong, if another answer to the same row can be.

        An error is ours where it says so (``is_ours``), and where the system killed the process: answers are limited in
        memory, so it was not this one that took too much.
        """
        part, num_drops = self._parts[number], self._num_drops
        worker = self._idle.get()
        try:
            score = worker.ask(number, answered, part)
            if score.error is None or score.is_ours or score.is_wrong_type:
                return score
            wrong = part.verifier.when_unjudged(answered)
            if wrong is None or score.error.endswith(signal.SIGKILL.name):
                return score
            control = worker.ask(number, replace(answered, text=part.verifier.trivial), part)
            is_judged = control.error is None and num_drops == self._num_drops
            return Score(wrong, unjudged=score.error) if is_judged else score
        finally:
            self._idle.put(worker)


def _let_go(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.stop()
        worker.clear()


class _Late(Exception):
    """The process gave no reply in time and has been ended."""


class _Worker:
    """One process at a time. One thread at a time uses it; ``kill`` and ``stop`` may be called from any."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._verifiers = [(part.label, part.verifier) for part in parts]
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._is_stopped = False
        self._loaded: set[int] = set()
        """Numbers of the verifiers that the process has loaded."""

    def load(
        self, number: int, part: Part, answered: Answered | None = None
    ) -> tuple[Connection, Judged]:
        """The pipe to a process that has loaded a verifier, and is at ``answered``; and what the verifier judges.
        ConfigError: it cannot be. _Late: it is loaded, and says nothing in an answer's time.
        """
        remedy = f"expected the reward {part.label} to be loaded; correct it"
        try:
            pipe, setup = self._open()
            is_loaded = number in self._loaded
            seconds = part.timeout if is_loaded else START_SECONDS
            request = (number, answered, part.timeout)
            loaded: Loaded = self._exchange(pipe, seconds, *setup, request)
        except _Late:
            if is_loaded and answered is not None:
                raise
            raise ConfigError(f"found nothing within {seconds:g} s; {remedy}") from None
        except (EOFError, OSError) as error:
            raise ConfigError(f"a worker {self._ended(error)} at its start; {remedy}") from None
        if loaded.trouble is not None:
            self.clear()  # the obstacle may be gone at the next attempt
            raise ConfigError(loaded.trouble)
        self._loaded.add(number)
        return pipe, loaded.judges

    def ask(self, number: int, answered: Answered, part: Part) -> Score:
        """The verifier's score of an answer, or the error of its process."""
        try:
            pipe, _ = self.load(number, part, answered)
            score: Score = self._exchange(pipe, part.timeout)
            return score
        except ConfigError as error:
            return Score(error=str(error))
        except _Late:
            return Score(error=f"{part.label} took longer than {part.timeout:g} s and was killed")
        except (EOFError, OSError) as error:
            return Score(error=f"{part.label} ended its process, which {self._ended(error)}")

    def _exchange(self, pipe: Connection, seconds: float, *messages: object) -> Any:
        """Send messages and receive one, in so many seconds; then the process is ended, and _Late is raised.

        A process that was stopped (SIGSTOP) reads nothing, so sending may block, too.
        """
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            self.kill()
            # what the process started may hold its end of the pipe, too
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as ours:
                ours.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            for message in messages:
                pipe.send(message)
            return pipe.recv()
        except (EOFError, OSError):
            if is_late.is_set():
                raise _Late from None
            raise
        finally:
            timer.cancel()
            timer.join()
            if is_late.is_set():
                self.clear()

    def _open(self) -> tuple[Connection, list[object]]:
        """The pipe to the process, which is started where there is none; and what a new one is to be sent first."""
        if self._pipe is not None and self._process is not None and _is_alive(self._process):
            return self._pipe, []
        self.clear()
        if self._is_stopped:
            raise ConfigError("the rewards are closed; expected no answer after that")
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", COMMAND.format(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **SETTINGS},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return self._pipe, [(sys.path, self._verifiers)]

    def kill(self) -> None:
        """End the process; a call that waits for it fails."""
        process = self._process
        if process is not None:
            _kill(process)

    def stop(self) -> None:
        """The same, and start no other."""
        self._is_stopped = True
        self.kill()

    def clear(self) -> None:
        """End the process with what it started, and forget it."""
        if self._process is not None:
            _kill(self._process)
            self._process.wait()
        if self._pipe is not None:
            self._pipe.close()
        self._process, self._pipe = None, None
        self._loaded.clear()

    def _ended(self, error: Exception) -> str:
        """How a process ended that closed its pipe, or why there is none."""
        if self._process is None:
            self.clear()
            return f"cannot be started ({error})"
        _kill(self._process)  # what it started; its own end is under way, and keeps its code
        code = self._process.wait()
        self.clear()
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def _is_alive(process: subprocess.Popen[bytes]) -> bool:
    """Whether it runs. If the system allows, it is not reaped: its number stays its session's until that is killed."""
    if not hasattr(os, "waitid"):
        return process.poll() is None
    try:
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, process.pid, options) is None
    except ChildProcessError:
        return False


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill its whole session, unless it has been reaped: then its number may be another's."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
