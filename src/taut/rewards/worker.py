"""The worker process: verifiers in, answers in, scores out, until its pipe is closed.

It is a helper process (``taut.io.worker_process``), and imports neither torch nor transformers. ``workers.py`` is the
other end. A function of the user's may fork and return in the copy, too: the copy ends, and the answer is an error.
Where it closes descriptors that it did not open, the process ends with the status ``CLOSED``.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO, cast

from taut.errors import TautError, UserCodeError
from taut.io.console import Printer
from taut.io.worker_process import begin
from taut.rewards.custom import UserReward
from taut.rewards.settings import Judged
from taut.rewards.verifier import RewardInput, Score, Verifier, reason, scored

SPARE = 2.0
"""The kernel ends a worker in an answer (SIGPROF) after this many times its limit, in processor time of all cores."""
CLOSED = 4
"""Exit status of a process whose pipe was closed by a function of the user's."""
COPY_SECONDS = 0.2
"""Seconds in which a copy of a process that was made in an answer may return."""
ANYTHING = (Exception, SystemExit, KeyboardInterrupt)
"""Exceptions that a function of the user may raise; Ctrl-C does not reach this process."""


class Loaded(NamedTuple):
    """Whether a verifier can be used."""

    trouble: str | None
    """Why it cannot be used; None: it can."""
    judges: Judged = "correctness"
    """The judged quality. Of a function of the user only the process that ran its file knows it."""
    takes_groups: bool = False
    """``Verifier.takes_groups``."""


def main(descriptor: int, leash: int) -> None:
    """Serve what comes through the pipe. The first message is the verifiers by label.

    A request is (number of a verifier, answers to one prompt or None to only load the verifier, seconds that it may
    take). The first reply says whether the verifier is loaded (``Loaded``); then come the scores. So loading does not
    count towards an answer's time, and the worker that replaces a killed one loads only what it is asked for.
    """
    pipe = begin(descriptor, leash)
    own, ours = os.getpid(), os.fstat(pipe.fileno())
    told, tell = os.pipe()
    forks: list[None] = []
    os.register_at_fork(after_in_parent=lambda: forks.append(None))

    def require_own(label: str, error: str | None = None) -> None:
        """End this process if a function of the user's copied it, or closed its pipe."""
        with contextlib.suppress(OSError):
            if os.getpid() != own and not (error or "").startswith(SystemExit.__name__):
                os.write(tell, f"{label}\n".encode())
            if os.getpid() == own and os.path.samestat(os.fstat(pipe.fileno()), ours):
                return
        os._exit(CLOSED)

    sys.stdout, sys.stderr = (
        cast(TextIO, Printer.on(stream)) for stream in (sys.stdout, sys.stderr)
    )
    verifiers = pipe.recv()
    loaded: dict[int, Loaded] = {}
    copied: set[str] = set()
    """Rewards that returned in a copy."""
    while True:
        try:
            number, group, seconds = pipe.recv()
        except EOFError:
            return
        # Load the verifier, when it is first asked for.
        label, verifier = verifiers[number]
        forks.clear()
        if number not in loaded:
            try:
                verifier.prepare()
                loaded[number] = Loaded(None, verifier.judges, verifier.takes_groups)
            except TautError as error:
                loaded[number] = Loaded(str(error))
            except ANYTHING as error:  # the parent raises it
                loaded[number] = Loaded(
                    f"the reward {label} cannot be loaded: {reason(error)}; expected one that can; correct it"
                )
        require_own(label)
        pipe.send(loaded[number])
        if group is None or loaded[number].trouble is not None:
            continue
        # Judge the answers, within limits of time and memory.
        signal.setitimer(signal.ITIMER_PROF, SPARE * (seconds + 1) * (os.cpu_count() or 1))
        with _memory(verifier.max_memory):
            scores = judged_group(label, verifier, group, ANYTHING)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.flush()
        require_own(label, scores[0].error)
        # A copy of this process that returned from the function, too, has said so.
        while select.select([told], [], [], COPY_SECONDS if forks else 0)[0]:
            copied.update(os.read(told, 4096).decode().split("\n"))
            forks.clear()
        if label in copied:
            copied.remove(label)
            fault = f"{label} forked and returned in the copy, too; expected it to return once; end the copy"
            scores = [Score(error=f"{fault} with os._exit")] * len(group)
        pipe.send(scores)


def judged(label: str, verifier: Verifier, answer: RewardInput) -> Score:
    """A verifier's score of one answer; an exception becomes an error."""
    return judged_group(label, verifier, [answer])[0]


def judged_group(
    label: str,
    verifier: Verifier,
    group: Sequence[RewardInput],
    caught: tuple[type[BaseException], ...] = (Exception,),
) -> list[Score]:
    """A verifier's scores of answers that it judges together; an exception becomes an error of each."""
    try:
        return [scored(label, value) for value in verifier.judge_group(group)]
    except UserCodeError as error:
        failed = Score(error=str(error), is_wrong_type=True)
    except TautError as error:
        failed = Score(error=reason(error), is_ours=True)
    except caught as error:
        place = verifier.code.line_of(error) if isinstance(verifier, UserReward) else ""
        failed = Score(error=reason(error) + place)
    return [failed] * len(group)


@contextlib.contextmanager
def _memory(most: int | None) -> Iterator[None]:
    """Let this process allocate at most this many bytes more; a larger request is a MemoryError. There is no limit if
    the system does not say how much it has, as macOS.
    """
    statm = Path("/proc/self/statm")
    if most is None or not statm.exists():
        yield
        return
    pages = int(statm.read_text().split()[5])
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = pages * resource.getpagesize() + most
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
