"""Rollout servers and reward servers (servers.py) as actors of Ray.

Servers have a placement group of their own, which needs room at the same time as the ranks' group: Ray Train makes a
group for its workers, all alike, and takes no other. Each actor runs one server and dies with it; Ray starts the actor
again, on its node or, if the node is gone, on another. Servers outlive a restart of the ranks.

Servers on the GPUs of the ranks (``is_colocated``) are actors that take no resources of Ray. Once Ray Train has placed
its workers, each of these actors is bound to the node of some ranks and started with their CUDA_VISIBLE_DEVICES; the
workers wait for the servers before they start the ranks. Workers that move get new servers, behind the same doors.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from taut.errors import ClusterError
from taut.io.console import counted
from taut.train.signals import Interrupts
from taut_tools.cluster.placement import here
from taut_tools.cluster.preflight import free_port
from taut_tools.cluster.rank_process import RankProcess, Stream
from taut_tools.cluster.relay import BEAT, Job, print_lines
from taut_tools.cluster.servers import (
    PROGRAM,
    REWARDS_PLACE,
    ROLLOUT_SERVER,
    Address,
    Doors,
    Place,
    Servers,
    is_ready,
    shares,
)


@contextmanager
def serving(
    job: Job, kinds: Sequence[Servers], group: Any, interrupts: Interrupts
) -> Iterator[PlacedServers]:
    """Start the servers, and wait until all are ready but those on the GPUs of the ranks. Raises ClusterError where one
    ends before that, or is not ready in time.
    """
    host, _ = here()
    placed = PlacedServers(job, kinds, host, Doors(host, kinds))
    try:
        bundle = 0
        for kind in kinds:
            if not kind.is_colocated:
                placed.start(kind, [_request(kind, group, bundle + n) for n in range(kind.number)])
                bundle += kind.number
        with interrupts.at_once():
            while placed.starting:
                placed.lead()
                print_lines(job.relay)
                time.sleep(BEAT)
        yield placed
    finally:
        placed.close()


def pointed(job: Job, doors: Doors) -> Job:
    """The job with the URLs of the doors in its run's settings."""
    words = list(job.words)
    for name, addresses in doors.addresses.items():
        urls = [f"http://{host}:{port}" for host, port in addresses]
        if name == ROLLOUT_SERVER:
            filled = json.dumps([f"{url}/v1" for url in urls])
            words += ["rollout.engine=server", f"rollout.urls={filled}"]
        else:
            words = [word.replace(REWARDS_PLACE, urls[0]) for word in words]
    return replace(job, words=words)


def _request(kind: Servers, group: Any, bundle: int) -> dict[str, Any]:
    """Options of the actor of a server in a placement group."""
    return {
        "num_cpus": kind.cpus,
        "num_gpus": kind.gpus,
        "max_restarts": kind.restarts,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle),
    }


def _request_at(kind: Servers, place: Place) -> dict[str, Any]:
    """Options of the actor of a server on the ranks' GPUs. Ray starts it again on this node only; new ranks get new
    servers.
    """
    return {
        "num_cpus": 0,
        "num_gpus": 0,
        "max_restarts": kind.restarts,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(place.node_id, soft=False),
    }


