"""The roll-out servers of a launched run: how one is started, and the address that stays when it is started again.

    server     a shell command (``vllm serve ...``) on one machine of the cluster, killed with what it started as soon
               as the process that supervises it is gone
    ready      GET /health answers 200
    address    of the run: a port of the machine that launches. ``Doors`` hands each connection on to where the server
               is now. A server that has died is started again, at another port or on another machine, under the same
               ``rollout.urls``; the run finds that it is another process and gives it its weights (server_pool.py)

No Ray here: ``ray_cluster.py`` places the servers.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from typing import NamedTuple

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
CONNECTING = 5.0
"""Seconds in which a server takes a connection, or answers whether it is ready."""
PIECE = 2**16
"""Bytes that are handed on at a time."""


class Servers(NamedTuple):
    """The servers of a launch."""

    number: int
    command: str
    """A shell command; {host} and {port} stand for where it is to listen."""
    gpus: int
    cpus: int
    """Of one server."""
    restarts: int
    start_seconds: float
    """In which each answers, after its start."""

    @property
    def one(self) -> dict[str, float]:
        """The resources of one server."""
        return {"CPU": float(self.cpus), **({"GPU": float(self.gpus)} if self.gpus else {})}


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
    """Ports of this machine, each of which leads to a server. ``close`` ends them and what goes through."""

    def __init__(self, host: str, number: int) -> None:
        self._leads: list[Address | None] = [None] * number
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        opening = asyncio.run_coroutine_threadsafe(self._open(host), self._loop)
        self.addresses = opening.result()

    def lead(self, number: int, address: Address) -> None:
        """Hand on what comes to a door from now on."""
        self._leads[number] = address

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self, host: str) -> list[Address]:
        async def enter(
            number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            await _connect(self._leads[number], reader, writer)

        self._listening = [
            await asyncio.start_server(lambda *ends, n=number: enter(n, *ends), host)
            for number in range(len(self._leads))
        ]
        return [Address(*one.sockets[0].getsockname()[:2]) for one in self._listening]

    async def _end(self) -> None:
        for one in self._listening:
            one.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def _connect(
    lead: Address | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Hand on both ways, until one end is closed; the other is then closed too."""
    try:
        if lead is None:
            return
        async with asyncio.timeout(CONNECTING):
            its_reader, its_writer = await asyncio.open_connection(*lead)
        try:
            ways = [_pump(reader, its_writer), _pump(its_reader, writer)]
            tasks = [asyncio.ensure_future(way) for way in ways]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
        finally:
            its_writer.close()
    except (OSError, TimeoutError):
        pass  # the client sees a connection that is closed
    finally:
        writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(PIECE):
            writer.write(piece)
            await writer.drain()
