"""What a machine lacks is one line."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from taut_tools.cluster.preflight import Expected, free_port, port_in_use, preflight, versions


@pytest.fixture
def expected(tmp_path: Path) -> Expected:
    """A machine that has all: this one."""
    return Expected(str(tmp_path), str(tmp_path), versions())


def test_this_machine_fits(expected: Expected) -> None:
    assert preflight(expected) is None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"directory": "/nowhere"}, "does not see /nowhere, in which the command was given"),
        ({"folder": "/shared/taut-launch-abc"}, "does not see /shared, the directory of out"),
        ({"versions": (("taut", "0.0"),)}, "has taut "),
    ],
)
def test_what_is_missing_is_named(
    expected: Expected, change: dict[str, object], problem: str
) -> None:
    found = preflight(replace(expected, **change))
    assert found is not None
    assert found.startswith(problem)


def test_a_port_that_is_taken_is_seen() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert port_in_use("127.0.0.1", taken.getsockname()[1])
    assert not port_in_use("127.0.0.1", free_port("127.0.0.1"))
