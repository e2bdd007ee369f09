"""Every source of the table, compiled and run as the reward ``code`` does; and attacks of programs in Python, made by a
compiled program.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
from tests.attacks.host import SECRET
from tests.attacks.programs import ATTACKS, Attack
from tests.attacks.sources import SOURCES, Ends, Source
from tests.attacks.test_programs import QUICK, runner_of, violations

pytestmark = [
    pytest.mark.attack,
    pytest.mark.skipif(
        os.uname().machine != "x86_64", reason="the numbers of calls are those of x86-64"
    ),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]

COLUMN = QUICK[0]
BY_GUEST = {"the reward", "verdicts"}
"""Targets of attacks that are on the Python process itself, which a compiled program has left."""
SHOWS_ITSELF = "the environment, the arguments and the user"
"""The arguments of the Python that a compiled program becomes hold the attack's own text."""
COMPILED = [
    attack
    for attack in ATTACKS
    if attack.target not in BY_GUEST
    and attack.name != SHOWS_ITSELF
    and not attack.row
    and not attack.is_bare
    and all(trial.call == trial.check == "" for trial in attack.trials)
]
BRIEFLY = {"network", "other processes"}


def _is_quick(row: Source) -> bool:
    return row.ends is Ends.IN_A_REFUSAL or "@secret@" in row.name


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=() if _is_quick(row) else pytest.mark.slow)
        for row in SOURCES
    ],
)
def test_a_source_does_not_get_through(row: Source) -> None:
    answer = runner_of(COLUMN).ask({"source": row.name})
    assert _faults(row, answer) == [], f"{row.ends.value}: {answer}"


def _faults(row: Source, answer: dict[str, Any]) -> list[str]:
    found = [f"the sandbox failed: {answer['error']}"] if answer["error"] else []
    found += answer["changes"]
    if answer["after"] != ["42\n", "", "ok"]:
        found.append(f"the next program was not served: {answer['after']}")
    if answer["seconds"] > 45:
        found.append(f"it took {answer['seconds']:.1f} seconds")
    if row.ends is Ends.IN_NO_PROGRAM:
        if answer["uncompiled"] is None:
            found.append("it compiled")
        elif SECRET in answer["uncompiled"] or "root:" in answer["uncompiled"]:
            found.append("the reason holds what is the host's")
        return found
    if answer["uncompiled"] is not None:
        return [*found, answer["uncompiled"]]
    ((stdout, stderr, outcome, _, _),) = answer["rans"]
    lines = [line.split("\t") for line in stdout.splitlines()]
    found += [" ".join(line) for line in lines if line[0] == "through"]
    if outcome not in row.outcomes:
        found.append(f"the outcome is {outcome}: {stderr[-100:]}")
    if row.ends is Ends.IN_A_REFUSAL and lines[-1:] != [["end"]]:
        found.append("it ended before its end")
    return found


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(
            attack,
            id=attack.name,
            marks=() if attack.target in BRIEFLY else pytest.mark.slow,
        )
        for attack in COMPILED
    ],
)
def test_an_attack_of_a_compiled_program_does_not_get_through(attack: Attack) -> None:
    answer = runner_of(COLUMN).ask({"run": attack.name, "is_compiled": True})
    assert violations(attack, COLUMN.mechanism, answer) == [], (
        f"{attack.must.value}: {answer['rans']}"
    )


def test_the_tables_are_as_large_as_they_are_said_to_be() -> None:
    assert len(SOURCES) >= 50
    assert len({row.name for row in SOURCES}) == len(SOURCES)
    assert len(COMPILED) >= 70
