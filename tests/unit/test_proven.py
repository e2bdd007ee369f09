"""Which slow tests run first where not all can (tests/helpers/proven.py)."""

from __future__ import annotations

import tomllib

import pytest
from tests.helpers import proven


def test_a_test_that_imports_what_changed_comes_before_one_that_is_further_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imports = {"near.py": {"changed.py"}, "far.py": {"near.py"}, "apart.py": {"other.py"}}
    monkeypatch.setattr(proven, "uses", lambda path: imports.get(path, set()))
    monkeypatch.setattr(proven, "changed", lambda: {"changed.py"})
    monkeypatch.setattr(proven, "distance", proven.distance.__wrapped__)
    tests = ["apart.py", "far.py", "near.py", "changed.py"]
    assert sorted(tests, key=proven.distance) == ["changed.py", "near.py", "far.py", "apart.py"]


def test_of_the_project_all_counts_but_linters_and_the_budget() -> None:
    text = (proven.ROOT / "pyproject.toml").read_bytes()
    whole, left = (tomllib.loads(it.decode()) for it in (text, proven.UNREAD.sub(b"", text)))
    for name in ("importlinter", "mypy", "ruff"):
        del whole["tool"][name]
    del whole["tool"]["taut"]["budget"]
    assert left == {**whole, "tool": {k: v for k, v in whole["tool"].items() if v}}
