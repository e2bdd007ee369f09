"""Worker processes: verifiers that may hang, crash or run arbitrary code run here, never in the process that trains.

Each answer has a time limit from the moment its worker begins. A worker that exceeds it is killed with every process
it started, the answer is an error, and the next answer gets a new worker. The same holds for a worker that dies, and
for one that is stopped (SIGSTOP), whether before an answer or during it. Workers are helper processes
(``taut.io.worker_process``).
"""

from __future__ import annotations

import os
import pickle
import signal
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from errno import EBADMSG
from queue import LifoQueue
from typing import Any

from taut.errors import ConfigError
from taut.io.worker_process import Helper, Late, how_it_ended
from taut.rewards.registry import Part
from taut.rewards.verifier import RewardInput, Score
from taut.rewards.worker import CLOSED, Loaded

START_SECONDS = 120.0
"""Time limit for starting a process and loading a verifier, apart from the answers' limits."""
MOST_BYTES = 2**20
"""Largest message of a worker: a score, or why there is none."""
COMMAND = "from taut.rewards.worker import main; main({}, {})"
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

    def require_loadable(self) -> dict[str, Loaded]:
        """Load each verifier. Returns the process's report of each, by label. Raises ConfigError if one cannot be
        loaded.
        """
        worker = self._idle.get()
        try:
            return {
                part.label: worker.load(number, part) for number, part in enumerate(self._parts)
            }
        finally:
            self._idle.put(worker)

    def start(self, number: int, group: Sequence[RewardInput]) -> Future[list[Score]]:
        """Start scoring answers that ``parts[number]`` judges together. The time limits of the answers are added up."""
        return self._threads.submit(self._ask, number, group)

    def drop(self) -> None:
        """End the running call, whose result is no longer needed. The next answer gets a new process."""
        self._num_drops += 1
        for worker in self._workers:
            worker.helper.kill()

    def close(self) -> None:
        """End all processes, in the middle of an answer where there is one."""
        for worker in self._workers:
            worker.stop()
        self._threads.shutdown(cancel_futures=True)
        self._at_exit()

    def _ask(self, number: int, group: Sequence[RewardInput]) -> list[Score]:
        """Score answers that are judged together. An answer that cannot be judged counts as wrong, if a trivial answer
        to the same row can be judged.

        An error is not the answer's fault if it says so (``is_ours``), or if the system killed the process: the memory
        of an answer is limited, so something else took too much.
        """
        part, num_drops = self._parts[number], self._num_drops
        part = replace(part, timeout=part.timeout * len(group))
        worker = self._idle.get()
        try:
            scores, answer = worker.ask(number, group, part), group[0]
            score = scores[0]
            if score.error is None or score.is_ours or score.is_wrong_type:
                return scores
            wrong = part.verifier.when_unjudged(answer)
            if wrong is None or score.error.endswith(signal.SIGKILL.name):
                return scores
            (control,) = worker.ask(number, [replace(answer, text=part.verifier.trivial)], part)
            is_judged = control.error is None and num_drops == self._num_drops
            return [Score(wrong, unjudged=score.error)] if is_judged else scores
        finally:
            self._idle.put(worker)


def _let_go(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.stop()
        worker.helper.end()


class _Worker:
    """One process at a time. One thread at a time uses it; ``helper.kill`` and ``stop`` may be called from any."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._verifiers = [(part.label, part.verifier) for part in parts]
        self.helper = Helper()
        self._is_stopped = False
        self._loaded: set[int] = set()
        """Numbers of the verifiers that the process has loaded."""

    def load(self, number: int, part: Part, group: Sequence[RewardInput] | None = None) -> Loaded:
        """Let the process load a verifier and begin with ``group``. Returns the process's report of the verifier.
        Raises ConfigError if it cannot be loaded, and Late if a loaded one does not reply within an answer's time.
        """
        remedy = f"expected the reward {part.label} to be loaded; correct it"
        helper = self.helper
        is_new = not helper.is_alive or helper.pipe.poll()  # nothing is asked: it has ended
        if is_new and self._is_stopped:
            raise ConfigError("the rewards are closed; expected no answer after that")
        # Loading has its own time; a loaded verifier replies within an answer's.
        is_loaded = not is_new and number in self._loaded
        seconds = part.timeout if is_loaded else START_SECONDS
        try:
            if is_new:
                self._loaded.clear()
                helper.start(COMMAND, {**os.environ, **SETTINGS}, stdout=None, is_kept=True)
            with helper.limit(seconds):
                if is_new:
                    helper.pipe.send(self._verifiers)
                helper.pipe.send((number, group, part.timeout))
                loaded: Loaded = self._received()
        except Late:
            if is_loaded and group is not None:
                raise
            raise ConfigError(f"found nothing within {seconds:g} s; {remedy}") from None
        except (EOFError, OSError) as error:
            raise ConfigError(f"a worker {self._ended(error)} at its start; {remedy}") from None
        if loaded.trouble is not None:
            helper.end()  # the obstacle may be gone at the next attempt
            raise ConfigError(loaded.trouble)
        self._loaded.add(number)
        return loaded

    def ask(self, number: int, group: Sequence[RewardInput], part: Part) -> list[Score]:
        """The verifier's scores of answers, or the error of its process."""
        try:
            self.load(number, part, group)
            with self.helper.limit(part.timeout):
                scores: list[Score] = self._received()
            return scores
        except ConfigError as error:
            failed = Score(error=str(error))
        except Late:
            failed = Score(error=f"{part.label} took longer than {part.timeout:g} s and was killed")
        except (EOFError, OSError) as error:
            failed = Score(error=f"{part.label} ended its process, which {self._ended(error)}")
        return [failed] * len(group)

    def stop(self) -> None:
        """Kill the process and start no other."""
        self._is_stopped = True
        self.helper.kill()

    def _received(self) -> Any:
        """Return the message of the process. Raises OSError for one that no worker sends."""
        try:
            return pickle.loads(self.helper.pipe.recv_bytes(MOST_BYTES))
        except EOFError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise OSError(EBADMSG, "no message of a worker") from None

    def _ended(self, error: Exception) -> str:
        """Return how a process ended that closed its pipe, or why there is none."""
        if self.helper.process is None:
            return f"cannot be started ({error})"
        if isinstance(error, OSError) and error.errno == EBADMSG:
            self.helper.end()
            return "had something else written into its pipe; expected a reward to write to its own files; correct it"
        status = self.helper.reap()
        if status == CLOSED:
            return (
                "found its descriptors closed; expected a reward to close its own alone; correct it"
            )
        return how_it_ended(status)
