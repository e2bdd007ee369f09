"""Functions under limits on processor time and memory, in a process of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from taut.io import limited_call
from taut.io.worker_process import Helper


def test_a_function_answers() -> None:
    assert limited_call.call("operator:add", 2, 3) == 5
    assert limited_call.call("operator:concat", "a\ud800", "ü") == "a\ud800ü"


def test_what_a_function_raises_is_told() -> None:
    with pytest.raises(limited_call.FunctionFailed, match="modulo by zero"):
        limited_call.call("operator:floordiv", 1, 0)
    with pytest.raises(limited_call.FunctionFailed, match=r"^'x'$"):
        limited_call.call("operator:getitem", {}, "x")


def test_processor_time_is_limited_inside_one_instruction() -> None:
    """A power of integers is one call of C code, which no thread or handler of Python could end."""
    with pytest.raises(limited_call.LimitExceeded, match=r"more than 0\.2 s of processor time"):
        limited_call.call("operator:pow", 7, 10**9, seconds=0.2)
    assert limited_call.call("operator:add", 2, 3) == 5


def test_memory_is_limited() -> None:
    with pytest.raises(limited_call.LimitExceeded, match="more than 100 MB of memory"):
        limited_call.call("operator:mul", "a", 10**9, memory_mb=100)
    assert limited_call.call("operator:add", 2, 3) == 5


def test_without_proc_time_is_still_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS, where the process cannot know what it holds already."""
    without = (
        "import os, pathlib; pathlib.Path.read_text = lambda *_, **__: os.stat('/nonexistent'); "
    )
    monkeypatch.setattr(limited_call, "COMMAND", without + limited_call.COMMAND)
    limited_call._helper.end()
    try:
        assert limited_call.call("operator:add", 2, 3) == 5
        with pytest.raises(limited_call.LimitExceeded, match=r"more than 0\.2 s of processor time"):
            limited_call.call("operator:pow", 7, 10**9, seconds=0.2)
    finally:
        limited_call._helper.end()


def test_limits_do_not_add_up_over_calls() -> None:
    for _ in range(5):
        assert limited_call.call("operator:length_hint", "a" * 10**6, seconds=0.5) == 10**6
    started = time.process_time()
    assert limited_call.call("operator:add", 2, 3, seconds=0.2) == 5
    assert time.process_time() - started < 0.2


def test_a_process_that_was_ended_is_replaced() -> None:
    limited_call.call("operator:add", 2, 3)
    os.kill(_process(), signal.SIGKILL)
    with suppress(limited_call.LimitExceeded):  # it was asked before its end was seen
        limited_call.call("operator:add", 2, 3)
    assert limited_call.call("operator:add", 2, 3) == 5


def test_it_has_no_secrets_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    limited_call._helper.end()
    assert limited_call.call("os:getenv", "HF_TOKEN") is None
    assert limited_call.call("os:getenv", "PATH") == os.environ["PATH"]


def test_a_fork_has_a_process_of_its_own() -> None:
    limited_call.call("operator:add", 2, 3)
    child = os.fork()
    if child == 0:
        os._exit(limited_call.call("operator:add", 2, 3))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    assert limited_call.call("operator:add", 2, 3) == 5


def test_a_helper_runs_functions_itself_and_ends_at_a_limit() -> None:
    helper = Helper()
    source = (
        "from taut.io import limited_call, worker_process; worker_process.begin({}, {}); limited_call.run_here();"
        "print(limited_call.call('operator:add', 2, 3), flush=True);"
        "limited_call.call('operator:pow', 7, 10**9, seconds=0.2)"
    )
    helper.start(source, limited_call.environment(), stdout=subprocess.PIPE)
    assert helper.process is not None and helper.process.stdout is not None
    with helper.process.stdout as output:
        assert output.read() == b"5\n"
    status = helper.reap()
    assert status == -signal.SIGPROF and limited_call.is_limit(status)
    assert not limited_call.is_limit(-signal.SIGKILL)


def test_it_ends_with_its_parent_even_in_a_call(tmp_path: Path) -> None:
    """SIGKILL, which leaves the parent no time to end anything; the call holds the interpreter's lock."""
    source = (
        "from taut.io import limited_call as bounded; bounded.call('operator:add', 1, 2);"
        "print(bounded._helper.process.pid, flush=True); bounded.call('operator:pow', 7, 10**9, seconds=30)"
    )
    parent = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    number = int(parent.stdout.readline())
    time.sleep(0.3)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while _is_running(number):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _process() -> int:
    assert limited_call._helper.process is not None
    return limited_call._helper.process.pid


def _is_running(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
