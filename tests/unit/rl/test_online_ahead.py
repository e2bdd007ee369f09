"""What runs beside the training: taken in order, errors raised where they are taken, no wait at close."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from taut.errors import EngineError
from taut.rl.online import Ahead


def test_a_phase_runs_in_another_thread_and_is_taken_once() -> None:
    ahead: Ahead[int] = Ahead()
    assert ahead.started is None
    ahead.start(3, threading.get_ident)
    assert ahead.started == 3
    assert ahead.take(3) != threading.get_ident()
    assert ahead.started is None


def test_the_caller_goes_on_meanwhile() -> None:
    ahead: Ahead[str] = Ahead()
    go = threading.Event()
    ahead.start(1, lambda: "there" if go.wait(5) else "late")
    go.set()
    assert ahead.take(1) == "there"


def test_an_error_is_raised_where_it_is_taken_and_then_forgotten() -> None:
    def fail() -> int:
        raise EngineError("server: gone")

    ahead: Ahead[int] = Ahead()
    ahead.start(1, fail)
    with pytest.raises(EngineError, match="gone"):
        ahead.take(1)
    ahead.start(2, lambda: 2)
    assert ahead.take(2) == 2


def test_at_most_one_phase_ahead() -> None:
    ahead: Ahead[int] = Ahead()
    ahead.start(1, lambda: 1)
    with pytest.raises(AssertionError, match="phase 1 is not taken"):
        ahead.start(2, lambda: 2)
    with pytest.raises(AssertionError, match="phase 2 is not under way"):
        ahead.take(2)


def test_closing_waits_for_nothing() -> None:
    ahead: Ahead[bool] = Ahead()
    never = threading.Event()
    ahead.start(1, lambda: never.wait(60))
    began = time.monotonic()
    ahead.close()
    assert time.monotonic() - began < 30 and ahead.started is None
    never.set()


@pytest.mark.slow
def test_a_process_ends_while_a_call_hangs() -> None:
    script = (
        "import threading; from taut.rl.online import Ahead\n"
        "a = Ahead(); a.start(1, threading.Event().wait); raise KeyboardInterrupt"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=30)
    assert done.returncode != 0 and b"KeyboardInterrupt" in done.stderr
