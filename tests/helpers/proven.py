"""Which slow tests have to run again: ``python -m pytest -p tests.helpers.proven -m slow [--unproven] [--minutes N]``.

A run records in proven.json, for each file of which every slow test passed, a digest of all that they depend on: the
files of src and tests that it imports, and those import in turn, wherever an import stands, which of its cases are
slow (tests/helpers/quick.py), the versions in constraints.txt, pyproject.toml without the settings of linters and the
budget, and what lies beside the code (tables, templates, pages). A module that is named in a text counts as imported,
as the commands are; a test that starts ``taut`` depends on all commands. With ``--unproven``, files with the recorded
digest are left out; after ``--minutes``, the tests that are left are skipped, and their files named.
``.ci/run`` asks for both, and ``make test-slow`` runs all.

With ``--minutes``, those files come first that are fewest imports away from a file which differs from the commit of the
record: they are the likeliest to fail.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.helpers import quick

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("proven.json")
ALWAYS = ("constraints.txt", "pyproject.toml", "tests/conftest.py")
UNREAD = re.compile(
    rb"^\[\[?tool\.(?:importlinter|mypy|ruff|taut\.budget)\b.*?(?=^\[|\Z)", re.DOTALL | re.MULTILINE
)
"""Tables of pyproject.toml on which no slow test depends; most commits change the budget."""
FOLDERS = ("benchmarks", "docs", "examples", "src")
"""What a test may read without importing it: its name in a text stands for all that is in it."""
TIME_IS_UP = "the minutes that were given are over; make test-slow runs it"
MODULE = re.compile(r"\b(?:taut|taut_tools|tests|benchmarks)(?:\.\w+)+\b|\btaut\b")
PLUGINS = "src/taut/io/plugins.py"
"""What packages add is imported there, by entry points that pyproject.toml names."""


@cache
def sources(folder: str) -> tuple[str, ...]:
    """The files of a folder, as paths from the root."""
    return tuple(
        sorted(
            str(path.relative_to(ROOT))
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts and ".egg-info" not in str(path)
        )
    )


@cache
def beside(package: str) -> tuple[str, ...]:
    """The files of a package's folder that are no code: tables, templates, scripts of a page."""
    return tuple(path for path in sources(package) if not path.endswith(".py"))


@cache
def file_of(module: str) -> str | None:
    """The file of a module, as a path from the root."""
    base = ("src/" if module.startswith("taut") else "") + module.replace(".", "/")
    names = (f"{base}.py", f"{base}/__init__.py", *([f"{base}/__main__.py"] * (module == "taut")))
    return next((name for name in reversed(names) if (ROOT / name).is_file()), None)


