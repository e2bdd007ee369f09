"""Signals that ask a run to end: Ctrl-C (SIGINT), SIGTERM, SIGHUP (the terminal or the connection is gone) and SIGUSR1
(Slurm announces a pre-emption).

    with Interrupts.watching() as interrupts:
        with interrupts.before_training(): ...    a signal ends the process: there is nothing to save
        interrupts.check()              raises Interrupt once a signal has come; between micro-batches
        interrupts.agree(ranks)         the same, on all ranks alike; before the update
        with interrupts.at_once(ranks): ...   a signal raises Interrupt right there
        with interrupts.held(): ...     not there: something would be left half done

The first signal is only noted, so that no update is cut in two. A second one ends the process at once, without saving;
what comes within ``SAME_NOTICE`` of the first is the same notice, since a launcher passes on what its ranks got too.
A signal that the process was started to ignore (``nohup``) stays ignored. SIGINT does not: shells ignore it for every
job in the background.

No torch here. May be imported by loop and what is above it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from taut.errors import Interrupted

if TYPE_CHECKING:
    from taut.train.distributed import Ranks

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
SAME_NOTICE = 1.0
"""Seconds."""


class Interrupt(KeyboardInterrupt):
    """A signal, by its name. No Exception, so that nothing on its way takes it for a mistake of its own."""


class Interrupts:
    """What signals have come."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._since = 0.0
        self._is_urgent = False

    @classmethod
    @contextmanager
    def watching(cls, numbers: Sequence[signal.Signals] = SIGNALS) -> Iterator[Interrupts]:
        """Take the signals over; given back at the end. Python delivers signals to the main thread only."""
        watch = cls()
        if threading.current_thread() is not threading.main_thread():
            yield watch
            return
        before = {
            number: signal.signal(number, watch.notice)
            for number in numbers
            if number == signal.SIGINT or not _is_ignored(number)
        }
        try:
            yield watch
        finally:
            for number, handler in before.items():
                outer = getattr(handler, "__self__", None)
                if isinstance(outer, Interrupts) and outer.received is None:  # it was one notice
                    outer.received, outer._since = watch.received, watch._since
                signal.signal(number, handler)

    def notice(self, number: int, _: FrameType | None) -> None:
        """Called by Python between two of its instructions."""
        now = time.monotonic()
        if self.received is None:
            self.received, self._since = signal.Signals(number).name, now
            if self._is_urgent:
                raise Interrupt(self.received)
        elif now - self._since > SAME_NOTICE:
            os._exit(128 + number)

    def check(self) -> None:
        """Raise Interrupt if a signal has come to this process."""
        if self.received is not None:
            raise Interrupt(self.received)

    def agree(self, ranks: Ranks) -> None:
        """Raise Interrupt on all ranks if a signal has come to one. Every rank calls it."""
        names = [self.received] if ranks.size == 1 else []
        if ranks.size > 1 and ranks.max([float(self.received is not None)])[0]:
            names = ranks.gather(self.received)
        came = [name for name in names if name is not None]
        if came:
            raise Interrupt(came[0])

    @contextmanager
    def before_training(self) -> Iterator[None]:
        """Where there is nothing to save: a signal ends the process right there; other ranks end with it.

        Ctrl-C stays a KeyboardInterrupt; the others raise Interrupted.
        """
        self._is_urgent = True
        try:
            yield
        except Interrupt:
            if self.received == signal.SIGINT.name:
                raise KeyboardInterrupt from None
            raise Interrupted(
                f"interrupted by {self.received} before training began; nothing was changed in out; the same command "
                "begins again"
            ) from None
        finally:
            self._is_urgent = False

    @contextmanager
    def at_once(self, ranks: Ranks | None = None) -> Iterator[None]:
        """Where nothing can be left half done. With several ranks nothing changes: they must not lose each other."""
        if ranks is not None and ranks.size > 1:
            yield
            return
        self.check()
        self._is_urgent = True
        try:
            yield
        finally:
            self._is_urgent = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside ``at_once``, where something may be left half done: what comes is noted, and raised at the end."""
        was, self._is_urgent = self._is_urgent, False
        try:
            yield
        finally:
            self._is_urgent = was
        if was:
            self.check()


def _is_ignored(number: signal.Signals) -> bool:
    """Whether the process was started to ignore the signal.

    torchrun takes SIGHUP all the same, hands it to its ranks and kills them half a minute later: there it is a notice.
    """
    return signal.getsignal(number) == signal.SIG_IGN and "TORCHELASTIC_RUN_ID" not in os.environ
