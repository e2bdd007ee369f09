"""The tests of math-verify as cases for the reward ``math``: ``python tests/real/verifier_cases.py`` writes the table
of docs/rewards.md. The source distribution is downloaded once into the cache; pairs are read from its files' syntax,
and nothing of it is imported or copied.
"""

from __future__ import annotations

import ast
import math
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from taut.data.store.cache import default_directory
from taut.rewards import RewardInput
from taut.rewards.maths import Math
from taut.rewards.worker import judged

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"
TABLE = "| source | pairs | agree | differ, and who is right |\n|---|---|---|---|\n"
"""Where the table begins in the page; it ends with an empty line."""
PACKAGE, VERSION = "math-verify", "0.9.0"
NAMES = (
    ("gold", "pred", "expected"),
    ("gold", "pred", "result"),
    ("gold", "pred", "expected", "precision"),
)
"""Parameters of the tests that are pairs. Others try options of the library that ``math`` does not have."""
RIGHT = {
    "Answer $ \n 9 \n $": "taut: in LaTeX a line break is a space, and the answer is 9 (2 pairs)",
    "Answer \\( \n 9 \n \\)": "",
    "$1 + \\frac{1}{\\mathrm{e}}$": "taut: 1 + 1/e is not 1 - 1/e; the library reads both as 1",
}
"""The answers of pairs that differ -> who is right; empty: said with another."""


class Pair(NamedTuple):
    gold: str
    answer: str
    expected: int
    digits: int


def download() -> Path | None:
    """The source distribution in the cache; None: there is no index that has it."""
    folder = default_directory() / "sdists"
    path = folder / f"{PACKAGE.replace('-', '_')}-{VERSION}.tar.gz"
    if not path.exists():
        options = ["--no-deps", "--no-binary", PACKAGE, "--dest", str(folder)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", *options]
        subprocess.run([*command, f"{PACKAGE}=={VERSION}"], check=False, timeout=600)
    return path if path.exists() else None


def pairs(path: Path) -> Iterator[Pair]:
    """Of all parametrized tests in a source distribution."""
    with tarfile.open(path) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            file = archive.extractfile(member) if "/tests/" in member.name else None
            if file is not None and member.name.endswith(".py"):
                yield from _pairs(ast.parse(file.read()))


def _pairs(tree: ast.AST) -> Iterator[Pair]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.parametrize":
            names = tuple(name.strip() for name in ast.literal_eval(node.args[0]).split(","))
            if names in NAMES:
                for row in _list(node.args[1]):
                    yield Pair(*row[:3], *(row[3:] or [6]))


def _list(node: ast.expr) -> list[list[Any]]:
    assert isinstance(node, ast.List)
    return [[_value(item) for item in row.elts] for row in node.elts if isinstance(row, ast.Tuple)]


def _value(node: ast.expr) -> Any:
    """A literal, or the one f-string that they have: the root of 17 with 15 digits, and its formula."""
    if not isinstance(node, ast.JoinedStr):
        return ast.literal_eval(node)
    return "$\\sqrt{17}$" if len(node.values) == 1 else f"{math.sqrt(17):.15f}"


def differing(cases: list[Pair]) -> list[Pair]:
    """The pairs on which taut says something else."""
    found = []
    for case in cases:
        answered = RewardInput(text=case.answer, references=(case.gold,))
        if judged("math", Math(digits=case.digits), answered).value != case.expected:
            found.append(case)
    return found


def table(path: Path) -> str:
    """The rows of the table."""
    cases = list(pairs(path))
    wrong = differing(cases)
    said = "; ".join(filter(None, (RIGHT.get(case.answer, "?") for case in wrong)))
    return f"| {PACKAGE} {VERSION} | {len(cases)} | {len(cases) - len(wrong)} | {len(wrong)}: {said} |\n"


def page(path: Path) -> str:
    """docs/rewards.md with the table made anew."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(TABLE)
    return before + TABLE + table(path) + rest[rest.index("\n") + 1 :]


if __name__ == "__main__":
    found = download()
    assert found is not None, "no package index has the source distribution"
    PAGE.write_text(page(found), encoding="utf-8")
