"""Each planted fault makes exactly its own check fail, and its innocent twin none; each check catches some fault."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
from tests.checks.planting import FAULTS, Fault, Place

from taut.checks import CHECKS
from taut.checks.examine import Examination, examine

for _path in sorted((Path(__file__).parent / "faults").glob("*.py")):
    import_module(f"tests.checks.faults.{_path.stem}")


def told(examination: Examination) -> str:
    return "\n".join(f"{one.name}: {one.finding}" for one in examination.failures)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_makes_its_own_check_fail_and_no_other(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = examine(fault.plant(Place(tmp_path, monkeypatch), True), fault.part)
    assert [one.name for one in found.failures] == [fault.check], told(found)
    finding = found.failures[0].finding
    assert finding.remedy
    assert fault.says in " ".join((finding.says, *finding.evidence, finding.remedy)), finding


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_innocent_twin_of_a_fault_passes(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = CHECKS[fault.check].part  # test_honest.py asks the full part of sound runs
    found = examine(fault.plant(Place(tmp_path, monkeypatch), False), part)
    assert not found.failures, told(found)
    answers = {one.name: one.finding for one in found.answered}
    assert answers[fault.check].outcome == "passed", answers[fault.check]


def test_each_check_catches_a_fault() -> None:
    assert {fault.check for fault in FAULTS} == set(CHECKS)


def test_no_fault_is_counted_twice() -> None:
    assert not [
        name for name, times in Counter(fault.name for fault in FAULTS).items() if times > 1
    ]
    assert all(fault.plant.__doc__ for fault in FAULTS)
