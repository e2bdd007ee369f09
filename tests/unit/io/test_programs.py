"""Programs that do what they should not: what they start ends with them, and no more of their output is held than the
end. On Linux, where the kernel says who descends from whom."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from taut.io import keeper
from taut.io.programs import KEPT, Program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

ESCAPE = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open(sys.argv[1] + ".part", "w") as file:
            file.write(str(os.getpid()))
        os.rename(sys.argv[1] + ".part", sys.argv[1])
        time.sleep(600)
    os._exit(0)
os.wait()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
print("said", flush=True)
"""
"""Leaves a process in a session of its own, which has no parent and keeps the standard streams open."""


def program(code: str, *arguments: object, **settings: object) -> Program:
    words = [sys.executable, "-I", "-S", "-c", code, *map(str, arguments)]
    return Program(words, os.environ, **settings)  # type: ignore[arg-type]


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def soon(condition: Callable[[], bool], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.kill(os.getpid(), 15)", -15),
        ("import os; os.kill(0, 15)", -15),  # its own session, not its keeper's
    ],
)
def test_its_end_is_the_programs(code: str, status: int) -> None:
    assert program(code).wait(20) == status


def test_what_it_prints_is_read_and_the_end_of_it_held() -> None:
    ran = program(
        "import os\nfor _ in range(64): os.write(1, b'x' * 2**20)\nos.write(1, b'\\n{}\\n')"
    )
    assert ran.wait(60) == 0
    assert ran.out.end()[-1] == "{}"
    assert ran.out.is_cut
    assert len(ran.out._kept) <= KEPT


def test_what_escapes_ends_with_the_program_and_reading_with_it(tmp_path: Path) -> None:
    began = time.monotonic()
    ran = program(ESCAPE, tmp_path / "pid")
    assert ran.wait(20) == 0
    assert not is_there(int((tmp_path / "pid").read_text()))
    assert ran.out.end() == ["said"]
    assert time.monotonic() - began < 20


def test_what_escapes_ends_where_the_program_is_ended(tmp_path: Path) -> None:
    ran = program(ESCAPE + "time.sleep(600)", tmp_path / "pid")
    assert soon((tmp_path / "pid").exists)
    ran.end()
    assert not is_there(int((tmp_path / "pid").read_text()))
    ran.end()


def test_what_escapes_ends_where_taut_is_killed(tmp_path: Path) -> None:
    """With a fork of it alive."""
    host = f"""
import os, signal, sys, time
from taut.io.programs import Program
Program([sys.executable, "-c", {ESCAPE + "time.sleep(600)"!r}, {str(tmp_path / "pid")!r}], os.environ)
while not os.path.exists({str(tmp_path / "pid")!r}):
    time.sleep(0.01)
if os.fork() == 0:
    os.closerange(0, 3)
    time.sleep(60)
    os._exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", host], check=False).returncode == -signal.SIGKILL
    assert soon(lambda: not is_there(int((tmp_path / "pid").read_text())))


def test_a_keeper_that_is_stopped_is_ended_with_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "PATIENCE", 0.5)
    ran = program(ESCAPE + "time.sleep(600)", tmp_path / "pid")
    assert soon((tmp_path / "pid").exists)
    os.kill(ran.pid, signal.SIGSTOP)
    ran.end()
    assert soon(lambda: not is_there(int((tmp_path / "pid").read_text())))


def test_a_line_without_end_ends_a_program_that_is_read_by_lines() -> None:
    ran = program(
        "import os\nprint('{}', flush=True)\nwhile True: os.write(1, b'x' * 4096)", longest=2**16
    )
    ran.wait(20)
    assert ran.out.end()[0] == "{}"
    assert len(ran.out._kept) < 2**16 + 2**17
    assert "a line of its output has over 65,536 bytes" in ran.err.end()[-1]


def test_a_program_that_there_is_not_is_refused_at_once() -> None:
    with pytest.raises(FileNotFoundError):
        Program(["/nowhere/program"], os.environ)


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives up no rights for it")
def test_apart_it_sees_no_other_process_and_signals_none() -> None:
    other = subprocess.Popen(["sleep", "60"], env={"PATH": os.environ["PATH"], "SECRET": "hunter2"})
    try:
        ran = program(
            """
import os, signal, sys
for number in (int(sys.argv[1]), os.getppid()):
    for act in (lambda: open(f"/proc/{number}/environ").read(), lambda: os.kill(number, 9)):
        try:
            print(act())
        except OSError as error:
            print(type(error).__name__)
print(len(open("/proc/self/environ").read()) > 0)
""",
            other.pid,
            is_apart=True,
        )
        if ran.wait(20) == keeper.CANNOT_START:
            pytest.skip("what it takes is missing here")
        assert ran.out.end() == ["FileNotFoundError", "PermissionError"] * 2 + ["True"]
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
