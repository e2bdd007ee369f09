"""The size of each room is bounded in pyproject.toml: ``python tests/docs/test_budget.py`` writes what is there now.

Code is what is neither blank nor a comment nor a docstring: a sentence that explains costs nothing.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "pyproject.toml"
PACKAGES = ("taut", "taut_tools")
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """The lines of a file that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def sizes(package: str) -> dict[str, tuple[int, int]]:
    """Lines of code and files of each room: a folder or a module directly in the package."""
    found: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    folder = ROOT / "src" / package
    for path in sorted(folder.rglob("*.py")):
        room = path.relative_to(folder).parts[0].removesuffix(".py")
        lines, files = found[room]
        found[room] = lines + code_lines(path.read_text(encoding="utf-8")), files + 1
    return dict(sorted(found.items()))


def write() -> None:
    """Make the budget what is there."""
    text = PROJECT.read_text(encoding="utf-8")
    for package in PACKAGES:
        rows = "".join(
            f"{room} = [{lines}, {files}]\n" for room, (lines, files) in sizes(package).items()
        )
        table = re.escape(f"[tool.taut.budget.{package}]\n")
        text = re.sub(rf"(?<={table})(\w+ = .*\n)*", rows, text)
    PROJECT.write_text(text, encoding="utf-8")


def test_what_counts_as_code() -> None:
    source = (
        '"""Doc."""\n\n# why\nX = 1  # one\n"""Of X."""\nY = (\n    2,\n\n)\nZ = """a\n\nb"""\n'
    )
    assert code_lines(source) == 1 + 3 + 3


@pytest.mark.parametrize("package", PACKAGES)
def test_each_room_keeps_its_budget(package: str) -> None:
    """Over it, something leaves, or the commit that raises a number says what another lost (CONTRIBUTING.md)."""
    budget = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["tool"]["taut"]["budget"]
    budget, found = budget[package], sizes(package)
    assert budget.keys() == found.keys()
    over = {
        room: f"{lines} lines of code in {files} files; budget {budget[room]}"
        for room, (lines, files) in found.items()
        if lines > budget[room][0] or files > budget[room][1]
    }
    assert not over


if __name__ == "__main__":
    write()
