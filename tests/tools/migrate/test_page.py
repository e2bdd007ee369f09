"""docs/recipes.md is the table of traps and the table of options."""

from __future__ import annotations

from tests.tools.migrate.page import PAGE, page


def test_the_page_is_current() -> None:
    told = "docs/recipes.md is out of date; run: python -m tests.tools.migrate.page"
    assert PAGE.read_text(encoding="utf-8") == page(), told
