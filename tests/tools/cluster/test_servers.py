"""An address that leads to wherever a server is, and a server that ends with what started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2
from tests.helpers.fake_vllm import FakeServer

from taut_tools.cluster.rank_process import RankProcess
from taut_tools.cluster.servers import PROGRAM, Address, Doors, Place, Servers, is_ready, shares

STARTER = """
import sys
from taut_tools.cluster.rank_process import RankProcess
from taut_tools.cluster.servers import PROGRAM
RankProcess([sys.argv[1]], {}, ".", lambda stream, line: print(line, end="", flush=True), PROGRAM).wait()
"""


def kind(name: str, number: int, *, has_one_address: bool) -> Servers:
    return Servers(name, number, "", 0, 1, 0, 1.0, has_one_address)


def test_a_door_leads_to_where_the_server_is_now() -> None:
    doors = Doors("127.0.0.1", [kind("server", 2, has_one_address=False)])
    try:
        door, other = doors.addresses["server"]
        assert not is_ready(door)
        with FakeServer(names=("first",)) as first, httpx2.Client(trust_env=False) as client:
            doors.lead("server", 0, Address("127.0.0.1", port_of(first)))
            assert is_ready(door)
            assert not is_ready(other)
            assert models(client, door) == ["first"]
            with FakeServer(names=("second",)) as second:
                doors.lead("server", 0, Address("127.0.0.1", port_of(second)))
                with httpx2.Client(trust_env=False) as another:
                    assert models(another, door) == ["second"]
                    assert models(client, door) == ["first"]  # a connection stays where it is
        assert not is_ready(door)
    finally:
        doors.close()
    assert not is_ready(door)


def test_one_address_leads_to_the_server_with_the_fewest_connections_that_takes_it() -> None:
    doors = Doors("127.0.0.1", [kind("reward server", 2, has_one_address=True)])
    try:
        (door,) = doors.addresses["reward server"]
        with FakeServer(names=("first",)) as first, FakeServer(names=("second",)) as second:
            for number, server in enumerate((first, second)):
                doors.lead("reward server", number, Address("127.0.0.1", port_of(server)))
            clients = [httpx2.Client(trust_env=False) for _ in range(4)]
            seen = [models(client, door)[0] for client in clients]
            assert sorted(seen) == ["first", "first", "second", "second"]
            for client in clients:
                client.close()
        with FakeServer(names=("again",)) as again:
            doors.lead("reward server", 1, Address("127.0.0.1", port_of(again)))
            with httpx2.Client(trust_env=False) as client:
                assert models(client, door) == ["again"]  # the other one takes no connection
    finally:
        doors.close()


def port_of(server: FakeServer) -> int:
    return int(server.url.removesuffix("/v1").rpartition(":")[2])


def models(client: httpx2.Client, door: Address) -> list[str]:
    answer = client.get(f"http://{door.host}:{door.port}/v1/models").json()
    return [card["id"] for card in answer["data"]]


def test_servers_on_the_gpus_of_ranks_share_no_node_with_those_of_others() -> None:
    ranks = [Place("a", ("0",)), Place("a", ("1",)), Place("b", ("4",)), Place("a", ("2",))]
    ranks += [Place("b", ("5",)), Place("a", ("3",)), Place("b", ("6",))]
    assert shares(ranks, 2) == [
        Place("a", ("0", "1")),
        Place("a", ("2", "3")),
        Place("b", ("4", "5")),
    ]


def test_a_server_ends_with_a_code_and_its_last_line(tmp_path: Path) -> None:
    lines: list[str] = []
    command = "echo $PWD; kill -9 $$"
    process = RankProcess([command], {}, str(tmp_path), lambda _, line: lines.append(line), PROGRAM)
    assert process.wait() == 128 + signal.SIGKILL
    assert lines == [f"{tmp_path}\n"]


def test_a_server_and_what_it_started_end_with_their_starter() -> None:
    """As Ray ends an actor: its process and the children of that."""
    command = "sleep 60 & echo $! $PPID; wait"
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, command], stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    pid, child = map(int, starter.stdout.readline().split())
    os.kill(pid, 0)
    starter.send_signal(signal.SIGSTOP)
    os.kill(child, signal.SIGKILL)
    assert not is_gone(pid)
    starter.kill()
    starter.wait()
    starter.stdout.close()
    deadline = time.monotonic() + 50
    while not is_gone(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
