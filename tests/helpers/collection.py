"""Work of a process before its first test: it makes no case that is not asked for, nor bytecode that others make.

pytest applies ``-m "not slow and not real"`` to cases, after importing all files and making thousands of cases more.
Marked as a whole, these are left out before: a file by its ``pytestmark``, a function or class by its own markers, a
function by the record of tests/helpers/quick.py.
"""

from __future__ import annotations

import compileall
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from _pytest.assertion import rewrite
from tests.helpers.quick import num_quick

ROOT = Path(__file__).parents[2]
EXCLUDES = re.compile(r"not \w+( and not \w+)*")
FORKING = (
    "tests.helpers.forked_processes",
    "tests.helpers.killed_runs",
    "tests.helpers.rank_memory",
)
MARKS_OF_FILE = re.compile(r"^pytestmark = (\[[^\]]*\]|.*)$", re.MULTILINE)


def excluded(config: pytest.Config) -> frozenset[str]:
    """The markers that ``-m`` excludes, where it says nothing else and no test is named: a name that is not there would
    be an error.
    """
    asked: str = config.getoption("markexpr")
    can_leave_out = EXCLUDES.fullmatch(asked) and not any("::" in word for word in config.args)
    return frozenset(re.findall(r"not (\w+)", asked) if can_leave_out else ())


@cache
def marks_of_file(path: Path) -> frozenset[str]:
    """The markers of all tests of a file, without importing it."""
    found = MARKS_OF_FILE.search(path.read_text(encoding="utf-8"))
    return frozenset(re.findall(r"pytest\.mark\.(\w+)", found[1]) if found else ())


def is_left_out(config: pytest.Config, name: str, test: Any) -> bool:
    """Whether no case of a function or class is asked for. ``name``: its id."""
    out = excluded(config)
    marks: list[pytest.Mark] | pytest.MarkDecorator = getattr(test, "pytestmark", [])
    if any(mark.name in out for mark in (marks if isinstance(marks, list) else [marks.mark])):
        return True
    return "slow" in out and not config.getoption("--all-cases") and num_quick(config, name) == 0


@cache
def forks(module: ModuleType) -> bool:
    """Whether tests of a module start processes from the fork server (tests/helpers/forked_processes.py)."""
    return any(getattr(value, "__module__", None) in FORKING for value in vars(module).values())


def compile_share(config: pytest.Config, worker: Mapping[str, Any]) -> None:
    """Write the bytecode of every n-th file, where it is not there: of n workers, each would compile all at once.

    pytest's own functions write that of tests, whose asserts it rewrites; they have no public names.
    """
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    state = config.stash[rewrite.assertstate_key]
    files = sorted(path for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py"))
    for path in files[number::count]:
        if not path.name.startswith(("test_", "conftest")):
            compileall.compile_file(str(path), quiet=2)
            continue
        place = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(path, place) is None and rewrite.try_makedirs(place.parent):
            source_hash, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(state, code, source_hash, place)
