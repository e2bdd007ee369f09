"""What other verifiers expect of their own tests' pairs, and what ``math`` says of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.real.verifier_cases import PAGE, RIGHT, differing, download, page, pairs

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture(scope="module")
def path() -> Path:
    found = download()
    if found is None:
        pytest.skip("no package index has math-verify's source distribution")
    return found


def test_math_agrees_with_math_verify_s_tests_but_where_they_are_wrong(path: Path) -> None:
    cases = list(pairs(path))
    assert len(cases) == 269
    assert {case.answer for case in differing(cases)} == set(RIGHT)


def test_so_it_does_where_references_are_bare(path: Path) -> None:
    """Data sets have references without the dollar signs of the tests."""
    cases = [
        case._replace(gold=case.gold[1:-1])
        if case.gold.strip("$").count("$") == 0 and case.gold[:1] == "$"
        else case
        for case in pairs(path)
    ]
    assert {case.answer for case in differing(cases)} == set(RIGHT)


def test_the_table_is_current(path: Path) -> None:
    assert PAGE.read_text(encoding="utf-8") == page(path), "run python tests/real/verifier_cases.py"