def _named(node: ast.AST) -> Iterator[str]:
    """The modules that a piece of code names, and attributes of modules."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from MODULE.findall(node.value)


@cache
def uses(path: str) -> frozenset[str]:
    """The files that a file names."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    doc = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    found = set[str]()
    for node in ast.walk(tree):
        if id(node) in doc:
            continue
        for name in _named(node):
            parts = name.split(".")
            if parts == ["taut"] and path.startswith("src/"):
                continue  # the name of the distribution
            for stop in range(1, len(parts) + 1):
                file = file_of(".".join(parts[:stop]))
                if file is not None and (stop > 1 or len(parts) == 1):
                    found.add(file)
        if path.startswith("tests/") and isinstance(node, ast.Constant):
            for folder in FOLDERS:
                if node.value == folder or str(node.value).startswith(f"{folder}/"):
                    found.update(sources(folder))
    if path.startswith("src/"):
        found.update(beside(str(Path(path).parent)))
    if path == PLUGINS:
        named = MODULE.findall((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        found.update(filter(None, map(file_of, named)))
    return frozenset(found)


@cache
def content(path: str) -> bytes:
    found = (ROOT / path).read_bytes()
    return hashlib.sha256(UNREAD.sub(b"", found) if path == "pyproject.toml" else found).digest()


def depends_on(test: str) -> list[str]:
    """All files that a test file depends on, itself included, as paths from the root."""
    found, new = set[str](), {test, *ALWAYS}
    while new:
        found |= new
        new = {user for path in new if path.endswith(".py") for user in uses(path)} - found
    return sorted(found)


def digest(test: str) -> str:
    whole = hashlib.sha256()
    for path in depends_on(test):
        whole.update(path.encode() + b"\0" + content(path))
    long = {name: kept for name, kept in quick.recorded().items() if name.startswith(f"{test}::")}
    whole.update(json.dumps(long).encode())
    return whole.hexdigest()[:16]


@cache
def changed() -> frozenset[str]:
    """The files that differ from the commit which last changed the record; none where git does not know one."""

    def git(*words: str) -> list[str]:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split(
            "\n"
        )

    commit = git("log", "-1", "--format=%H", "--", str(RECORD))[0]
    return frozenset(git("diff", "--name-only", commit) if commit else ()) - {""}


@cache
def distance(test: str) -> int:
    """How many imports lead from a test file to the nearest file that changed."""
    found, new, steps = set[str](), {test}, 0
    while new and not new & changed():
        found |= new
        new = {user for path in new if path.endswith(".py") for user in uses(path)} - found
        steps += 1
    return steps if new else sys.maxsize


def recorded() -> dict[str, str]:
    found: dict[str, str] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return found


@cache
def proven() -> frozenset[str]:
    """The files whose slow tests passed on the sources that are there now."""
    there = (file for file in recorded().items() if (ROOT / file[0]).exists())
    return frozenset(file for file, known in there if digest(file) == known)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--unproven", action="store_true", help="leave out what proven.json has")
    parser.addoption("--minutes", type=float, help="skip what does not begin within them")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Session(config), "proven-session")


class Session:
    """What one run proves. With several workers, they collect, and the process that started them counts."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.expected: dict[str, int] = {}
        self.passed: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.late: Counter[str] = Counter()
        self.began = time.monotonic()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        files = [item for item in items if item.get_closest_marker("slow")]
        if self.config.getoption("--unproven"):
            old = proven()
            out = [item for item in files if _file(item) in old]
            self.config.hook.pytest_deselected(items=out)
            items[:] = [item for item in items if item not in set(out)]
        if self.config.getoption("--minutes") is not None:
            items.sort(key=lambda item: distance(_file(item)))
        others = ("real", "cluster", "page")
        self.expected = Counter(
            _file(item) for item in files if not any(map(item.get_closest_marker, others))
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        minutes = self.config.getoption("--minutes")
        if minutes is not None and time.monotonic() - self.began > 60 * minutes:
            pytest.skip(TIME_IS_UP)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        if report.skipped and TIME_IS_UP in str(report.longrepr):
            self.late[file] += 1
        elif report.failed:
            self.failed[file] += 1
        elif report.when == "call" or report.skipped:
            self.passed[file] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.config.getoption("--unproven"):
            terminalreporter.line(f"passed on the same sources before: {len(proven())} files")
        if self.late:
            late = ", ".join(f"{file} ({number})" for file, number in sorted(self.late.items()))
            terminalreporter.line(f"not run for want of time: {late}")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.expected = getattr(node, "workeroutput", {}).get("expected", self.expected)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["expected"] = dict(self.expected)
            return
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and proven():
            session.exitstatus = pytest.ExitCode.OK
        known = recorded()
        for file in {*self.passed, *self.failed}:
            known.pop(file, None)
            if not self.failed[file] and self.passed[file] == self.expected.get(file):
                known[file] = digest(file)
        files = {file: known[file] for file in sorted(known) if (ROOT / file).exists()}
        RECORD.write_text(json.dumps(files, indent=0) + "\n", encoding="utf-8")


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def main(tests: Sequence[str]) -> None:
    """Print what test files depend on: ``python -m tests.helpers.proven FILE ...``."""
    for test in tests:
        print(*depends_on(test), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
