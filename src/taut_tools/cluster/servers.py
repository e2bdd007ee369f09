"""The servers of a launched run: how one is started, and the address that stays when it is started again.

    server     a shell command (``vllm serve ...``, ``taut serve-reward ...``) on one machine of the cluster, killed
               with its children as soon as the process that supervises it is gone
    ready      GET /health answers 200
    address    a port of the machine that launches. ``Doors`` hands each connection on to the present port of a server,
               which may be on another machine after a restart
    rollouts   each server has an address of its own (``rollout.urls``): the run notices a new process behind it and
               sends the weights (server_pool.py)
    rewards    all servers have one address, since they keep nothing between two requests. A connection goes to the
               server with the fewest open ones

No Ray here: ``ray_servers.py`` places the servers.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from http.client import HTTPConnection, HTTPException
from typing import NamedTuple

from taut.io.console import counted

PROGRAM = """
import os, signal, subprocess, sys
if os.fork() == 0:
    os.read({}, 1)
    os.killpg(0, signal.SIGKILL)
code = subprocess.call(sys.argv[1], shell=True)
sys.exit(code if code >= 0 else 128 - code)
"""
"""Program of a ``RankProcess`` that runs a shell command. A process next to the command waits for the end of the leash
and then kills the whole group: Ray, when it ends an actor, kills the actor's children and not their children."""
ROLLOUT_SERVER = "server"
"""Name of the kind whose addresses are ``rollout.urls``."""
REWARDS_PLACE = "{reward_servers}"
"""Placeholder, in a setting of the run, for the URL of the reward servers."""
CONNECTING = 5.0
"""Seconds in which a server accepts a connection, or answers at /health."""
PIECE = 2**16
"""Bytes handed on at a time."""


class Servers(NamedTuple):
    """The servers of one kind."""

    name: str
    """Name of one server in messages."""
    number: int
    command: str
    """Shell command, with placeholders {host} and {port} for the address to listen on."""
    gpus: int
    """GPUs of one server."""
    cpus: int
    """CPUs of one server."""
    restarts: int
    start_seconds: float
    """Seconds after its start in which each server has to answer."""
    has_one_address: bool = False
    """Whether all servers share one address."""
    is_colocated: bool = False
    """Whether the servers are on the GPUs of the ranks, and take no others."""

    @property
    def wanted(self) -> str:
        """The required servers, in words."""
        return counted(self.number, f"{self.name}s")

    @property
    def one(self) -> dict[str, float]:
        """The resources of one server."""
        return {"CPU": float(self.cpus), **({"GPU": float(self.gpus)} if self.gpus else {})}


class Place(NamedTuple):
    """A node, and some of its GPUs."""

    node_id: str
    devices: tuple[str, ...] = ()


def shares(ranks: Sequence[Place], size: int) -> list[Place]:
    """Places of servers on the GPUs of ranks: each joins ``size`` successive ranks of one node."""
    of_nodes: dict[str, list[Place]] = {}
    for rank in ranks:
        of_nodes.setdefault(rank.node_id, []).append(rank)
    return [
        Place(node_id, tuple(name for place in places[at : at + size] for name in place.devices))
        for node_id, places in of_nodes.items()
        for at in range(0, len(places) - size + 1, size)
    ]


class Address(NamedTuple):
    host: str
    port: int


def is_ready(address: Address) -> bool:
    """Whether a server at the address answers 200 at /health."""
    connection = HTTPConnection(address.host, address.port, timeout=CONNECTING)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


class Doors:
    """Ports of this machine, each of which leads to a server, or to one of several. ``close`` ends them and their
    connections.
    """

    def __init__(self, host: str, kinds: Sequence[Servers]) -> None:
        self._leads: dict[str, list[dict[int, Address]]] = {
            kind.name: [{} for _ in range(1 if kind.has_one_address else kind.number)]
            for kind in kinds
        }
        """Addresses of the servers behind each door of each kind, by number of the server."""
        self._num_open: Counter[Address] = Counter()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        opening = asyncio.run_coroutine_threadsafe(self._open(host), self._loop)
        self.addresses = opening.result()

    def lead(self, name: str, number: int, address: Address) -> None:
        """Let the door of a server lead to this address from now on."""
        doors = self._leads[name]
        doors[number % len(doors)][number] = address

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self, host: str) -> dict[str, list[Address]]:
        self._listening: list[asyncio.Server] = []
        addresses: dict[str, list[Address]] = {}
        for name, doors in self._leads.items():
            opened = [
                await asyncio.start_server(partial(self._enter, leads), host) for leads in doors
            ]
            self._listening += opened
            addresses[name] = [Address(*one.sockets[0].getsockname()[:2]) for one in opened]
        return addresses

    async def _enter(
        self,
        leads: Mapping[int, Address],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Connect a client with the least busy server that accepts, until either closes its end; then close both."""
        try:
            for address in sorted({*leads.values()}, key=self._num_open.__getitem__):
                try:
                    async with asyncio.timeout(CONNECTING):
                        its_reader, its_writer = await asyncio.open_connection(*address)
                except (OSError, TimeoutError):
                    continue
                self._num_open[address] += 1
                try:
                    ways = [_pump(reader, its_writer), _pump(its_reader, writer)]
                    tasks = [asyncio.ensure_future(way) for way in ways]
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    for task in tasks:
                        task.cancel()
                finally:
                    self._num_open[address] -= 1
                    its_writer.close()
                return
        finally:
            writer.close()  # where no server took it, the client sees a connection that is closed

    async def _end(self) -> None:
        for one in self._listening:
            one.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(PIECE):
            writer.write(piece)
            await writer.drain()
