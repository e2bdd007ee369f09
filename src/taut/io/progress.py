"""What a command is doing, on a line of the terminal that moves: ``taut: loading the model  12 s``.

    with drawn():                   of a command, on stderr, if that is a terminal
    with told():                    of a function in Python: the line of a notebook, or a line for each long phase
    show("reading the data")        from now on, until the next phase or hide()
    count(512, 5_000, "rows")       how far the phase is

The line is drawn again twice a second, by a thread, and wiped before anything else is printed (``Printer``). A line
that something else has left open, as the bar of steps or a prompt, is left alone. Under several ranks the first draws.
TAUT_PROGRESS=off in the environment turns all of it off.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from taut.io.console import Printer, one_line
from taut.io.notebook import ProgressLine

DRAWN_EVERY = 0.5
"""Seconds between two drawings."""
FIRST_AFTER = 0.25
"""Seconds after which a phase is drawn first: shorter ones do not flicker."""
TOLD_AFTER = 2.0
"""Seconds after which a phase is told where nothing can be drawn."""


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
_is_watched = False


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
    """Draw the phases of a command on stderr, if that is a terminal; otherwise tell them (``told``)."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        with told():
            yield
        return
    shown = ""

    def wipe() -> None:
        nonlocal shown
        if shown:
            Printer.on(sys.stderr).put_raw(f"\r{' ' * len(shown)}\r")
            shown = ""

    def draw(phase: Phase | None) -> None:
        nonlocal shown
        with Printer.lock:
            if phase is None or phase.seconds < FIRST_AFTER or Printer.is_line_open:
                wipe()
                return
            width = shutil.get_terminal_size().columns - 1
            line = one_line(f"taut: {phase.line()}")[:width]
            Printer.on(sys.stderr).put_raw(f"\r{line.ljust(len(shown))}")
            shown = line

    before, Printer.before_write = Printer.before_write, wipe
    try:
        with _watched(draw):
            yield
    finally:
        with Printer.lock, suppress(OSError):
            wipe()
        Printer.before_write = before


@contextmanager
def told() -> Iterator[None]:
    """Say what the block does where no line can be drawn. In a notebook it is the line of progress; elsewhere each kind
    of phase that takes TOLD_AFTER seconds is a line on stderr, once.
    """
    line, kinds = ProgressLine.of_notebook(), set[str]()

    def tell(phase: Phase | None) -> None:
        if phase is None or phase.seconds < TOLD_AFTER:
            return
        if line is not None:
            line.show(phase.line(), int(phase.done), int(phase.total or 0) or None)
            return
        kind = re.sub(r"\d+", "", phase.text)
        if kind not in kinds:
            kinds.add(kind)
            Printer.on(sys.stderr).write(f"taut: {phase.text}\n")
            Printer.on(sys.stderr).flush()

    try:
        with _watched(tell):
            yield
    finally:
        if line is not None:
            line.close()


@contextmanager
def _watched(look: Callable[[Phase | None], None]) -> Iterator[None]:
    """Call ``look`` with the phase twice a second while the block runs, on the first rank. A block within another is
    watched by the outer one.
    """
    global _is_watched
    is_off = os.environ.get("TAUT_PROGRESS") == "off" or os.environ.get("RANK", "0") != "0"
    if _is_watched or is_off:
        yield
        return
    ends = threading.Event()

    def watch() -> None:
        while not ends.wait(DRAWN_EVERY):
            look(_phase)

    thread = threading.Thread(target=watch, name="taut-progress", daemon=True)
    _is_watched = True
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
        hide()
        _is_watched = False
