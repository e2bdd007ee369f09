"""A mechanism that lets something through is not taken, and where none holds programs are refused."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from taut.errors import SandboxError
from taut.sandbox import Mechanism, Sandbox, Trial, choose, kernel, open_sandbox, workers
from taut.sandbox import mechanism as mechanism_module

NONE_HOLDS = "found no way to hold a program"


@pytest.fixture
def without_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)


def test_another_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxError, match=f"{NONE_HOLDS}.*it needs Linux, this is darwin"):
        choose()


def test_each_lack_is_told(without_bubblewrap: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "landlock_version", lambda: 1)
    monkeypatch.setattr(mechanism_module, "_leak_of", lambda mechanism: "unshare: not permitted")
    message = (
        "bubblewrap: bwrap is not installed; namespaces: unshare: not permitted; "
        "landlock: found version 1 of it"
    )
    with pytest.raises(SandboxError, match=message):
        open_sandbox()


def test_a_mechanism_that_reads_a_secret_is_not_taken(
    without_bubblewrap: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if kernel.landlock_version() < kernel.LANDLOCK_OLDEST:
        pytest.skip("landlock is not to be had here")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    usual = workers.readable

    def leaky(packages: Sequence[str]) -> list[str]:
        return [*usual(packages), str(tmp_path)]

    monkeypatch.setattr(workers, "readable", leaky)
    with pytest.raises(SandboxError, match="landlock: a secret file was read"):
        choose("landlock")


def test_a_mechanism_that_cannot_run_is_not_taken(
    without_bubblewrap: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "interpreter", lambda: "/no/such/python")
    with pytest.raises(SandboxError, match=f"{NONE_HOLDS}.*cannot be started"):
        choose()


def test_a_server_that_ends_is_our_error_and_not_the_program_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        workers, "command", lambda call, packages: [workers.interpreter(), "-c", ""]
    )
    with pytest.raises(SandboxError, match="the sandbox's process failed"):
        Sandbox(Mechanism("namespaces", "")).run("print(1)", [Trial()])


def test_packages_are_folders(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="found no folder"):
        open_sandbox(packages=[str(tmp_path / "none")])


def test_a_closed_sandbox_runs_nothing() -> None:
    sandbox = Sandbox(Mechanism("namespaces", ""))
    sandbox.close()
    with pytest.raises(SandboxError, match="the sandbox is closed"):
        sandbox.run("print(1)", [Trial()])
