"""Which tests of a file were asked for: a fixture that computes for all of them leaves out what none needs."""

from __future__ import annotations

import pytest


def selected(request: pytest.FixtureRequest) -> set[str]:
    """The names of those tests, with their parameters, of the file whose test is the first to use a fixture."""
    return {item.name for item in request.session.items if item.path == request.path}
