"""An oracle is worth something if it owes taut nothing and can be read in one go."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "flat"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_it_imports_nothing_of_taut_and_fits_in_200_lines(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    names = {
        alias.name if isinstance(node, ast.Import) else str(node.module)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not any(name.split(".")[0] == "taut" for name in names)
    assert len(text.splitlines()) <= 200
