"""docs/security.md: every line of its tables names a test that is there, and nothing is claimed outside of them."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text()
ROWS = re.findall(r"^\| (?!what \|)(?!-)(.+) \| (.+) \|$", PAGE, re.MULTILINE)
OUTSIDE = {
    "# Security": "This page says what holds then.",
    "### Programs that a model wrote": "`taut sandbox` tries the first lines on your machine.",
    "## How to report a hole": "Write to the maintainers in private",
}
"""The headings under which there is text, and how it begins or what it says."""


@cache
def defined(path: Path) -> set[str]:
    """Functions and ``Class.method`` of a file."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = [it.name for it in node.body if isinstance(it, ast.FunctionDef)]
            found |= {f"{node.name}.{name}" for name in methods}
    return found


@pytest.mark.parametrize(("claim", "tests"), ROWS, ids=[claim[:60] for claim, _ in ROWS])
def test_a_claim_has_its_tests(claim: str, tests: str) -> None:
    for named in tests.split("<br>"):
        path, _, name = named.strip("`").partition("::")
        assert name in defined(ROOT / "tests" / path), named


def test_nothing_is_claimed_outside_of_the_tables() -> None:
    heading = ""
    text: dict[str, str] = {}
    for line in PAGE.splitlines():
        if line.startswith("#"):
            heading = line
        elif line and not line.startswith("|"):
            text[heading] = f"{text.get(heading, '')} {line}"
    assert text.keys() == OUTSIDE.keys()
    for heading, part in OUTSIDE.items():
        assert part in text[heading]
    assert len(ROWS) > 40
