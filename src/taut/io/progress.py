"""What a command is doing, on a line of the terminal that moves: ``taut: loading the model  12 s``.

    with drawn():                   of a command, on stderr, if that is a terminal
    show("reading the data")        from now on, until the next phase or hide()
    count(512, 5_000, "rows")       how far the phase is

The line is drawn again twice a second, by a thread, and wiped before anything else is printed (``Printer``). A line
that something else has left open, as the bar of steps or a prompt, is left alone. Under several ranks the first draws.
Where stderr is no terminal, nothing is drawn.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from taut.io.console import Printer, one_line

DRAWN_EVERY = 0.5
"""Seconds between two drawings."""
FIRST_AFTER = 0.25
"""Seconds after which a phase is drawn first: shorter ones do not flicker."""


@dataclass
class Phase:
    """What is done now, and how far it is."""

    text: str
    begun: float
    done: float = 0
    total: float | None = None
    unit: str = ""

    @property
    def seconds(self) -> float:
        """How long it takes already."""
        return time.monotonic() - self.begun

    def line(self) -> str:
        """The phase in words: ``reading the data (train)  512 of 5,000 rows, 128 rows/s  4 s``."""
        seconds, parts = self.seconds, [self.text]
        if self.unit:
            of_all = "" if self.total is None else f" of {self.total:,.0f}"
            rate = (
                f", {self.done / seconds:,.0f} {self.unit}/s" if self.done and seconds > 1 else ""
            )
            parts.append(f"{self.done:,.0f}{of_all} {self.unit}{rate}")
        return "  ".join([*parts, f"{seconds:.0f} s"])


_phase: Phase | None = None


def show(text: str) -> None:
    """Begin a phase, which ends the one before."""
    global _phase
    _phase = Phase(text, time.monotonic())


def hide() -> None:
    """End the phase."""
    global _phase
    _phase = None


def current() -> Phase | None:
    """The phase that is under way."""
    return _phase


def count(done: float, total: float | None, unit: str) -> None:
    """Say how far the phase is."""
    if _phase is not None:
        _phase.done, _phase.total, _phase.unit = done, total, unit


@contextmanager
def drawn() -> Iterator[None]:
    """Draw the phases of the block on stderr, if that is a terminal and this is the first rank."""
    stream = sys.stderr
    if (
        not stream.isatty()
        or os.environ.get("RANK", "0") != "0"
        or os.environ.get("TERM") == "dumb"
    ):
        yield
        return
    shown = ""
    ends = threading.Event()

    def wipe() -> None:
        nonlocal shown
        if shown:
            Printer.on(stream).put_raw(f"\r{' ' * len(shown)}\r")
            shown = ""

    def draw() -> None:
        nonlocal shown
        while not ends.wait(DRAWN_EVERY):
            with Printer.lock:
                phase = _phase
                if phase is None or phase.seconds < FIRST_AFTER or Printer.is_line_open:
                    wipe()
                    continue
                width = shutil.get_terminal_size().columns - 1
                line = one_line(f"taut: {phase.line()}")[:width]
                Printer.on(stream).put_raw(f"\r{line.ljust(len(shown))}")
                shown = line

    thread = threading.Thread(target=draw, name="taut-progress", daemon=True)
    before, Printer.before_write = Printer.before_write, wipe
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
        with Printer.lock, suppress(OSError):
            wipe()
        Printer.before_write = before
        hide()
