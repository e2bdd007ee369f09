"""Modules are imported without the garbage collector, which leaves alone afterwards what is there."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from taut.io.user_code import named

SOURCE = """
import gc
gets_collected = gc.isenabled()
kept = [[] for _ in range(1000)]
"""


@pytest.fixture(autouse=True)
def frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each time that all objects are frozen: how many times before. A module ``heavy``, and one that fails."""
    times: list[int] = []
    monkeypatch.setattr(gc, "freeze", lambda: times.append(len(times)))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "heavy.py").write_text(SOURCE)
    (tmp_path / "fails.py").write_text("raise ValueError('at import')")
    return times


def test_the_collector_rests_while_a_module_is_imported_and_once_only(frozen: list[int]) -> None:
    assert named("heavy:gets_collected") is False
    assert gc.isenabled()
    assert frozen == [0]
    assert len(named("heavy:kept")) == 1000
    assert frozen == [0], "it was imported before"
    del sys.modules["heavy"]


def test_it_goes_on_after_a_module_that_fails() -> None:
    with pytest.raises(ValueError, match="at import"):
        named("fails:anything")
    assert gc.isenabled()


def test_one_that_was_at_rest_stays_at_rest(frozen: list[int]) -> None:
    gc.disable()
    try:
        assert named("heavy:gets_collected") is False
        assert not gc.isenabled()
        assert not frozen
    finally:
        gc.enable()
        del sys.modules["heavy"]
