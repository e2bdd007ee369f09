"""A jail by gVisor, against a stand-in for ``runsc`` that takes its words and starts bubblewrap."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from taut.errors import SandboxError
from taut_tools.sandbox import gvisor, launch
from taut_tools.sandbox.box import Mechanism, Sandbox
from taut_tools.sandbox.limits import Limits, Trial
from taut_tools.sandbox.probe import choose, find

STAND_IN = """
import json, os, sys
words = sys.argv[1:]
with open({log!r}, "a") as log:
    print(*words, file=log)
if "delete" in words:
    sys.exit(0)
assert "--network=none" in words and ("--rootless" in words) == (os.getuid() != 0)
if {fails!r}:
    print("cannot make the container", file=sys.stderr)
    sys.exit(128)
(bundle,) = (it.partition("=")[2] for it in words if it.startswith("--bundle="))
report, begun = (it.partition("=")[2] for it in words if it.startswith("--pass-fd="))
assert (report.partition(":")[2], begun.partition(":")[2]) == ("3", "4")
config = json.load(open(bundle + "/config.json"))
assert config["root"]["readonly"] and config["process"]["noNewPrivileges"]
first, second = (os.dup(os.dup(int(it.partition(":")[0]))) for it in (report, begun))
os.dup2(first, 3)
os.dup2(second, 4)
line = [{bwrap!r}, "--unshare-all", "--die-with-parent", "--cap-drop", "ALL"]
for mount in config["mounts"]:
    if mount["type"] == "bind":
        line += ["--ro-bind", mount["source"], mount["destination"]]
    else:
        line += ["--tmpfs", mount["destination"]]
for link in os.listdir(bundle + "/root"):
    if os.path.islink(bundle + "/root/" + link):
        line += ["--symlink", os.readlink(bundle + "/root/" + link), "/" + link]
line += ["--dev", "/dev", "--chdir", config["process"]["cwd"], "--", *config["process"]["args"]]
environment = dict(it.split("=", 1) for it in config["process"]["env"])
os.execve(line[0], line, environment)
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The words of each start of the stand-in, a line each."""
    yield from _installed(tmp_path, monkeypatch, fails=False)


def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> Iterator[Path]:
    bwrap = launch.bwrap()
    if bwrap is None or find("bubblewrap").fault is not None:
        pytest.skip("the stand-in needs bubblewrap")
    log = tmp_path / "log"
    code = tmp_path / "stand_in.py"
    code.write_text(STAND_IN.format(log=str(log), bwrap=bwrap, fails=fails))
    script = tmp_path / "runsc"
    script.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(code))} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    gvisor.runsc.cache_clear()
    yield log
    gvisor.runsc.cache_clear()


def test_each_trial_is_a_container(log: Path) -> None:
    sandbox = Sandbox(Mechanism("gvisor", ""))
    program = "def f(x):\n    return x * 2\nif __name__ == '__main__': print(input())"
    trials = [
        Trial(stdin="hello"),
        Trial(call="f", arguments="[4]"),
        Trial(check="assert f(1) == 3"),
    ]
    ran = sandbox.run(program, trials)
    sandbox.close()
    assert [(it.outcome, it.stdout, it.value) for it in ran] == [
        ("ok", "hello\n", None),
        ("ok", "", "8"),
        ("error", "", None),
    ]
    words = [line.split() for line in log.read_text().splitlines()]
    names = [line[-1] for line in words if "run" in line]
    assert len(set(names)) == 3
    assert [line[-1] for line in words if "delete" in line] == names


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("import time; time.sleep(60)", "time"),
        ("while True: print('x' * 1000)", "output"),
        ("x = bytearray(10**10)", "memory"),
        ("while True: pass", "cpu"),
        ("import os; os.abort()", "crash"),
        ("import sys; sys.exit(3)", "error"),
        ("import socket; socket.socket()", "error"),
    ],
)
def test_limits(log: Path, program: str, outcome: str) -> None:
    sandbox = Sandbox(Mechanism("gvisor", ""))
    limits = Limits(wall_seconds=3.0 if outcome == "time" else 20.0, cpu_seconds=1)
    (ran,) = sandbox.run(program, [Trial()], limits)
    sandbox.close()
    assert ran.outcome == outcome


def test_it_is_preferred_where_it_holds_and_only_there(log: Path) -> None:
    """The stand-in counts root's processes by no user, so there it lets them through."""
    found = find("gvisor")
    held = () if os.getuid() else ("have more processes than allowed",)
    assert (found.lack, found.let_through) == (None, held)
    assert choose().name == ("gvisor" if os.getuid() else "bubblewrap")


def test_a_runsc_that_fails_is_our_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in _installed(tmp_path, monkeypatch, fails=True):
        sandbox = Sandbox(Mechanism("gvisor", ""))
        with pytest.raises(SandboxError, match="runsc failed: cannot make the container"):
            sandbox.run("print(1)", [Trial()])
        sandbox.close()
        assert choose().name == "bubblewrap"
