"""A mechanism that lets something through is not taken, and where none holds programs are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from taut.errors import SandboxError
from taut_tools.sandbox import kernel, launch, probe, seccomp_rules
from taut_tools.sandbox.box import Mechanism, Sandbox
from taut_tools.sandbox.limits import Trial
from taut_tools.sandbox.probe import ATTEMPTS, choose, open_sandbox

NONE_HOLDS = "found no way to hold a program"


@pytest.fixture
def without_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "bwrap", lambda: None)


def test_another_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxError, match=f"{NONE_HOLDS}.*it needs Linux, this is darwin"):
        choose()


def test_each_lack_is_told(without_bubblewrap: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "landlock_version", lambda: 1)
    message = (
        "gvisor: runsc is not installed; bubblewrap: bwrap is not installed; "
        r"landlock: found version 1 of it, expected 3 or later.*run: pip install .*\[rl\]"
    )
    with pytest.raises(SandboxError, match=message):
        open_sandbox()


def test_no_mechanism_without_its_filter_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyseccomp", None)
    seccomp_rules.compiled.cache_clear()
    with pytest.raises(SandboxError, match=r"libseccomp cannot be had.*apt install libseccomp2"):
        choose()
    seccomp_rules.compiled.cache_clear()


def test_a_mechanism_that_reads_a_secret_is_not_taken(
    without_bubblewrap: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if kernel.landlock_version() < kernel.LANDLOCK_OLDEST:
        pytest.skip("landlock is not to be had here")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    usual = launch.readable

    def leaky(packages: Sequence[str]) -> list[str]:
        return [*usual(packages), str(tmp_path)]

    monkeypatch.setattr(launch, "readable", leaky)
    with pytest.raises(SandboxError, match="landlock: a program could read a file"):
        choose("landlock")


def test_every_attempt_gets_through_where_nothing_holds() -> None:
    """The attempts can succeed: run as a plain script, by this user, all but the limits' do."""
    with probe._planted() as given:
        done = subprocess.run(
            [sys.executable, "-c", probe._PROBE],
            input=json.dumps({**given, "memory": 1, "processes": 0}),
            capture_output=True,
            text=True,
        )
    through = json.loads(done.stdout)
    assert set(ATTEMPTS) - set(through) <= {"call what no kernel has yet"}, done.stderr


def test_a_mechanism_that_cannot_run_is_not_taken(
    without_bubblewrap: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "interpreter", lambda: "/no/such/python")
    with pytest.raises(SandboxError, match=f"{NONE_HOLDS}.*/no/such/python: not found"):
        choose()


def test_a_runner_that_ends_is_our_error_and_not_the_program_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = [launch.interpreter(), "-c", "import sys; sys.exit('why it ended')"]
    monkeypatch.setattr(launch, "landlock", lambda readable, packages: line)
    sandbox = Sandbox(Mechanism("landlock", ""))
    with pytest.raises(SandboxError, match="the sandbox's process failed: why it ended"):
        sandbox.run("print(1)", [Trial()])
    sandbox.close()


def test_a_full_tmpdir_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(probe, "TemporaryFolder", full)
    with pytest.raises(SandboxError, match=r"it cannot be tried in TMPDIR:.*No space left"):
        choose()


def test_a_long_tmpdir_is_no_obstacle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The address of a socket has room for 107 bytes."""
    tmp_path.chmod(0o755)
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    assert choose().name in probe.NAMES


def test_packages_are_folders(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="found no folder"):
        open_sandbox(packages=[str(tmp_path / "none")])


def test_a_closed_sandbox_runs_nothing() -> None:
    sandbox = Sandbox(Mechanism("landlock", ""))
    sandbox.close()
    with pytest.raises(SandboxError, match="the sandbox is closed"):
        sandbox.run("print(1)", [Trial()])
