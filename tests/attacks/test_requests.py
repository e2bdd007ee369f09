"""The attacks of ``requests.py`` on a server that runs: none takes it away from others, and each gets its answer."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.attacks.requests import (
    FINE,
    FLOODS,
    KEY,
    LIMITS,
    REQUESTS,
    Flood,
    Request,
    answer,
    connect,
    sent,
)
from tests.helpers.slow_cases import slow_except
from tests.tools.serve.test_pictures_judged import save_vision_reward

pytestmark = pytest.mark.attack

HEALTH_SECONDS = 1.0
MOST_MEMORY = 200e6
"""Bytes by which no attack lets the server grow."""


class Server(NamedTuple):
    """A server under attack."""

    port: int
    pid: int

    def memory(self) -> int:
        """Bytes in use."""
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self.pid}/status").read_text())
        assert found is not None
        return int(found[1]) * 1024

    def ask(self, sends: bytes) -> tuple[int, dict[str, str], bytes]:
        with connect(self.port) as connection:
            connection.sendall(sends)
            return answer(connection)

    def health_seconds(self) -> float:
        begun = time.monotonic()
        assert self.ask(sent("GET", "/health", key=None))[0] == 200
        return time.monotonic() - begun


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("attacked")
    limits = [f"{name}={value}" for name, value in LIMITS.items()]
    command = ["serve-reward", str(save_vision_reward(folder)), "port=0", "key=REWARD_KEY", *limits]
    with (
        (folder / "errors").open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "taut", *command],
            env={**os.environ, "REWARD_KEY": KEY},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        port = next(it for line in process.stdout if (it := re.search(r"http://\S+:(\d+)", line)))
        yield Server(int(port[1]), process.pid)
        process.terminate()
        assert process.wait(60) == 0
    assert (folder / "errors").read_text() == ""


@pytest.mark.parametrize("attack", REQUESTS, ids=lambda it: it.name)
def test_a_request_gets_its_answer(server: Server, attack: Request) -> None:
    before = server.memory()
    begun = time.monotonic()
    with connect(server.port) as connection:
        with suppress(ConnectionError):  # it may have answered already
            connection.sendall(attack.sends)
        status, headers, body = answer(connection)
    assert (status, time.monotonic() - begun < 20) == (attack.status, True)
    if status != 200:
        assert headers["content-type"] == "application/json"
        error = json.loads(body)["error"]
        assert "\n" not in error["message"]
        assert "expected" in error["message"]
        assert attack.says in error["message"]
    assert server.health_seconds() < HEALTH_SECONDS
    assert server.memory() - before < MOST_MEMORY


@pytest.mark.parametrize("attack", slow_except(FLOODS[:1], FLOODS), ids=lambda it: it.name)
def test_others_are_served(server: Server, attack: Flood) -> None:
    """During the attack /health, after it whatever is asked."""
    before, most, seconds = server.memory(), 0, []
    with ExitStack() as held:
        steps = attack.run(server.port, held)
        end = time.monotonic() + attack.seconds
        while time.monotonic() < end:
            next(steps)
            seconds.append(server.health_seconds())
            most = max(most, server.memory() - before)
            time.sleep(0.02)
    slowest = sorted(seconds)[-2:]  # one may meet a busy machine
    assert slowest[0] < HEALTH_SECONDS
    assert slowest[-1] < 3 * HEALTH_SECONDS
    assert most < MOST_MEMORY
    end = time.monotonic() + 30
    while (found := server.ask(FINE)[0]) != 200:
        assert found == 503
        assert time.monotonic() < end, "it does not serve again"
        time.sleep(0.1)
