"""A program that grades and is ended in the middle: by Ctrl-C in its terminal, or by SIGKILL. No worker outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest

from taut.rewards import RewardInput
from taut.rewards.text_match import Regex
from taut.rewards.workers import COMMAND

OWN = """
import os, sys, time

def f(text, row):
    if text == "wait":
        open(row["at"] + str(os.getpid()), "w").close()
        time.sleep(60)
    return 1.0
"""
SCRIPT = """\
import signal, sys
from taut.rewards import RewardInput
from taut.rewards.reward_set import open_rewards
from taut.rewards.settings import GradingConfig

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have switched it off
at = sys.argv[1]
with open(at + "main", "a") as file:
    file.write("x")
reward_set = open_rewards(at + "own.py:f", GradingConfig(workers=2))
assert reward_set.grade([RewardInput(text="go")])[0].total == 1.0
reward_set.grade([RewardInput(text="wait", row={"at": at})] * 2)
"""
"""It has no ``if __name__ == "__main__"``, and must not be run again by its workers."""


def pids(place: Path) -> list[int]:
    return [int(path.name) for path in place.iterdir() if path.name.isdecimal()]


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_its_program_and_none_prints_of_ctrl_c(
    sent: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    program = subprocess.Popen(
        [sys.executable, "-W", "error", str(script), f"{tmp_path}/"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while len(pids(tmp_path)) < 2 and time.monotonic() < deadline:
        assert program.poll() is None
        time.sleep(0.02)
    os.killpg(program.pid, sent)
    _, told = program.communicate(timeout=30)
    while any(map(is_there, pids(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(pids(tmp_path)) == 2
    assert not any(map(is_there, pids(tmp_path)))
    assert told.count("Traceback") == (sent is signal.SIGINT), told
    assert "worker.py" not in told
    assert (tmp_path / "main").read_text() == "x"


ONE_CORE = "import os; os.cpu_count = lambda: 1; "


def test_a_worker_that_nobody_ends_ends_by_itself() -> None:
    """Its parent is gone, and it is in a loop of C code, where none of its own threads can look for that."""
    mine, theirs = Pipe()
    held, leash = os.pipe()
    verifier = Regex(pattern=r"^(a+)+$")
    with mine, theirs:
        worker = subprocess.Popen(
            [sys.executable, "-c", ONE_CORE + COMMAND.format(theirs.fileno(), held)],
            pass_fds=[theirs.fileno(), held],
        )
        mine.send([("regex", verifier)])
        mine.send((0, [RewardInput(text="a" * 60 + "b")], 0.0))
        assert worker.wait(900) == -signal.SIGPROF
    os.close(held)
    os.close(leash)
