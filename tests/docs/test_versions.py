"""The tables of versions in docs/install.md are about the ranges of pyproject.toml and the capabilities there are."""

from __future__ import annotations

from packaging.version import Version
from tests.versions.run import BEGIN, CHOSEN, END, LEFT_OUT, NEEDING, PAGE, ROOT, SHOWN, bounds

from taut.io.capabilities import CAPABILITIES
from taut.io.extras import NEWEST

TEXT = PAGE.read_text(encoding="utf-8")


def test_what_was_tested_are_the_ends_of_the_range() -> None:
    """Where one of them moves: make test-versions."""
    rows = TEXT.split(BEGIN)[1].split(END)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if row[:1] == "|"]
    assert {end for _, end, *_ in cells} == {"oldest", "newest"}
    allowed = dict(bounds())
    for _, end, *rest in cells:
        found = dict(zip(SHOWN, rest, strict=False))
        if end == "oldest":
            for name in SHOWN:
                assert Version(found[name]) == Version(allowed[name])
        else:
            for name, newest in NEWEST.items():
                assert Version(found[name]).release[:2] == Version(newest).release


def test_every_capability_is_listed_with_its_version() -> None:
    for name, (library, since, _) in CAPABILITIES.items():
        (row,) = [line for line in TEXT.splitlines() if line.startswith(f"| {name}")]
        assert row.split(" | ")[1] == f"{library} {since}"
    assert NEEDING.keys() <= CAPABILITIES.keys()


def test_the_chosen_tests_are_there() -> None:
    """pytest runs none of its list where one is missing."""
    for chosen in (*CHOSEN, LEFT_OUT, *(one for some in NEEDING.values() for one in some)):
        path, _, function = chosen.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not function or f"def {function.partition('[')[0]}(" in text, chosen
