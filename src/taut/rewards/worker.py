"""The worker process: verifiers in, answers in, scores out, until its pipe is closed.

It is a helper process (``taut.io.helper``), and imports neither torch nor transformers. ``workers.py`` is the other
end.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO, cast

from taut.errors import TautError, UserCodeError
from taut.io.console import Printer
from taut.io.helper import begin
from taut.rewards.user import UserReward
from taut.rewards.verifier import Answered, Judged, Score, Verifier, reason, scored

SPARE = 2.0
"""The kernel ends a worker in an answer (SIGPROF) after this many times its limit, in processor time of all cores."""
ANYTHING = (Exception, SystemExit, KeyboardInterrupt)
"""What a function of the user's may raise; Ctrl-C does not reach this process."""


class Loaded(NamedTuple):
    """Whether a verifier can be used."""

    trouble: str | None
    """Why it cannot be used; None: it can."""
    judges: Judged = "correctness"
    """What it judges, which for a function of the user's only the process that ran its file knows."""


def main(descriptor: int, leash: int) -> None:
    """Serve what comes through the pipe. The first message is the verifiers by label.

    A request is a verifier's number, an answer, or None to load it only, and the seconds it may take. The first reply
    says whether the verifier is loaded (``Loaded``); then comes the score. So loading takes nothing of an answer's
    time, and a worker in the place of a killed one loads what it is asked for and no more.
    """
    pipe = begin(descriptor, leash)
    sys.stdout, sys.stderr = (
        cast(TextIO, Printer.on(stream)) for stream in (sys.stdout, sys.stderr)
    )
    verifiers = pipe.recv()
    loaded: dict[int, Loaded] = {}
    while True:
        try:
            number, answered, seconds = pipe.recv()
        except EOFError:
            return
        label, verifier = verifiers[number]
        if number not in loaded:
            try:
                verifier.prepare()
                loaded[number] = Loaded(None, verifier.judges)
            except TautError as error:
                loaded[number] = Loaded(str(error))
            except ANYTHING as error:  # the parent raises it
                loaded[number] = Loaded(
                    f"the reward {label} cannot be loaded: {reason(error)}; expected one that can; correct it"
                )
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
    except UserCodeError as error:
        return Score(error=str(error), is_wrong_type=True)
    except TautError as error:
        return Score(error=reason(error), is_ours=True)
    except caught as error:
        place = verifier.code.line_of(error) if isinstance(verifier, UserReward) else ""
        return Score(error=reason(error) + place)


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
