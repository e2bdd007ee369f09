"""Marks cases of a parametrized test as slow: ``make test-slow`` and ``.ci/run`` run them, ``make test`` does not."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases for ``pytest.mark.parametrize``, all but those in ``quick`` marked slow. A plain tuple is a case of
    several arguments.
    """
    listed = list(cases)
    assert all(case in listed for case in quick), "each quick case must be one of the cases"
    return [
        pytest.param(
            *(case if type(case) is tuple else (case,)),
            marks=() if case in quick else pytest.mark.slow,
        )
        for case in listed
    ]
