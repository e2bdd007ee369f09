"""``taut sandbox``: what holds, what does not, and what is in force."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from taut.cli import main
from taut_tools.sandbox import report
from taut_tools.sandbox.probe import ATTEMPTS, NAMES, Finding


def _found(monkeypatch: pytest.MonkeyPatch, *found: Finding) -> None:
    monkeypatch.setattr(report, "NAMES", [it.name for it in found])
    monkeypatch.setattr(report, "find", {it.name: it for it in found}.__getitem__)


def test_what_holds_and_what_does_not_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _found(
        monkeypatch,
        Finding("gvisor", "runsc is not installed", (), ""),
        Finding("bubblewrap", None, ("read a file",), "they are not mounted"),
        Finding("landlock", None, (), Path("/sys/fs/cgroup")),
    )
    assert main(["sandbox"]) == 0
    said = capsys.readouterr().out
    gvisor, bubblewrap, landlock, in_force = said.split("\n\n")
    assert gvisor == "gvisor: not available: runsc is not installed"
    assert bubblewrap.startswith("bubblewrap: lets programs through.")
    assert [line.split() for line in bubblewrap.splitlines() if "COULD" in line] == [
        ["read", "a", "file", "COULD"]
    ]
    assert "a cgroup for each program: none: they are not mounted" in bubblewrap
    assert "bounded by its open files only" in bubblewrap
    assert landlock.startswith("landlock: holds.")
    assert landlock.count("could not") == len(ATTEMPTS)
    assert "a cgroup for each program: below /sys/fs/cgroup" in landlock
    assert "not held: a program can see by name which files" in landlock
    assert in_force == "in force: landlock\n"


def test_what_does_not_hold_is_said_of_each_mechanism(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _found(monkeypatch, *(Finding(name, None, (), "") for name in NAMES))
    assert main(["sandbox", "json=true"]) == 0
    said = {
        it["name"]: " ".join(it["not_held"])
        for it in json.loads(capsys.readouterr().out)["mechanisms"]
    }
    assert "tested with a stand-in for runsc only" in said["gvisor"]
    assert "which files and processes exist" in said["landlock"]
    for name in ("bubblewrap", "landlock"):
        assert "a fault in the kernel is a hole" in said[name]


def test_where_nothing_holds_the_exit_code_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _found(monkeypatch, Finding("bubblewrap", None, ("use TCP", "write a file"), ""))
    assert main(["sandbox", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["in_force"] is None
    (found,) = said["mechanisms"]
    assert {name for name, could in found["attempts"].items() if could} == {
        "use TCP",
        "write a file",
    }
    assert main(["sandbox"]) == 1
    assert "in force: none; the reward code is refused" in capsys.readouterr().out


def test_it_is_tried_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sandbox", "json=true"]) in (0, 1)
    said = json.loads(capsys.readouterr().out)
    assert [it["name"] for it in said["mechanisms"]] == ["gvisor", "bubblewrap", "landlock"]
    held = [
        it["name"]
        for it in said["mechanisms"]
        if not it["lack"] and not any(it["attempts"].values())
    ]
    assert said["in_force"] == (held or [None])[0]
