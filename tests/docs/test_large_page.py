"""docs/large.md: its numbers are what ``taut plan`` prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.configurations import save_configuration

from taut.commands.plan import Plan, Way, plan
from taut.config import load

PAGE = (Path(__file__).parents[2] / "docs" / "large.md").read_text()
COMMON = re.search(r"each with\s+`([^`]+)`", PAGE)
ROWS = re.findall(r"^\| (\S+B) \| `([^`]+)` \| (.+) \|$", PAGE, re.MULTILINE)


def cells(way: Way) -> str:
    """A row's numbers, as the page has them."""
    size, seconds = way.footprint, way.seconds
    assert seconds is not None
    gib = [f"{n / 2**30:.1f}" for n in (size.loading, size.step, size.ending, size.saving)]
    return " | ".join(
        [*gib, f"{way.most_tokens:,}" if way.most_tokens else "-", f"{seconds.total:.2g}"]
    )


def row_of(name: str, keys: str, place: Path) -> str:
    assert COMMON is not None
    words = [f"model={save_configuration(name, place)}", "alternatives=false"]
    return cells(plan(load(Plan, None, [*words, *COMMON[1].split(), *keys.split()])).ways[0])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "keys", "numbers"), ROWS, ids=lambda text: text[:40])
def test_the_numbers_are_those_of_the_planner(
    name: str, keys: str, numbers: str, tmp_path: Path
) -> None:
    assert row_of(name, keys, tmp_path) == numbers


def test_all_four_sizes_are_there() -> None:
    assert {name for name, _, _ in ROWS} == {"0.5B", "8B", "32B", "70B"}
