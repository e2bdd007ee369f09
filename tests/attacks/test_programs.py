"""Every attack of the table, for every mechanism of the machine, as root and as an ordinary user.

The programs run below a process that is started once for each mechanism and user (``runner``). As an ordinary user it
lives in a mount namespace of its own, where Python and this checkout can be read though the folders above them cannot.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.attacks.programs import AFTER_MB, ATTACKS, DURING_MB, RIGHT, Attack, Must
from tests.attacks.runner import NO_WALL

from taut.errors import SandboxError
from taut_tools.sandbox.probe import choose

pytestmark = [
    pytest.mark.attack,
    pytest.mark.skipif(
        os.uname().machine != "x86_64", reason="the numbers of calls are those of x86-64"
    ),
]

ROOT = Path(__file__).parents[2]
USER = 23456
"""An ordinary user, of whom nobody else has processes."""
STAYING = [
    attack.name
    for attack in ATTACKS
    if attack.must is Must.LEAVE_NOTHING and attack.target == "staying alive"
]


BESIDE = [
    "a fork bomb",
    "everything that every process may have",
    "pipes full to the brim",
    "standard output",
]
HARMLESS = {
    "secrets by their path": "through",
    "what folders hold": "through",
    "where links lead": "through",
    "extended attributes": "through",
    "descriptors that the host has open": "saw 77",
    "the environment, the arguments and the user": "saw TAUT_PLANTED",
    "locks and leases on files of the host": "through flock",
    "pages in pipes, rings and counters that the machine shares": "through vmsplice",
    "huge pages spliced into pipes": "during the run",
    "a child of a child in a session of its own": "is left",
}
"""Attacks that may be run without a wall, and a part of what the table then finds."""


class Column(NamedTuple):
    """One mechanism and one user."""

    mechanism: str
    user: str

    def __str__(self) -> str:
        return f"{self.mechanism}-{self.user}"


COLUMNS = [
    Column("bubblewrap", "root"),
    Column("bubblewrap", "user"),
    Column("landlock", "root"),
    Column("landlock", "root-becomes-nobody"),
    Column("landlock", "user"),
]
"""Under Landlock, root's programs stay root, without a capability, where only root may read Python; else they become
nobody."""
QUICK = [Column("bubblewrap", "root"), Column("landlock", "user")]
"""One user of each mechanism; the other columns are slow."""
BY_COLUMN = [
    pytest.param(column, id=str(column), marks=() if column in QUICK else pytest.mark.slow)
    for column in COLUMNS
]


class Runner:
    """The process that runs the attacks of a column."""

    def __init__(self, column: Column) -> None:
        self.column = column
        line = [sys.executable, "-m", "tests.attacks.runner", column.mechanism]
        self._stashes = tempfile.mkdtemp(prefix="taut-")
        if os.getuid() == 0 and column.user != "root":
            line = [
                "unshare",
                "--mount",
                "sh",
                "-ec",
                _readable_by_all(self._stashes) + _line(column, line),
            ]
        self._process = subprocess.Popen(
            line,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=_ENVIRONMENT,
        )

    def ask(self, request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if request is not None:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the runner of {self.column} has ended with {self._process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.communicate(timeout=20)
        Path(self._stashes).rmdir()


_ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
    "PYTHONDONTWRITEBYTECODE": "1",
    "HOME": str(Path.home()),
}


def _line(column: Column, line: list[str]) -> str:
    if column.user == "user":
        line = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", *line]
    return "exec " + shlex.join(line)


def _readable_by_all(stashes: str) -> str:
    """Shell commands for a mount namespace: what the runner needs is put aside, each folder above it that others may
    not enter is covered by an empty one, and what it needs is put back."""
    needed = {Path(it).resolve() for it in (sys.base_prefix, sys.prefix, ROOT)}
    closed: dict[Path, list[Path]] = {}
    for path in sorted(needed):
        for above in reversed(path.parents):
            if not above.stat().st_mode & 0o001:
                closed.setdefault(above, []).append(path)
                break
    commands = [
        "mount --make-rprivate /",
        f"mount -t tmpfs -o mode=700 tmpfs {shlex.quote(stashes)}",
    ]
    put = []
    for cover, paths in closed.items():
        put.append(f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(cover))}")
        for path in paths:
            stash = shlex.quote(f"{stashes}/{len(put)}")
            commands.append(f"mkdir {stash}; mount --rbind {shlex.quote(str(path))} {stash}")
            put.append(
                f"mkdir -p {shlex.quote(str(path))}; mount --rbind {stash} {shlex.quote(str(path))}"
            )
    return "; ".join(["umask 022", *commands, *put]) + "\n"


def _lack_of(column: Column) -> str:
    """Why a column cannot run here; empty: it can."""
    try:
        choose(column.mechanism)  # type: ignore[arg-type]
    except SandboxError as error:
        return str(error)
    if os.getuid() != 0:
        return "" if column.user == "user" else "the tests do not run as root"
    if column.user == "root":
        return ""
    missing = [name for name in ("unshare", "setpriv") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} of util-linux is not installed"
    tried = subprocess.run(
        ["unshare", "--mount", "true"], capture_output=True, text=True, check=False
    )
    return f"a mount namespace cannot be had: {tried.stderr.strip()}" if tried.returncode else ""


_RUNNING: dict[Column, Runner] = {}
"""One at a time: the tests of a column follow each other."""


@pytest.fixture(scope="module", autouse=True)
def _no_runner_is_left() -> Iterator[None]:
    yield
    _close_all()


def _close_all() -> None:
    while _RUNNING:
        _, runner = _RUNNING.popitem()
        runner.close()


def runner_of(column: Column) -> Runner:
    """Started when the first test of the column asks for it; a column that cannot run here skips its tests."""
    if column not in _RUNNING:
        lack = _lack_of(column)
        if lack:
            pytest.skip(f"{column}: {lack}")
        _close_all()
        _RUNNING[column] = Runner(column)
        _RUNNING[column].ask(None)
    return _RUNNING[column]


def violations(attack: Attack, mechanism: str, answer: dict[str, Any]) -> list[str]:
    """What did not happen as it must."""
    found = [f"the sandbox failed: {answer['error']}"] if answer["error"] else []
    found += answer["changes"]
    if answer["after"] != ["42\n", "", "ok"]:
        found.append(f"the next program was not served: {answer['after']}")
    but = attack.but.get(mechanism)
    outcomes = attack.outcomes | (but.outcomes if but else frozenset())
    for trial, (stdout, stderr, outcome, seconds, value) in zip(
        attack.trials, answer["rans"], strict=False
    ):
        lines = [line.split("\t") for line in stdout.splitlines()]
        if outcome not in outcomes:
            last = stderr.strip().rpartition("\n")[2]
            found.append(
                f"the outcome is {outcome}, expected {' or '.join(sorted(outcomes))}: {last}"
            )
        if seconds > attack.within:
            found.append(f"it took {seconds:.1f} seconds, expected {attack.within}")
        if attack.must is Must.BE_REFUSED:
            allowed = but.through if but else frozenset()
            found += [" ".join(it) for it in lines if it[0] == "through" and it[1] not in allowed]
            if outcome == "ok" and not any(it[0] in ("refused", "through") for it in lines):
                found.append("no attempt was reported")
        elif attack.must is Must.SEE_NOTHING:
            own = trial.stdin + trial.arguments + trial.check
            found += [" ".join(it) for it in lines if it[0] == "saw" and it[1] not in own]
        elif attack.must is Must.BE_WRONG:
            if outcome == "ok" and trial.check and not attack.cheats_checks:
                found.append("the check passed")
            if RIGHT in stdout or RIGHT in (value or ""):
                found.append("it knew what is right")
        if (
            attack.must in (Must.BE_REFUSED, Must.SEE_NOTHING)
            and outcome == "ok"
            and lines[-1:] != [["end"]]
        ):
            found.append("it ended before its end")
    if attack.row and answer["reward"] != 0.0 and not answer["error"]:
        found.append(f"the reward is {answer['reward']}, expected 0")
    for name, most in (("during", DURING_MB), ("after", AFTER_MB)):
        if answer["held_mb"].get(name, 0) > most:
            found.append(
                f"the host held {answer['held_mb'][name]} MB {name} the run, expected at most {most}"
            )
    return found


def _pairs() -> list[Any]:
    """Every attack for every column; where programs become nobody, those for which it matters who they are."""
    by_user = {"files", "other processes", "staying alive", "the kernel"}

    def is_quick(column: Column, attack: Attack) -> bool:
        return column == QUICK[0] or (column in QUICK and attack.target in by_user)

    return [
        pytest.param(
            column,
            attack,
            id=f"{column}-{attack.name}",
            marks=() if is_quick(column, attack) else pytest.mark.slow,
        )
        for column in COLUMNS
        for attack in ATTACKS
        if column.user != "root-becomes-nobody" or attack.target in by_user
    ]


@pytest.mark.parametrize(("column", "attack"), _pairs())
def test_an_attack_does_not_get_through(column: Column, attack: Attack) -> None:
    answer = runner_of(column).ask({"run": attack.name})
    assert violations(attack, column.mechanism, answer) == [], (
        f"{attack.must.value}: {answer['rans']}"
    )


@pytest.mark.parametrize("column", BY_COLUMN)
def test_honest_programs_run_beside_attacks(column: Column) -> None:
    answer = runner_of(column).ask({"beside": BESIDE})
    assert answer["honest"]
    assert [it for it in answer["honest"] if it != ["42\n", "", "ok"]] == []
    assert answer["changes"] == []


@pytest.mark.parametrize("column", BY_COLUMN)
def test_nothing_is_alive_a_second_after_the_host_is_killed(column: Column) -> None:
    answer = runner_of(column).ask({"kill": STAYING})
    assert answer["alive"] == []
    assert len(answer["running"]) >= 3  # the others had ended by themselves


@pytest.mark.parametrize("column", BY_COLUMN)
def test_nothing_is_left_when_the_sandbox_is_closed(column: Column) -> None:
    assert runner_of(column).ask({"end": True})["left"] == []


def test_the_table_is_as_large_as_it_is_said_to_be() -> None:
    assert len(ATTACKS) >= 110
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)


@pytest.mark.slow
def test_without_a_wall_the_table_finds_what_gets_through() -> None:
    runner = Runner(Column(NO_WALL, "root"))
    try:
        runner.ask(None)
        for name, part in HARMLESS.items():
            (attack,) = (attack for attack in ATTACKS if attack.name == name)
            found = violations(attack, NO_WALL, runner.ask({"run": name}))
            assert any(part in it for it in found), (name, found)
    finally:
        runner.close()
