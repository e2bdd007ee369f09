"""When a launched run is started again, and with what exit code it ends otherwise."""

from __future__ import annotations

import pytest

from taut_tools.cluster.attempts import Attempt

CHECK = "taut: error: check loss failed\n"


def attempt(codes: dict[int, int], *lines: str, size: int = 2) -> Attempt:
    ended = Attempt(0, size, nodes=dict.fromkeys(range(size), "10.0.0.1"), codes=codes)
    for line in lines:
        ended.hear("stderr", line)
    return ended


@pytest.mark.parametrize(
    ("codes", "lines", "signaled", "code"),
    [
        ({0: 0, 1: 0}, [], None, 0),
        ({0: 1, 1: 1}, [CHECK], None, 1),
        ({0: 2, 1: 2}, ["taut: error: found steps=x\n"], None, 2),
        ({0: 75, 1: 75}, [], 15, 75),
        ({0: 130, 1: 130}, [], 2, 130),
        ({0: 0, 1: -15}, [], 15, 143),
    ],
)
def test_what_would_happen_again_is_final(
    codes: dict[int, int], lines: list[str], signaled: int | None, code: int
) -> None:
    ended = attempt(codes, *lines)
    assert ended.has_ended
    assert ended.failure(signaled) is None
    assert ended.exit_code == code


@pytest.mark.parametrize(
    ("codes", "lines", "why"),
    [
        (
            {0: 1, 1: -9},
            ["taut: error: rank 1 is gone\n"],
            "rank 1 on 10.0.0.1 was ended by SIGKILL",
        ),
        ({0: 1}, ["taut: error: the store is gone\n"], "rank 1 on 10.0.0.1 is gone"),
        (
            {0: 1, 1: 1},
            ["Traceback\n", "RuntimeError: CUDA error\n"],
            "rank 0 on 10.0.0.1 ended with 1",
        ),
        ({0: 75, 1: 75}, [], "rank 0 on 10.0.0.1 ended by a signal"),
    ],
)
def test_what_may_not_happen_again_is_tried_again(
    codes: dict[int, int], lines: list[str], why: str
) -> None:
    failure = attempt(codes, *lines).failure(None)
    assert failure is not None
    assert failure.startswith(why)


def test_a_line_on_stdout_is_no_error() -> None:
    ended = attempt({0: 1, 1: 1})
    ended.hear("stdout", CHECK)
    assert ended.error is None
    assert ended.failure(None) is not None
