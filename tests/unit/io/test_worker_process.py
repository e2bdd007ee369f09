"""A helper process whose time ends."""

from __future__ import annotations

import os
import time

import pytest

from taut.io.worker_process import Helper, Late

COMMAND = (
    "from taut.io.worker_process import begin; import time; "
    "pipe = begin({}, {}); pipe.send_bytes(b'x'); time.sleep(60)"
)


def test_a_helper_that_does_not_answer_in_time_is_ended() -> None:
    helper = Helper()
    helper.start(COMMAND, os.environ)
    assert helper.pipe.recv_bytes() == b"x"
    with pytest.raises(Late), helper.limit(0.2):
        helper.pipe.recv_bytes()
    assert not helper.is_alive


def test_an_answer_at_the_last_moment_is_late() -> None:
    """The process has been ended: who asks it again would find no process."""
    helper = Helper()
    helper.start(COMMAND, os.environ)
    assert helper.pipe.recv_bytes() == b"x"
    with pytest.raises(Late), helper.limit(0.2):
        time.sleep(0.6)
    assert not helper.is_alive
    with pytest.raises(OSError, match="has been ended"):
        _ = helper.pipe
    assert helper.reap() is None
