"""The worked example of docs/failures.md prints what the page says."""

from __future__ import annotations

import doctest

from tests.docs.pages import ROOT


def test_the_worked_example_prints_what_it_says() -> None:
    page = ROOT / "docs" / "failures.md"
    failed, run = doctest.testfile(str(page), module_relative=False, encoding="utf-8")
    assert run > 20, "the page has an example"
    assert failed == 0
