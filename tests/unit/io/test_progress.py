"""The line of a terminal that says what a command is doing."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from taut.io import progress
from taut.io.console import Printer

PROGRAM = """
import sys, time
from taut.io import progress
from taut.io.console import guarded
with guarded(), progress.drawn():
    progress.show("loading torch")
    until = time.monotonic() + 60
    while not sys.stdin.readline():  # the test has seen the line
        assert time.monotonic() < until
    print("a line of the command")
    progress.show("reading the data")
    progress.count(512, 5000, "rows")
    sys.stdin.readline()
    print("you> ", end="")
    sys.stdin.readline()
print("the end")
"""


@pytest.fixture(autouse=True)
def no_phase() -> Iterator[None]:
    progress.hide()
    yield
    progress.hide()


class Terminal:
    """A process on a terminal of its own, and all that it printed."""

    def __init__(self, program: str) -> None:
        self.main, side = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=side,
            stderr=side,
            env=os.environ | {"TERM": "xterm", "TAUT_PROGRESS": ""},
        )
        os.close(side)
        self.text = ""

    def read_until(self, pattern: str, seconds: float = 60.0) -> None:
        until = time.monotonic() + seconds
        while not re.search(pattern, self.text):
            assert time.monotonic() < until, self.text
            if select.select([self.main], [], [], 0.2)[0]:
                try:
                    self.text += os.read(self.main, 2**16).decode()
                except OSError:  # the process has ended
                    assert re.search(pattern, self.text), self.text

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        os.close(self.main)

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()


def test_a_phase_moves_and_is_wiped_before_what_is_printed() -> None:
    terminal = Terminal(PROGRAM)
    terminal.read_until(r"\rtaut: loading torch  1 s")  # it is drawn again
    terminal.go_on()
    terminal.read_until(r"\rtaut: reading the data  512 of 5,000 rows")
    # wiped with spaces, so that the line stands alone
    assert re.search(r"\r *\ra line of the command\r\n", terminal.text)
    terminal.go_on()
    terminal.read_until(r"\r *\ryou> ")
    begin = len(terminal.text)
    terminal.go_on()
    terminal.read_until("the end")
    assert "taut:" not in terminal.text[begin:]  # an open line is left alone
    assert terminal.process.wait(60) == 0
    terminal.close()


def wait_for(is_there: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not is_there():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def every_phase_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DRAWN_EVERY", 0.01)
    monkeypatch.setattr(progress, "TOLD_AFTER", 0.0)
    monkeypatch.setenv("TAUT_PROGRESS", "")


@pytest.mark.usefixtures("every_phase_is_long")
def test_a_kind_of_phase_is_one_line_where_stderr_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream, before = io.StringIO(), Printer.before_write
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.drawn():
        for phase, num_lines in (("loading", 1), ("step 1", 2), ("step 22", 2), ("saving 22", 3)):
            with progress.told():  # of a function that the command calls
                progress.show(phase)
                wait_for(lambda: stream.getvalue().count("\n") == num_lines)  # noqa: B023
        assert Printer.before_write is before
    assert stream.getvalue() == "taut: loading\ntaut: step 1\ntaut: saving 22\n"


@pytest.mark.usefixtures("every_phase_is_long")
@pytest.mark.parametrize(("name", "value"), [("TAUT_PROGRESS", "off"), ("RANK", "1")])
def test_nothing_is_told_by_other_ranks_or_where_it_is_off(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    num_threads = threading.active_count()
    with progress.told():
        assert threading.active_count() == num_threads


@pytest.mark.parametrize(
    ("done", "total", "unit", "line"),
    [
        (0, None, "", r"reading  3 s"),
        (300, None, "rows", r"reading  300 rows, 100 rows/s  3 s"),
        (300, 5000, "rows", r"reading  300 of 5,000 rows, 100 rows/s  3 s"),
    ],
)
def test_a_phase_in_words(
    done: float, total: float | None, unit: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress.time, "monotonic", lambda: 100.0)
    progress.show("reading")
    progress.count(done, total, unit)
    monkeypatch.setattr(progress.time, "monotonic", lambda: 103.0)
    phase = progress.current()
    assert phase is not None and phase.line() == line
