"""The relay between the command and the workers of a launch: an actor on the node of the command, and the job that it
serves. Lines, exit codes and places of ranks and servers come to the relay; signals go from it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from taut_tools.cluster.attempts import STATED, Attempt
from taut_tools.cluster.rank_process import Stream
from taut_tools.cluster.servers import Address, Place

BEAT = 0.25
"""Seconds between two questions of a worker, or of the command, to the relay."""
ENDING = 30.0
"""Seconds in which all ranks have to end after the first one."""


@dataclass(frozen=True)
class Job:
    """A launched run as its workers know it."""

    words: Sequence[str]
    directory: str
    environment: Mapping[str, str]
    port: int
    """Port on which the ranks meet; 0 takes a free one."""
    waits: bool = False
    """Whether ranks wait for servers on their GPUs."""
    relay: Any = None


@dataclass
class Relay:
    """An actor between the workers and the command."""

    attempt: Attempt | None = None
    number: int = 0
    """Number of attempts so far."""
    signaled: int | None = None
    heard: float = field(default_factory=time.monotonic)
    """Time of the last call from a rank's worker."""
    lines: list[tuple[Stream, str]] = field(default_factory=list)
    servers: dict[tuple[str, int], Address] = field(default_factory=dict)
    """Address of each server when it last became ready."""
    server_failures: dict[str, str] = field(default_factory=dict)
    """Last end of a server of each kind, in words."""
    places: dict[int, Place] = field(default_factory=dict)
    """Places of the ranks of this attempt."""
    released: int = -1
    """The last attempt whose ranks may start."""

    async def begin(self, size: int) -> int:
        """Begin a new attempt, whose predecessor's workers are gone; its number."""
        self.attempt, self.places = Attempt(self.number, size), {}
        self.number += 1
        return self.attempt.number

    async def join(self, number: int, rank: int, node: str, place: Place) -> None:
        """Note where a rank is; once all are placed, print how many are on each node."""
        attempt = self._current(number)
        if attempt is None:
            return
        attempt.nodes[rank] = node
        self.places[rank] = place
        if len(attempt.nodes) == attempt.size and attempt.error is None:
            nodes = list(attempt.nodes.values())
            counts = ", ".join(f"{nodes.count(name)} on {name}" for name in dict.fromkeys(nodes))
            which = "" if number == 0 else f", restart {number}"
            self._note(f"{attempt.size} rank{'s' * (attempt.size > 1)}: {counts}{which}")

    async def say(self, number: int, lines: Sequence[tuple[Stream, str]]) -> None:
        """Take lines that a rank printed. An error that ends taut on several nodes is kept once."""
        attempt = self._current(number)
        for stream, line in lines:
            is_said = attempt is not None and attempt.error is not None and line.startswith(STATED)
            if not is_said:
                self.lines.append((stream, line))
            if attempt is not None:
                attempt.hear(stream, line)

    async def heed(self, number: int) -> int | None:
        """The signal for the rank, or None."""
        if self._current(number) is not None:
            self.heard = time.monotonic()
        return self.signaled

    async def ended(self, number: int, rank: int, code: int) -> str | None:
        """Note the end of a rank, and wait for the others. The reason for another attempt, or None after the last."""
        attempt = self._current(number)
        deadline = time.monotonic() + ENDING
        if attempt is not None:
            attempt.codes[rank] = code
            while not attempt.has_ended and time.monotonic() < deadline:
                self.heard = time.monotonic()
                await asyncio.sleep(0.05)
        if attempt is None or attempt is not self.attempt:
            return "another attempt has begun"
        return attempt.failure(self.signaled)

    async def serve(self, name: str, number: int, node: str, address: Address) -> None:
        """Note that a server is ready."""
        self.servers[name, number] = address
        self._note(f"{name} {number} on {node} is ready")

    async def end_server(self, name: str, number: int, node: str, code: int, line: str) -> None:
        """Note that a server has ended, which none should; ``line`` is the last that it printed."""
        said = f": {line}" if line else ""
        self.server_failures[name] = f"{name} {number} on {node} ended with {code}{said}"
        self._note(self.server_failures[name])

    async def take_servers(self) -> tuple[dict[tuple[str, int], Address], dict[str, str]]:
        return self.servers, self.server_failures

    async def forget_servers(self, name: str) -> None:
        """Forget the servers of a kind, which were ended."""
        self.servers = {key: place for key, place in self.servers.items() if key[0] != name}
        self.server_failures.pop(name, None)

    async def take_places(self) -> tuple[int, list[Place]]:
        """The number of the attempt and the places of its ranks; -1 and none until all are placed."""
        attempt = self.attempt
        if attempt is None or len(self.places) < attempt.size:
            return -1, []
        return attempt.number, [place for _, place in sorted(self.places.items())]

    async def release(self, number: int) -> None:
        """Let the ranks of an attempt start."""
        self.released = number

    async def is_released(self, number: int) -> bool:
        return self.released >= number

    async def take(self) -> tuple[list[tuple[Stream, str]], float]:
        """The lines since the last call, and the seconds since a rank was last heard of."""
        lines, self.lines = self.lines, []
        return lines, time.monotonic() - self.heard

    async def pass_on(self, number: int) -> bool:
        """Pass a signal on to all ranks. Whether there are any."""
        self.signaled = number
        attempt = self.attempt
        return attempt is not None and not attempt.has_ended and time.monotonic() - self.heard < 2

    async def last(self) -> tuple[Attempt | None, int]:
        """The last attempt, and the number of attempts."""
        return self.attempt, self.number

    def _current(self, number: int) -> Attempt | None:
        attempt = self.attempt
        return attempt if attempt is not None and attempt.number == number else None

    def _note(self, text: str) -> None:
        self.lines.append(("stderr", f"taut: launch: {text}\n"))


def start_relay(max_concurrency: int) -> Any:
    """Start the relay on the node of the command, without taking resources there."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(num_cpus=0, max_concurrency=max_concurrency)(Relay)
    return actor.options(scheduling_strategy=here).remote()


def print_lines(relay: Any) -> float:
    """Print the lines that have come; the seconds since a rank was last heard of."""
    lines, silence = ray.get(relay.take.remote())
    for name, line in lines:
        stream = sys.stdout if name == "stdout" else sys.stderr
        stream.write(line)
    sys.stdout.flush()
    return float(silence)
