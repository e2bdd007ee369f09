"""Signals that end a run: Ctrl-C (SIGINT), SIGTERM, SIGHUP (the terminal or connection is gone) and SIGUSR1 (Slurm
announces a pre-emption).

    with Interrupts.watching() as interrupts:
        with interrupts.before_training(): ...    a signal ends the process: there is nothing to save
        interrupts.check()                        raises Interrupt after a signal; between micro-batches
        interrupts.agree(ranks)                   check on all ranks together; before the update
        with interrupts.at_once(ranks): ...       a signal raises Interrupt immediately
        with interrupts.held(): ...               inside at_once: raises at the end, so that nothing is left half done

The first signal is only recorded, so that no update is interrupted. A second one ends the process immediately, without
saving. A signal within ``SAME_NOTICE`` of the first counts as the first: a launcher repeats the signals that its ranks
get as well. A signal that the process was started to ignore (``nohup``) stays ignored, except SIGINT, which shells
ignore for every background job.

No torch here.
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
"""Seconds after the first signal in which others count as its repetition."""


class Interrupt(KeyboardInterrupt):
    """A signal, by its name. A KeyboardInterrupt, so that no handler on the way catches it as an error."""


class Interrupts:
    """The received signal, and when it raises."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._since = 0.0
        self._is_urgent = False

    @classmethod
    @contextmanager
    def watching(cls, numbers: Sequence[signal.Signals] = SIGNALS) -> Iterator[Interrupts]:
        """Handle the signals until the end of the block. Python delivers signals to the main thread only."""
        watch = cls()
        if threading.current_thread() is not threading.main_thread():
            yield watch
            return
        # torchrun handles SIGHUP even if it was started to ignore it, passes it to its ranks, and kills them half a
        # minute later: there it counts.
        may_ignore = "TORCHELASTIC_RUN_ID" not in os.environ
        before = {
            number: signal.signal(number, watch.notice)
            for number in numbers
            if number == signal.SIGINT
            or not (may_ignore and signal.getsignal(number) == signal.SIG_IGN)
        }
        try:
            yield watch
        finally:
            for number, handler in before.items():
                outer = getattr(handler, "__self__", None)
                if isinstance(outer, Interrupts) and outer.received is None:  # the same signal
                    outer.received, outer._since = watch.received, watch._since
                signal.signal(number, handler)

    def notice(self, number: int, _: FrameType | None) -> None:
        """The signal handler."""
        now = time.monotonic()
        if self.received is None:
            self.received, self._since = signal.Signals(number).name, now
            if self._is_urgent:
                raise Interrupt(self.received)
        elif now - self._since > SAME_NOTICE:
            os._exit(128 + number)

    def check(self) -> None:
        """Raise Interrupt if this process received a signal."""
        if self.received is not None:
            raise Interrupt(self.received)

    def agree(self, ranks: Ranks) -> None:
        """Raise Interrupt on all ranks if one received a signal. Every rank calls it."""
        self.obey(ranks.gather_in_step(self.received))

    def obey(self, names: Sequence[str | None]) -> None:
        """Raise Interrupt for the first signal that a rank has received, if any."""
        received = [name for name in names if name is not None]
        if received:
            raise Interrupt(received[0])

    @contextmanager
    def before_training(self) -> Iterator[None]:
        """Where there is nothing to save: a signal ends the process immediately, and other ranks with it. Ctrl-C stays
        a KeyboardInterrupt; the other signals raise Interrupted.
        """
        self._is_urgent = True
        try:
            yield
        except Interrupt:
            if self.received == signal.SIGINT.name:
                raise KeyboardInterrupt from None
            raise Interrupted(
                f"interrupted by {self.received} before training began; nothing was changed in out; the same command "
                "starts again"
            ) from None
        finally:
            self._is_urgent = False

    @contextmanager
    def at_once(self, ranks: Ranks | None = None) -> Iterator[None]:
        """Where nothing can be left half done: a signal raises immediately. Without effect on several ranks, which must
        stop together.
        """
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
        """Inside ``at_once``, where something could be left half done: a signal raises at the end of the block."""
        was, self._is_urgent = self._is_urgent, False
        try:
            yield
        finally:
            self._is_urgent = was
        if was:
            self.check()
