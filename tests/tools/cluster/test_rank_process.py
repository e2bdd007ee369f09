"""A rank as a process: what it prints and how it ends is seen, and it ends with the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from taut_tools.cluster import rank_process
from taut_tools.cluster.rank_process import RankProcess

STARTER = """
from threading import Event

from taut_tools.cluster import rank_process
rank_process.PROGRAM = "from taut.io.worker_process import end_with_parent; end_with_parent({}); import sys, time; \\
print('up', flush=True); time.sleep(60)"
up = Event()
process = rank_process.RankProcess([], {}, ".", lambda stream, line: up.set())
up.wait()
print(process._process.pid, flush=True)
process.wait()
"""


def test_lines_and_exit_code_are_those_of_taut(tmp_path: Path) -> None:
    lines: list[tuple[str, str]] = []
    process = RankProcess(
        ["runs", "nowhere"], {}, str(tmp_path), lambda stream, line: lines.append((stream, line))
    )
    assert process.wait() == 2
    ((stream, line),) = lines
    assert stream == "stderr"
    assert line.startswith("taut: error: found 'nowhere'")


def test_a_signal_reaches_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import time; print({}, flush=True); time.sleep(60)"
    monkeypatch.setattr(rank_process, "PROGRAM", program)
    lines: list[str] = []
    process = RankProcess([], {}, str(tmp_path), lambda _, line: lines.append(line))
    while not lines:
        time.sleep(0.01)
    assert process.is_alive
    process.signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM


def test_a_signal_that_the_parent_has_blocked_reaches_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        rank_process, "PROGRAM", "import time; print({}, flush=True); time.sleep(60)"
    )
    lines: list[str] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        process = RankProcess([], {}, str(tmp_path), lambda _, line: lines.append(line))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    while not lines:
        time.sleep(0.01)
    process.signal(signal.SIGUSR1)
    assert process.wait() == -signal.SIGUSR1


def test_it_ends_with_the_process_that_started_it() -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    os.kill(pid, 0)
    starter.kill()
    starter.wait()
    starter.stdout.close()
    deadline = time.monotonic() + 50
    while Path(f"/proc/{pid}").exists() and _state(pid) != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"
