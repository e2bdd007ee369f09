"""Jails as they are built, by users whom the other tests do not run as."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from taut.errors import SandboxError
from taut.sandbox import Limits, Mechanism, Sandbox, Trial, jail, kernel, workers

NOT_ROOT = 23456


def jailed(mechanism: str, uid: int, *programs: str) -> list[Any]:
    """What a server of user ``uid`` says of each program; None where it did not live to say it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            sys.stdout, sys.stderr = (open(end, "w", closefd=False) for end in (1, 2))  # noqa: SIM115
            os.setsid()  # should a program reach the server's group, it is not ours
            if os.getuid() == 0 and uid != 0:
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
                ctypes.CDLL(None).prctl(
                    4, 1, 0, 0, 0
                )  # dumpable, as a program that root did not start
            requests, _ = os.pipe()
            kernel.adopt_orphans()
            for program in programs:
                asked = {**REQUEST, "program": program, "uid": workers.spare_user()}
                os.write(writer, (jail._jailed(mechanism, asked, requests) or b"") + b"\n")
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = [json.loads(line) for line in file]
    os.waitpid(child, 0)
    return said + [None] * (len(programs) - len(said))


REQUEST = {
    "tests": [{"stdin": "", "call": "", "arguments": "[]", "check": ""}],
    "limits": Limits(processes=4).as_mapping(),
    "stop_early": False,
    "readable": ["/usr/lib"],
    "links": [],
}


def require(mechanism: str) -> None:
    (said,) = jailed(mechanism, NOT_ROOT, "print(1)")
    if mechanism == "landlock" and kernel.landlock_version() < kernel.LANDLOCK_OLDEST:
        pytest.skip("landlock is not to be had here")
    if said is not None and str(said.get("error", "")).startswith("[Errno 1] unshare"):
        pytest.skip("no user namespaces here")
    assert said is not None
    assert "results" in said, said


def test_a_user_who_is_not_root_has_namespaces() -> None:
    require("namespaces")
    forks = "import os\nos.fork() or os._exit(0)\nos.wait()\nprint(os.listdir('/tmp'), os.getuid())"
    (said,) = jailed("namespaces", NOT_ROOT, forks)
    uid = NOT_ROOT if os.getuid() == 0 else os.getuid()
    assert said["results"][0][:3] == ["ok", f"[] {uid}\n", ""], said


def test_a_program_s_group_is_its_own() -> None:
    """A user's server and programs have one number, so nothing else would keep the signal from it."""
    require("namespaces")
    killed, after = jailed("namespaces", NOT_ROOT, "import os; os.kill(0, 9)", "print(1)")
    assert killed is not None
    assert killed["results"][0][0] == "crash"
    assert after["results"][0][:2] == ["ok", "1\n"]


@pytest.mark.skipif(os.getuid() != 0, reason="of root's programs")
def test_a_program_of_root_s_is_nobody_s_under_landlock() -> None:
    require("landlock")
    (said,) = jailed("landlock", 0, "import os; print(os.getresuid(), os.getresgid())")
    outcome, stdout, *_ = said["results"][0]
    assert outcome == "ok", said
    assert "0" not in stdout.replace("(", "").replace(")", "").split(", ")


def test_where_nobody_else_may_read_programs_stay_root_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(workers, "is_open", lambda path: False)
    said = Sandbox(Mechanism("landlock", "why")).mechanism.reason
    assert said == "why; programs stay root, for nobody else may read what they need"
    assert Sandbox(Mechanism("namespaces", "why")).mechanism.reason == "why"
    monkeypatch.setattr(workers, "is_open", lambda path: True)
    assert Sandbox(Mechanism("landlock", "why")).mechanism.reason == "why"


def test_bubblewrap_is_killed_first_where_memory_runs_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bubblewrap = tmp_path / "bwrap"
    bubblewrap.write_text(f"#!/bin/sh\ncat /proc/self/oom_score_adj > {tmp_path}/score\n")
    bubblewrap.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda name: str(bubblewrap))
    with pytest.raises(SandboxError, match="the sandbox's process failed"):
        Sandbox(Mechanism("bubblewrap", "")).run("print(1)", [Trial()])
    assert (tmp_path / "score").read_text() == "1000\n"