@dataclass
class PlacedServers:
    """The servers of a launch, and the doors that lead to them."""

    job: Job
    kinds: Sequence[Servers]
    host: str
    """Host of the doors."""
    doors: Doors
    actors: dict[str, list[Any]] = field(default_factory=dict)
    starting: dict[str, float] = field(default_factory=dict)
    """Start times of the kinds of which some server is not ready yet."""
    attempt: int = -1
    """Attempt of the ranks next to which servers were last placed."""
    places: list[Place] = field(default_factory=list)

    def start(
        self,
        kind: Servers,
        requests: Sequence[Mapping[str, Any]],
        devices: Sequence[str] = (),
    ) -> None:
        """Start the servers of a kind. ``devices`` are the CUDA_VISIBLE_DEVICES of each, by default set by Ray."""
        command = kind.command.replace("{door}", self.host)
        self.starting[kind.name] = time.monotonic()
        self.actors[kind.name] = actors = []
        for number, request in enumerate(requests):
            visible = {"CUDA_VISIBLE_DEVICES": devices[number]} if devices else {}
            job = replace(self.job, environment={**self.job.environment, **visible})
            actor = ray.remote(_Server).options(**request)
            actors.append(actor.remote(job, kind.name, command, number))

    def lead(self) -> None:
        """Let the doors lead to the servers' present addresses. Raises ClusterError where a server of a kind that is
        starting has ended, or is late.
        """
        if not self.kinds:
            return
        addresses, failures = ray.get(self.job.relay.take_servers.remote())
        for name in self.starting:
            if name in failures:
                raise ClusterError(
                    f"{failures[name]}; expected servers that run; correct their command"
                )
        for (name, number), address in addresses.items():
            self.doors.lead(name, number, Address(*address))
        ready = Counter(name for name, _ in addresses)
        for kind in self.kinds:
            began = self.starting.get(kind.name)
            if began is None:
                continue
            if ready[kind.name] == kind.number:
                del self.starting[kind.name]
            elif time.monotonic() - began > kind.start_seconds:
                raise ClusterError(
                    f"not all of {kind.wanted} answer at /health after {kind.start_seconds:.0f} s; expected all; see "
                    "the logs of Ray's workers, or raise the seconds in which they start"
                )

    def follow_ranks(self) -> None:
        """Start servers on the GPUs of ranks that were placed since the last call, and release these ranks once their
        servers are ready.
        """
        kind = next((kind for kind in self.kinds if kind.is_colocated), None)
        if kind is None:
            return
        relay = self.job.relay
        number, ranks = ray.get(relay.take_places.remote())
        if number < 0:
            return
        if number != self.attempt:
            self.attempt, places = number, shares(ranks, kind.gpus or 1)
            if len(places) != kind.number:
                raise ClusterError(
                    f"the ranks have room for {counted(len(places), 'servers')} on {kind.gpus} GPUs of one node each; "
                    f"expected {kind.number}; set another gpus_per_server"
                )
            if places != self.places:
                self.places = places
                self._end(kind.name)
                ray.get(relay.forget_servers.remote(kind.name))
                devices = [",".join(place.devices) for place in places] if kind.gpus else ()
                self.start(kind, [_request_at(kind, place) for place in places], devices)
        if not self.starting:
            ray.get(relay.release.remote(number))

    def _end(self, name: str) -> None:
        for actor in self.actors.pop(name, ()):
            ray.kill(actor)

    def close(self) -> None:
        for name in [*self.actors]:
            self._end(name)
        self.doors.close()


class _Server:
    """An actor that runs one server, and lives as long as it does."""

    def __init__(self, job: Job, name: str, command: str, number: int) -> None:
        self._job, self._which = job, (name, number)
        host, self._node = here()
        self._address = Address(host, free_port(host))
        self._last: deque[str] = deque(maxlen=1)
        process = RankProcess(
            [command.replace("{host}", host).replace("{port}", str(self._address.port))],
            job.environment,
            job.directory,
            self._hear,
            PROGRAM,
        )
        threading.Thread(target=self._watch, args=(process,), daemon=True).start()

    def _hear(self, stream: Stream, line: str) -> None:
        """Write a line of the server into the log of Ray's worker."""
        if line.strip():
            self._last.append(line.strip())
        sys.stdout.write(line)
        sys.stdout.flush()

    def _watch(self, process: RankProcess) -> None:
        relay, is_told = self._job.relay, False
        while process.is_alive:
            time.sleep(BEAT)
            if not is_told and is_ready(self._address):
                ray.get(relay.serve.remote(*self._which, self._node, self._address))
                is_told = True
        code = process.wait()
        last = self._last[0][-300:] if self._last else ""
        ray.get(relay.end_server.remote(*self._which, self._node, code, last))
        os._exit(1)  # Ray starts the actor again
