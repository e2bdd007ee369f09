"""The servers of a launched run: how one is started, and the address that stays when it is started again.

    server     a shell command (``vllm serve ...``, ``taut serve-reward ...``) on one machine of the cluster, killed
               with what it started as soon as the process that supervises it is gone
    ready      GET /health answers 200
    address    of the run: a port of the machine that launches. ``Doors`` hands each connection on to where a server is
               now. A server that has died is started again, at another port or on another machine, under the same
               address
    roll-outs  each server has an address of its own (``rollout.urls``): the run finds that it is another process and
               gives it its weights (server_pool.py)
    rewards    all servers have one address: they keep nothing between two requests. A connection goes to the one that
               has the fewest, of those that take it

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
"""Of ``RankProcess``: runs a shell command. A process next to it waits for the end of the leash, and kills all of them:
Ray, which ends an actor, kills the actor's children and not what they have started."""
ROLLOUT_SERVER = "server"
"""The name of the kind whose addresses are ``rollout.urls``."""
REWARDS_PLACE = "{reward_servers}"
"""In a setting of the run, the URL of the other kind."""
CONNECTING = 5.0
"""Seconds in which a server takes a connection, or answers whether it is ready."""
PIECE = 2**16
"""Bytes that are handed on at a time."""


class Servers(NamedTuple):
    """The servers of one kind."""

    name: str
    """Of one, in messages."""
    number: int
    command: str
    """A shell command; {host} and {port} stand for where it is to listen."""
    gpus: int
    cpus: int
    """Of one server."""
    restarts: int
    start_seconds: float
    """In which each answers, after its start."""
    has_one_address: bool = False
    """Whether all are reached at one address."""
    is_colocated: bool = False
    """Whether they are on the GPUs of the ranks, and take none besides."""

    @property
    def wanted(self) -> str:
        """What has to be had, in words."""
        return counted(self.number, f"{self.name}s")

    @property
    def one(self) -> dict[str, float]:
        """The resources of one server."""
        return {"CPU": float(self.cpus), **({"GPU": float(self.gpus)} if self.gpus else {})}


class Place(NamedTuple):
    """A node, and GPUs of it."""

    node_id: str
    devices: tuple[str, ...] = ()


def shares(ranks: Sequence[Place], size: int) -> list[Place]:
    """The places of ranks, in their order, joined by ``size`` of one node: those of servers on their GPUs."""
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
    """Whether a server there says that it is up."""
    connection = HTTPConnection(address.host, address.port, timeout=CONNECTING)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


class Doors:
    """Ports of this machine, each of which leads to a server, or to one of several. ``close`` ends them and what goes
    through.
    """

    def __init__(self, host: str, kinds: Sequence[Servers]) -> None:
        self._leads: dict[str, list[dict[int, Address]]] = {
            kind.name: [{} for _ in range(1 if kind.has_one_address else kind.number)]
            for kind in kinds
        }
        """Of each kind, and each of its doors: where its servers are, by number."""
        self._num_open: Counter[Address] = Counter()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        opening = asyncio.run_coroutine_threadsafe(self._open(host), self._loop)
        self.addresses = opening.result()

    def lead(self, name: str, number: int, address: Address) -> None:
        """Hand on what comes to the door of a server from now on."""
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
        """Hand on both ways, until one end is closed; the other is then closed too."""
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
