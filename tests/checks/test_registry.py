"""The registry of checks: its order, and what follows from the causes that are declared.

That each check catches a planted fault is in ``test_planted.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

from taut.checks import CHECKS, OF_NODES, Check
from taut.checks.registry import DECLARED, Finding, merged, passed


def sound(session: Any) -> Finding:
    """Is all well?"""
    return passed("it is")


def after(*names: str, follows: str | None = None) -> Check:
    return Check(sound, after=names, follows=follows)


def test_causes_of_causes_are_computed() -> None:
    topics = [{"a": after(), "d": after("b", "c")}, {"b": after("a"), "c": after("a")}]
    assert {name: one.after for name, one in merged(topics).items()} == {
        "a": (),
        "b": ("a",),
        "c": ("a",),
        "d": ("a", "b", "c"),
    }


def test_a_file_keeps_its_order_and_the_earlier_file_comes_first() -> None:
    topics = [
        {"template": after("columns"), "plain": after("rows")},
        {"columns": after(), "rows": after("template"), "tokens": after("rows")},
        {"loads": after("tokens"), "saves": after("loads")},
    ]
    expected = ["columns", "template", "rows", "plain", "tokens", "loads", "saves"]
    assert list(merged(topics)) == expected


def test_one_that_follows_another_is_later_and_not_its_consequence() -> None:
    checks = merged([{"a": after(follows="b")}, {"b": after()}])
    assert list(checks) == ["b", "a"]
    assert checks["a"].after == ()


@pytest.mark.parametrize(
    "topics",
    [
        [{"a": after("a")}],
        [{"a": after("b")}, {"b": after("a")}],
        [{"a": after("b"), "b": after()}],  # listed above what it comes after
        [{"a": after("nothing")}],
        [{"a": after(follows="nothing")}],
    ],
)
def test_causes_that_are_never_asked_before_are_an_error(topics: list[dict[str, Check]]) -> None:
    with pytest.raises(AssertionError, match="no next check: each of a"):
        merged(topics)


ALL = {**OF_NODES, **CHECKS}


def test_each_check_is_asked_after_its_causes() -> None:
    asked: set[str] = set()
    for name, one in ALL.items():
        assert set(one.after) <= asked, name
        asked.add(name)


def test_only_direct_causes_are_declared() -> None:
    for name, one in DECLARED.items():
        assert set(one.after) <= set(ALL[name].after)
        implied = {cause for direct in one.after for cause in ALL[direct].after}
        assert not implied & set(one.after), name


def test_each_declared_check_is_asked_and_asks_a_question() -> None:
    assert set(DECLARED) == set(ALL)
    assert all(one.question.endswith("?") for one in ALL.values())
    functions = [one.ask.__name__ for one in ALL.values()]
    assert len(set(functions)) == len(functions)
