"""The tables about chat templates in docs/models.md, written by tests/real/table.py from what ran, are well-formed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = (
    "<!-- chat templates: written by tests/real/table.py -->\n",
    "<!-- end of chat templates -->\n",
)


def table(first: str) -> list[list[str]]:
    """The cells of the table whose head begins with ``first``, without head and rule."""
    text = PAGE.read_text("utf-8")
    section = text[text.index(BEGIN) : text.index(END)]
    at = section.index(f"\n| {first} |") + 1
    lines = section[at:].partition("\n\n")[0].splitlines()
    cells = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in lines
        if line[0] == "|"
    ]
    assert all(len(row) == len(cells[0]) for row in cells)
    assert set(cells[1]) == {"---"}
    return cells[2:]


def test_what_templates_take_is_counted() -> None:
    rows = table("templates")
    assert {"TRL 1.16", "Axolotl 0.21"} <= {row[0] for row in rows}
    for _, number, plain, thoughts, *_ in rows:
        for cell in (plain, thoughts):
            taken, _, of = cell.partition(" of ")
            assert int(taken) <= int(of) <= int(number)


def test_what_is_refused_adds_up() -> None:
    assert sum(int(row[-1]) for row in table("refused")) == sum(
        int(row[5]) for row in table("templates")
    )


@pytest.mark.parametrize("number", [3, 4, 5, 6, 7, 8])
def test_turns_of_renderers_are_counted(number: int) -> None:
    rows = table("renderer")
    assert {row[0].split()[0] for row in rows} >= {"renderers", "tinker"}
    for row in rows:
        assert int(row[number]) <= int(row[2]) == sum(map(int, row[3:9]))
