"""Worker processes: verifiers that may hang, crash or run arbitrary code run here, never in the process that trains.

Each answer has a time limit from the moment its worker begins. A worker that exceeds it is killed with every process
it started, the answer is an error, and the next answer gets a new worker. The same holds for a worker that dies, and
for one that is stopped (SIGSTOP), whether before an answer or during it. Workers are helper processes
(``taut.io.helper``).
"""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from queue import LifoQueue

from taut.errors import ConfigError
from taut.io.helper import Helper, Late, how_it_ended
from taut.rewards.registry import Part
from taut.rewards.verifier import Answered, Judged, Score
from taut.rewards.worker import Loaded

START_SECONDS = 120.0
"""Time limit for starting a process and loading a verifier, apart from the answers' limits."""
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

    def require_loadable(self) -> dict[str, Judged]:
        """Load each verifier; what it judges, by label. Raises ConfigError for one that cannot be loaded."""
        worker = self._idle.get()
        try:
            return {
                part.label: worker.load(number, part) for number, part in enumerate(self._parts)
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
            worker.helper.kill()

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
        worker.helper.end()


class _Worker:
    """One process at a time. One thread at a time uses it; ``helper.kill`` and ``stop`` may be called from any."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._verifiers = [(part.label, part.verifier) for part in parts]
        self.helper = Helper()
        self._is_stopped = False
        self._loaded: set[int] = set()
        """Numbers of the verifiers that the process has loaded."""

    def load(self, number: int, part: Part, answered: Answered | None = None) -> Judged:
        """Let the process load a verifier and begin with ``answered``; what the verifier judges. ConfigError: the
        verifier cannot be loaded. Late: it is loaded, and says nothing in an answer's time.
        """
        remedy = f"expected the reward {part.label} to be loaded; correct it"
        helper, is_new = self.helper, not self.helper.is_alive
        if is_new and self._is_stopped:
            raise ConfigError("the rewards are closed; expected no answer after that")
        is_loaded = not is_new and number in self._loaded
        seconds = part.timeout if is_loaded else START_SECONDS
        try:
            if is_new:
                self._loaded.clear()
                helper.start(COMMAND, {**os.environ, **SETTINGS}, stdout=None)
            with helper.limit(seconds):
                if is_new:
                    helper.pipe.send(self._verifiers)
                helper.pipe.send((number, answered, part.timeout))
                loaded: Loaded = helper.pipe.recv()
        except Late:
            if is_loaded and answered is not None:
                raise
            raise ConfigError(f"found nothing within {seconds:g} s; {remedy}") from None
        except (EOFError, OSError) as error:
            raise ConfigError(f"a worker {self._ended(error)} at its start; {remedy}") from None
        if loaded.trouble is not None:
            helper.end()  # the obstacle may be gone at the next attempt
            raise ConfigError(loaded.trouble)
        self._loaded.add(number)
        return loaded.judges

    def ask(self, number: int, answered: Answered, part: Part) -> Score:
        """The verifier's score of an answer, or the error of its process."""
        try:
            self.load(number, part, answered)
            with self.helper.limit(part.timeout):
                score: Score = self.helper.pipe.recv()
            return score
        except ConfigError as error:
            return Score(error=str(error))
        except Late:
            return Score(error=f"{part.label} took longer than {part.timeout:g} s and was killed")
        except (EOFError, OSError) as error:
            return Score(error=f"{part.label} ended its process, which {self._ended(error)}")

    def stop(self) -> None:
        """Kill the process and start no other."""
        self._is_stopped = True
        self.helper.kill()

    def _ended(self, error: Exception) -> str:
        """How a process ended that closed its pipe, or why there is none."""
        if self.helper.process is None:
            return f"cannot be started ({error})"
        return how_it_ended(self.helper.reap())
