"""Which cases ``make test`` leaves out because they take long (tests/helpers/quick.py)."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.helpers import quick

ROOT = Path(__file__).parents[2]
pytest_plugins = ("pytester",)


def line(seconds: float, name: str) -> list[str]:
    return [f"{seconds:.2f}s call     tests/{name}", f"[gw0] [ 1%] PASSED tests/{name} "]


def test_long_functions_are_left_out_and_of_many_cases_the_first_stay() -> None:
    lines = [
        *line(1.5 * quick.LONG, "a.py::test_long"),
        *line(0.05 * quick.LONG, "a.py::test_short"),
        *(text for n in range(10) for text in line(quick.LONG / 4, f"a.py::test_many[{n}]")),
        *(text for n in range(3) for text in line(quick.LONGEST - 1, f"b.py::test_only[{n}]")),
        *(text for n in range(20) for text in line(0.1, f"a.py::test_brief[{n}]")),
        *line(quick.LONGEST + 1, "c.py::test_only"),
        *line(quick.LONGEST - 1, "docs/d.py::test_page"),
        f"{2 * quick.LONG:.2f}s setup    tests/e.py::test_waits",
        *line(0, "e.py::test_waits"),
        *line(0, "e.py::test_short"),
    ]
    assert quick.quick_cases(lines) == {
        "tests/a.py::test_long": 0,
        "tests/a.py::test_many": 2,
        "tests/b.py::test_only": 1,
        "tests/c.py::test_only": 0,
        "tests/e.py::test_waits": 0,
    }


def test_every_name_of_the_record_is_a_test() -> None:
    for name in quick.recorded():
        file, *path = name.split("::")
        body = names_of(file)
        for part in path:
            assert part in body, (
                f"{name}: there is no such test; python -m tests.helpers.quick writes the record"
            )
            body = body[part]


@cache
def names_of(file: str) -> dict[str, Any]:
    """The functions and classes of a file, and those of each class."""
    found: dict[str, Any] = {}
    text = (ROOT / file).read_text(encoding="utf-8")
    for name, inner in re.findall(r"^(?:def|class) (\w+)|^    def (\w+)", text, re.MULTILINE):
        if name:
            found[name] = last = {}
        elif found:
            last[inner] = {}
    return found


def test_the_cases_after_those_that_stay_are_slow(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick, "recorded", lambda: {"test_it.py::test_it": 1})
    pytester.makeconftest("from tests.helpers.quick import mark_slow as pytest_itemcollected")
    pytester.makeini("[pytest]\nmarkers = slow: takes long")
    pytester.makepyfile(
        test_it="import pytest\n@pytest.mark.parametrize('n', range(3))\ndef test_it(n): pass"
    )
    pytester.inline_run("-m", "not slow", "-p", "no:randomly").assertoutcome(passed=1)


def test_cases_stay_that_are_asked_for_all_the_same(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = {f"test_it.py::test_{name}": 0 for name in "ab"}
    monkeypatch.setattr(quick, "recorded", lambda: record)
    pytester.makeconftest(
        "from tests.conftest import pytest_addoption, pytest_itemcollected, pytest_pycollect_makeitem"
    )
    pytester.makeini("[pytest]\nmarkers = slow: takes long")
    pytester.makepyfile(
        test_it="import pytest\npytestmark = pytest.mark.parametrize('n', range(3))\n"
        "def test_a(n): pass\ndef test_b(n): pass"
    )
    for words, passed in (
        ([], 0),
        (["--min-cases=1"], 2),
        (["--min-cases=1", "--all-cases-of=test_it.py::test_b"], 4),
        (["--all-cases"], 6),
    ):
        pytester.inline_run("-m", "not slow", *words).assertoutcome(passed=passed)


def test_what_is_not_asked_for_is_neither_imported_nor_made(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick, "recorded", lambda: {"test_it.py::TestIt::test_long": 0})
    hooks = "pytest_addoption, pytest_ignore_collect, pytest_pycollect_makeitem"
    pytester.makeconftest(f"from tests.conftest import {hooks}")
    pytester.makeini("[pytest]\nmarkers = slow: takes long")
    pytester.makepyfile(
        test_file="import pytest\npytestmark = pytest.mark.slow\n1 / 0",
        test_it="import pytest\n@pytest.mark.slow\ndef test_marked(): pass\n"
        "class TestIt:\n    def test_long(self): pass\n    def test_short(self): pass",
    )
    run = pytester.inline_run("-m", "not slow")
    run.assertoutcome(passed=1)
    assert not run.getcalls("pytest_deselected")
    pytester.inline_run("test_it.py", "-m", "slow").assertoutcome(passed=1)
    pytester.inline_run("test_it.py", "-m", "not slow", "--all-cases").assertoutcome(passed=2)
