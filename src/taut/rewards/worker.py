"""The worker process: verifiers in, answers in, scores out, until its pipe is closed.

    python -c "from taut.rewards.worker import main; main(FD)"

A new interpreter, not a fork, so that no lock of the parent's is copied. It does not run the parent's main script
again, as multiprocessing's start methods do: a training script without ``if __name__ == "__main__"`` is not started
twice. It ends with its parent, and imports neither torch nor transformers. ``workers.py`` is the other end.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, TextIO, cast

from taut.errors import TautError
from taut.io.console import Printer
from taut.rewards.user import UserReward
from taut.rewards.verifier import Answered, Judged, Score, Verifier, reason, scored

PARENT_LOOKED_AT = 1.0
"""Seconds between two looks at the parent."""
SPARE = 2.0
"""A worker whose parent was killed may be in a loop of C code that lets no thread run. The kernel ends it (SIGPROF)
after this many times its limit, in processor time of all cores."""
ANYTHING = (Exception, SystemExit, KeyboardInterrupt)
"""What a function of the user's may raise; Ctrl-C does not reach this process."""


class Loaded(NamedTuple):
    """Whether a verifier can be used."""

    trouble: str | None
    """Why it cannot be used; None: it can."""
    judges: Judged = "correctness"
    """What it judges, which for a function of the user's only the process that ran its file knows."""


def main(descriptor: int) -> None:
    """Serve what comes through the pipe. The first message is the path of imports and the verifiers by label.

    A request is a verifier's number, an answer, or None to load it only, and the seconds it may take. The first reply
    says whether the verifier is loaded (``Loaded``); then comes the score. So loading takes nothing of an answer's
    time, and a worker in the place of a killed one loads what it is asked for and no more.
    """
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    _be_killed_first()
    sys.stdout, sys.stderr = (cast(TextIO, Printer.on(it)) for it in (sys.stdout, sys.stderr))
    os.set_inheritable(descriptor, False)
    pipe = Connection(descriptor)
    path, verifiers = pipe.recv()
    sys.path[:] = path
    loaded: dict[int, Loaded] = {}
    while True:
        try:
            number, answered, seconds = pipe.recv()
        except EOFError:
            return
        label, verifier = verifiers[number]
        if number not in loaded:
            loaded[number] = _prepare(label, verifier)
        pipe.send(loaded[number])
        if answered is None or loaded[number].trouble is not None:
            continue
        signal.setitimer(signal.ITIMER_PROF, SPARE * (seconds + 1) * (os.cpu_count() or 1))
        with _memory(verifier.max_memory):
            score = judged(label, verifier, answered, ANYTHING)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.flush()
        pipe.send(score)


def judged(
    label: str,
    verifier: Verifier,
    answered: Answered,
    caught: tuple[type[BaseException], ...] = (Exception,),
) -> Score:
    """A verifier's score of one answer; an exception becomes an error."""
    try:
        return scored(label, verifier(answered))
    except TautError as error:
        return Score(error=reason(error), is_ours=True)
    except caught as error:
        place = verifier.code.line_of(error) if isinstance(verifier, UserReward) else ""
        return Score(error=reason(error) + place)


def _prepare(label: str, verifier: Verifier) -> Loaded:
    try:
        verifier.prepare()
        return Loaded(None, verifier.judges)
    except TautError as error:
        return Loaded(str(error))
    except ANYTHING as error:  # the parent raises it
        return Loaded(
            f"the reward {label} cannot be loaded: {reason(error)}; expected one that can; correct it"
        )


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


def _be_killed_first() -> None:
    """Make the kernel kill this process, not the one that trains, when the machine runs out of memory."""
    with contextlib.suppress(OSError), Path("/proc/self/oom_score_adj").open("w") as file:
        file.write("1000")


def _end_with(parent: int) -> None:
    """End this process with its parent: a worker that hangs would outlive a parent that was killed."""
    while os.getppid() == parent:
        time.sleep(PARENT_LOOKED_AT)
    os._exit(1)
