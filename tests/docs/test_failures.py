"""docs/failures.md keeps to the code: every failure has its row, and what a row names is there."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.docs.pages import ROOT

from taut.checks import CHECKS

PAGE = ROOT / "docs" / "failures.md"
IDS = [*(f"F{number}" for number in range(1, 6)), *map(str, range(1, 41))]
STATUSES = ("impossible", "refused", "checked", "not yet")
SETTLED = 44
"""At least so many rows are more than "not yet"."""
ROW = re.compile(r"^\| (F?\d+) \|(.*)\|$", re.MULTILINE)
SUMMARY = re.compile(
    r"Of the (\d+) rows, (\d+) are impossible, (\d+) refused, (\d+) checked and (\d+) not yet\."
)


class Row(NamedTuple):
    """A failure, what taut does about it, and what is named for it."""

    id: str
    status: str
    says: str
    code: list[str]
    tests: list[str]


def rows() -> list[Row]:
    found = []
    for name, rest in ROW.findall(PAGE.read_text()):
        wrong, status, says, code, tests = (cell.strip() for cell in rest.split("|"))
        assert wrong
        found.append(Row(name, status, says, *(_named(cell) for cell in (code, tests))))
    return found


def _named(cell: str) -> list[str]:
    """What stands in backticks, one a line; nothing else may."""
    parts = cell.split("<br>") if cell else []
    assert all(part.startswith("`") and part.endswith("`") for part in parts), cell
    return [part.strip("`") for part in parts]


ROWS = rows()
SETTLED_ROWS = [row for row in ROWS if row.status != "not yet"]


@cache
def defined(path: Path) -> set[str]:
    """Functions, classes and ``Class.method`` of a file."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [inner for inner in node.body if isinstance(inner, ast.FunctionDef)]
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


@cache
def planted() -> dict[str, str]:
    """``check: fault`` -> what the fault is, of every planted fault."""
    found = {}
    for path in sorted((ROOT / "tests/checks/faults").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "fault":
                    check = ast.literal_eval(mark.args[0])
                    found[f"{check}: {node.name}"] = ast.get_docstring(node) or ""
    return found


def has_code(reference: str) -> bool:
    """Whether ``path::name`` is a function, class or check in a file of src/taut."""
    name, _, part = reference.partition("::")
    path = ROOT / "src/taut" / name
    if not path.is_file():
        return False
    if part in CHECKS:
        return CHECKS[part].ask.__module__ == f"taut.{name.removesuffix('.py').replace('/', '.')}"
    return not part or part in defined(path)


def has_test(reference: str) -> bool:
    """Whether a test, or a planted fault, of that name exists."""
    if ": " in reference:
        return reference in planted()
    name, _, part = reference.partition("::")
    path = ROOT / "tests" / name
    return path.is_file() and part.startswith("test_") and part in defined(path)


def test_each_failure_has_one_row() -> None:
    assert Counter(row.id for row in ROWS) == Counter(IDS)
    assert {row.status for row in ROWS} == set(STATUSES)
    assert all(len(row.says) > 10 for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_what_a_row_names_is_there(row: Row) -> None:
    assert [name for name in row.code if not has_code(name)] == []
    assert [name for name in row.tests if not has_test(name)] == []


@pytest.mark.parametrize("row", SETTLED_ROWS, ids=lambda row: row.id)
def test_a_settled_row_names_its_code_and_its_proof(row: Row) -> None:
    assert row.tests
    assert any("::" in name for name in row.code)
    if row.status == "checked":
        assert any(name in planted() for name in row.tests), "no planted fault fails a check"


def test_most_are_settled() -> None:
    assert len(SETTLED_ROWS) >= SETTLED


def test_the_summary_counts_the_rows() -> None:
    told = SUMMARY.search(PAGE.read_text())
    assert told is not None
    counts = Counter(row.status for row in ROWS)
    wanted = [len(ROWS), *(counts[status] for status in STATUSES)]
    assert [int(number) for number in told.groups()] == wanted


def test_a_name_that_is_not_there_is_found() -> None:
    assert has_code("data/render/render.py::fit")
    assert not has_code("data/render/render.py::fits")
    assert has_test("unit/data/test_render_length.py::test_drop")
    assert not has_test("unit/data/test_render_length.py::test_dropped")
    assert not has_test("data.rows: a_fault_that_nobody_planted")
