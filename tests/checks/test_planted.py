"""Each planted fault makes exactly its own check fail, and its innocent twin none; each check catches some fault.

A fault and its twin are first examined by the fault's own check alone, which is quick, then by every check.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tests.checks.planting import FAULTS, Fault, Place

from taut.checks import CHECKS, Part
from taut.checks.examine import Examination, examine
from taut.checks.registry import Finding
from taut.checks.session import Session

for _path in sorted((Path(__file__).parent / "faults").glob("*.py")):
    import_module(f"tests.checks.faults.{_path.stem}")


EXAMINED: dict[tuple[str, str, str], Examination] = {}
"""By part, settings and files: twins of several faults are one and the same run, which is examined once."""


def examined(session: Session, part: Part, place: Place) -> Examination:
    """What every check says of a twin. Only one that is nothing but its settings and files is not examined again."""
    is_plain = vars(session) == vars(Session(session.run, session.ranks))
    if place.patch._setattr or place.patch._setitem or not is_plain:
        return examine(session, part)
    directory, files = str(place.directory), hashlib.sha256()
    for path in sorted(place.directory.rglob("*")):
        held = path.read_bytes() if path.is_file() else b""
        files.update(repr((path.relative_to(directory), held)).replace(directory, "").encode())
    key = (part, repr(session.run).replace(directory, ""), files.hexdigest())
    if key not in EXAMINED:
        EXAMINED[key] = examine(session, part)
    return EXAMINED[key]


def findings(examination: Examination, outcome: str) -> list[str]:
    """The checks that fail; with outcome warning, those that warn."""
    return [one.name for one in examination.results if one.finding.outcome == outcome]


def told(examination: Examination) -> str:
    found = (*examination.failures, *examination.warnings)
    return "\n".join(f"{one.name}: {one.finding}" for one in found)


def finding_of(examination: Examination, check: str) -> Finding:
    return next(one.finding for one in examination.results if one.name == check)


@pytest.mark.parametrize(
    "fault",
    {fault.check: fault for fault in reversed(FAULTS)}.values(),
    ids=lambda fault: fault.name,
)
def test_a_planted_fault_makes_its_own_check_fail(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of each check; the slow tests ask every check of each fault, its own among them."""
    session = fault.plant(Place(tmp_path, monkeypatch), True)
    finding = finding_of(examine(session, fault.part, only={fault.check}), fault.check)
    assert finding.outcome == fault.outcome, finding
    assert finding.remedy
    assert fault.says in " ".join((finding.says, *finding.evidence, finding.remedy)), finding


@pytest.mark.parametrize(
    "fault", {fault.check: fault for fault in FAULTS}.values(), ids=lambda fault: fault.name
)
def test_the_innocent_twin_of_a_fault_passes_its_check(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one fault of each check; the slow tests ask every check of each twin."""
    session = fault.plant(Place(tmp_path, monkeypatch), False)
    finding = finding_of(examine(session, fault.part, only={fault.check}), fault.check)
    assert finding.outcome == "passed", finding


CROSSED = ("data", "template", "attention", "loss", "stop", "rollout")
"""The groups of whose first fault ``make test`` asks every check, which takes a second or more."""


def first_faults() -> list[Fault]:
    return [
        next(fault for fault in FAULTS if fault.check.startswith(f"{group}.")) for group in CROSSED
    ]


def asked_of_every_check(quick: Collection[Fault]) -> list[Any]:
    return [
        pytest.param(fault, id=fault.name, marks=() if fault in quick else pytest.mark.slow)
        for fault in FAULTS
    ]


@pytest.mark.parametrize("fault", asked_of_every_check(first_faults()))
def test_a_planted_fault_makes_its_own_check_fail_and_no_other(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = examine(fault.plant(Place(tmp_path, monkeypatch), True), fault.part)
    assert findings(found, fault.outcome) == [fault.check], told(found)
    assert fault.outcome == "failed" or not found.failures, told(found)
    finding = finding_of(found, fault.check)
    assert finding.remedy
    assert fault.says in " ".join((finding.says, *finding.evidence, finding.remedy)), finding


@pytest.mark.parametrize("fault", asked_of_every_check(first_faults()[:2]))
def test_the_innocent_twin_of_a_fault_passes_every_check(fault: Fault, tmp_path: Path) -> None:
    part = CHECKS[fault.check].part  # test_sound_runs.py asks the full part of sound runs
    with pytest.MonkeyPatch.context() as patch:
        place = Place(tmp_path, patch)
        found = examined(fault.plant(place, False), part, place)
    assert not found.failures, told(found)
    assert fault.outcome == "failed" or not found.warnings, told(found)
    finding = finding_of(found, fault.check)
    assert finding.outcome == "passed", finding


def test_each_check_catches_a_fault() -> None:
    assert {fault.check for fault in FAULTS} == set(CHECKS)


def test_no_fault_is_counted_twice() -> None:
    assert not [
        name for name, times in Counter(fault.name for fault in FAULTS).items() if times > 1
    ]
    assert all(fault.plant.__doc__ for fault in FAULTS)
