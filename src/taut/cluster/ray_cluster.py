"""Ray as the engine that places ranks, notices dead ones and starts them again. The only file that imports ray.

    connect -> is there room? -> look at every node -> TorchTrainer: on every worker a rank process -> its exit code

Ray Train starts one worker a rank, forms their group, and starts all of them again, as many as there is room for, when
one fails (https://docs.ray.io, ``ray.train.torch.TorchTrainer``). A worker only supervises: the rank is a process of
its own (rank_process.py), which ends by exit codes and signals as under torchrun and knows nothing of Ray. Between the
workers and the command is one actor, ``Relay``, on the node of the command: lines and exit codes come, signals go.

Servers of roll-outs and of rewards (servers.py) are actors in a placement group of their own, which has to be had at
the same time as that of the ranks: Ray Train makes one for its workers, all alike, and takes no other. Each actor runs
one server; where that dies the actor dies with it, and Ray starts it again, on its node or, where that is gone, on
another. Ranks that are started again find the servers as they are.

Servers on the GPUs of the ranks (``is_colocated``) are actors that take nothing of Ray, each bound to the node of some
ranks and started with their CUDA_VISIBLE_DEVICES, once Ray Train has placed its workers; these wait for the servers
before they start the ranks. Workers that are placed elsewhere get new servers, behind the same doors.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

# Before ray is imported: nothing is reported to its makers, and nothing is told of what taut does not use.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
os.environ.setdefault("RAY_TRAIN_METRICS_ENABLED", "0")
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")

import ray
from ray.exceptions import (
    GetTimeoutError,
    NodeDiedError,
    RayError,
    TaskUnschedulableError,
    WorkerCrashedError,
)
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from taut.cluster.attempts import STATED, Attempt
from taut.cluster.look import Expected, free_port, look, port_in_use
from taut.cluster.rank_process import RankProcess, Stream
from taut.cluster.servers import (
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
from taut.errors import ClusterError, Interrupted, RankFailed
from taut.io.console import counted
from taut.train.signals import Interrupts

LOCAL = "local"
"""The address that starts Ray on this machine, for this launch alone."""
BEAT = 0.25
"""Seconds between two questions of a worker, and of the command, to the relay."""
ANSWERING = 60.0
"""Seconds in which a node says whether it fits: a process of Ray starts there and imports taut."""
ENDING = 30.0
"""Seconds in which all ranks end, once the first has."""


class Ranks(NamedTuple):
    """What is placed."""

    nodes: int
    per_node: int
    fewest: int
    most: int
    """Ranks in all: with ``fewest`` the run goes on, ``most`` are started if there is room."""
    cpus: int
    """Of one rank."""
    gpus: int
    """Of one rank: 0 or 1."""

    @property
    def is_elastic(self) -> bool:
        return self.fewest < self.most

    @property
    def wanted(self) -> str:
        """What has to be had, in words."""
        return f"{self.fewest} ranks" if self.is_elastic else f"{self.nodes} nodes"

    @property
    def one(self) -> dict[str, float]:
        """The resources of one rank."""
        return {"CPU": float(self.cpus), **({"GPU": float(self.gpus)} if self.gpus else {})}

    @property
    def bundles(self) -> list[dict[str, float]]:
        """What has to be had at the same time, each on a node of its own; of an elastic run, anywhere."""
        if self.is_elastic:
            return [self.one] * self.fewest
        return [{name: number * self.per_node for name, number in self.one.items()}] * self.nodes


@dataclass(frozen=True)
class Job:
    """What the workers need to know."""

    words: Sequence[str]
    directory: str
    environment: Mapping[str, str]
    port: int
    """On which the ranks meet; 0: a free one."""
    waits: bool = False
    """Whether ranks start once there are servers on their GPUs."""
    relay: Any = None


@dataclass
class Relay:
    """An actor between the workers and the command."""

    attempt: Attempt | None = None
    number: int = 0
    """Attempts so far."""
    signalled: int | None = None
    heard: float = field(default_factory=time.monotonic)
    """When a rank was last heard of."""
    lines: list[tuple[Stream, str]] = field(default_factory=list)
    servers: dict[tuple[str, int], Address] = field(default_factory=dict)
    """Where each server was when it last said that it is ready."""
    server_failures: dict[str, str] = field(default_factory=dict)
    """How a server of each kind last ended."""
    places: dict[int, Place] = field(default_factory=dict)
    """Those of the ranks of this attempt."""
    released: int = -1
    """The last attempt whose ranks may start."""

    async def begin(self, size: int) -> int:
        """A new attempt; its number. The workers of an earlier one are gone."""
        self.attempt, self.places = Attempt(self.number, size), {}
        self.number += 1
        return self.attempt.number

    async def join(self, number: int, rank: int, node: str, place: Place) -> None:
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
        """What a rank prints. What ends taut on several nodes is printed once."""
        attempt = self._current(number)
        for stream, line in lines:
            is_said = attempt is not None and attempt.error is not None and line.startswith(STATED)
            if not is_said:
                self.lines.append((stream, line))
            if attempt is not None:
                attempt.hear(stream, line)

    async def heed(self, number: int) -> int | None:
        """The signal that the rank gets; None: it goes on."""
        if self._current(number) is not None:
            self.heard = time.monotonic()
        return self.signalled

    async def ended(self, number: int, rank: int, code: int) -> str | None:
        """Why this attempt is followed by another, once all ranks have ended; None: it is the last one."""
        attempt = self._current(number)
        deadline = time.monotonic() + ENDING
        if attempt is not None:
            attempt.codes[rank] = code
            while not attempt.has_ended and time.monotonic() < deadline:
                self.heard = time.monotonic()
                await asyncio.sleep(0.05)
        if attempt is None or attempt is not self.attempt:
            return "another attempt has begun"
        return attempt.failure(self.signalled)

    async def serve(self, name: str, number: int, node: str, address: Address) -> None:
        """A server is ready."""
        self.servers[name, number] = address
        self._note(f"{name} {number} on {node} is ready")

    async def end_server(self, name: str, number: int, node: str, code: int, line: str) -> None:
        """A server has ended, which none should. ``line``: the last that it printed."""
        said = f": {line}" if line else ""
        self.server_failures[name] = f"{name} {number} on {node} ended with {code}{said}"
        self._note(self.server_failures[name])

    async def take_servers(self) -> tuple[dict[tuple[str, int], Address], dict[str, str]]:
        return self.servers, self.server_failures

    async def forget_servers(self, name: str) -> None:
        """The servers of this name have been ended."""
        self.servers = {key: place for key, place in self.servers.items() if key[0] != name}
        self.server_failures.pop(name, None)

    async def take_places(self) -> tuple[int, list[Place]]:
        """The number of the attempt, and the places of its ranks, once all have one."""
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
        """The lines since the last time, and for how many seconds no rank has been heard of."""
        lines, self.lines = self.lines, []
        return lines, time.monotonic() - self.heard

    async def pass_on(self, number: int) -> bool:
        """Send a signal to all ranks. Whether there are any."""
        self.signalled = number
        attempt = self.attempt
        return attempt is not None and not attempt.has_ended and time.monotonic() - self.heard < 2

    async def last(self) -> tuple[Attempt | None, int]:
        """The last attempt, and how many there were."""
        return self.attempt, self.number

    def _current(self, number: int) -> Attempt | None:
        attempt = self.attempt
        return attempt if attempt is not None and attempt.number == number else None

    def _note(self, text: str) -> None:
        self.lines.append(("stderr", f"taut: launch: {text}\n"))


def launch(
    job: Job,
    ranks: Ranks,
    expected: Expected,
    kinds: Sequence[Servers] = (),
    *,
    address: str | None,
    restarts: int,
    wait: float,
    resize_every: float,
) -> int:
    """Run the job on a cluster; its exit code. Raises ClusterError where there is no room for it or a node does not
    fit, RankFailed where ranks have died more than ``restarts`` times. ``kinds``: servers that run as
    long; the run's words get where they answer.
    """
    _connect(address, ranks, kinds)
    with Interrupts.watching() as interrupts:
        try:
            with interrupts.at_once():
                group = _require_room(ranks, kinds, wait)
                _require_fit(expected, ranks, kinds)
                here = ray.get_runtime_context().get_node_id()
                waits = any(kind.is_colocated for kind in kinds)
                job = replace(job, relay=_on(here, Relay, 4 * ranks.most + 16), waits=waits)
            with _serving(job, kinds, group, interrupts) as placed:
                return _run(
                    _pointed(job, placed.doors),
                    ranks,
                    expected.folder,
                    interrupts,
                    placed,
                    restarts,
                    wait,
                    resize_every,
                )
        finally:
            ray.shutdown()


def _on(node_id: str, cls: type[Any], max_concurrency: int) -> Any:
    """An actor on a node, which takes none of its resources."""
    place = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return (
        ray.remote(num_cpus=0, max_concurrency=max_concurrency)(cls)
        .options(scheduling_strategy=place)
        .remote()
    )


def _pointed(job: Job, doors: Doors) -> Job:
    """The job whose run asks the servers behind the doors."""
    words = list(job.words)
    for name, addresses in doors.addresses.items():
        urls = [f"http://{host}:{port}" for host, port in addresses]
        if name == ROLLOUT_SERVER:
            filled = json.dumps([f"{url}/v1" for url in urls])
            words += ["rollout.engine=server", f"rollout.urls={filled}"]
        else:
            words = [word.replace(REWARDS_PLACE, urls[0]) for word in words]
    return replace(job, words=words)


def _connect(address: str | None, ranks: Ranks, kinds: Sequence[Servers]) -> None:
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == LOCAL:
        settings |= {
            "address": LOCAL,
            "include_dashboard": False,
            "num_cpus": ranks.cpus * ranks.most
            + sum(kind.cpus * kind.number for kind in kinds if not kind.is_colocated),
            "object_store_memory": 80 * 2**20,
        }
    else:
        settings["address"] = address or os.environ.get("RAY_ADDRESS") or "auto"
    named = address or os.environ.get("RAY_ADDRESS")
    where = f"address={named}" if named else "a Ray cluster of this machine"
    try:
        if named is not None and named != LOCAL:  # Ray would try for minutes
            host, _, port = named.rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(**settings)
    except (ConnectionError, ValueError, RuntimeError, RayError, OSError) as error:
        text = " ".join(str(error).split())
        if "Version mismatch" in text:
            raise ClusterError(
                f"{where}: {text}; expected the same versions; start the cluster from this environment"
            ) from error
        raise ClusterError(
            f"{where}: found none ({text[:200]}); expected a running cluster; run: ray start --head (and ray start "
            f"--address=HOST:6379 on the other machines), or set address={LOCAL} for this machine alone"
        ) from error


class _Node(NamedTuple):
    name: str
    id: str
    total: Mapping[str, float]
    free: Mapping[str, float]


def _nodes() -> list[_Node]:
    """The nodes that are alive."""
    from ray._private.state import available_resources_per_node  # no public function tells

    free = available_resources_per_node()
    return [
        _Node(
            _name_of(node["NodeManagerAddress"], node["NodeID"]),
            node["NodeID"],
            node["Resources"],
            free.get(node["NodeID"], {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _name_of(address: str, node_id: str) -> str:
    """A node as it is shown."""
    return f"{address} ({node_id[:6]})"


def _here() -> tuple[str, str]:
    """The address of this process's node in the cluster, and the node as it is shown. In a worker
    ``ray.util.get_node_ip_address`` is the address of a way to the internet, which may be another one.
    """
    node_id = ray.get_runtime_context().get_node_id()
    (host,) = (node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id)
    return host, _name_of(host, node_id)


def _require_room(ranks: Ranks, kinds: Sequence[Servers], wait: float) -> Any:
    """Raise ClusterError unless ranks and servers can be placed at the same time within ``wait`` seconds. The placement
    group of the servers, which is theirs from now on; Ray Train makes that of the ranks again.
    """
    deadline = time.monotonic() + wait
    kinds = [kind for kind in kinds if not kind.is_colocated]
    strategy = "PACK" if ranks.is_elastic else "STRICT_SPREAD"
    asked = [("ranks", ranks.bundles, strategy)]
    if kinds:
        bundles = [kind.one for kind in kinds for _ in range(kind.number)]
        asked.append(("servers", bundles, "PACK"))
    # What is hardest to place comes first: Ray places a group without regard to the next one.
    asked.sort(key=lambda group: max(_size(bundle) for bundle in group[1]), reverse=True)
    groups: dict[str, Any] = {}
    try:
        for name, bundles, strategy in asked:
            groups[name] = placement_group(bundles, strategy=strategy)
            if not groups[name].wait(max(1.0, deadline - time.monotonic())):
                raise ClusterError(_missing(ranks, kinds, wait, [*groups.values()][:-1]))
        return groups.pop("servers", None)
    finally:
        for group in groups.values():
            remove_placement_group(group)


def _size(bundle: Mapping[str, float]) -> tuple[float, float]:
    return bundle.get("GPU", 0.0), bundle["CPU"]


def _is_short(ranks: Ranks) -> bool:
    """Whether what is needed is not there, though all of it were free, or something waits for a place."""
    groups = placement_group_table().values()
    num_fitting = sum(
        min(int(node.total.get(name, 0) // number) for name, number in ranks.bundles[0].items())
        for node in _nodes()
    )
    return num_fitting < len(ranks.bundles) or any(group["state"] == "PENDING" for group in groups)


def _missing(
    ranks: Ranks, kinds: Sequence[Servers], wait: float, groups: Sequence[Any] = ()
) -> str:
    """Which node lacks what, of all that is needed at the same time. ``groups``: what is set aside for this launch."""
    asked = [(ranks.wanted, len(ranks.bundles), ranks.bundles[0])]
    asked += [(kind.wanted, kind.number, kind.one) for kind in kinds]
    wanted = [f"{words} with {_listed(one)} each" for words, _, one in asked]
    nodes, ours = _nodes(), _set_aside(groups)
    lacking, found = [], Counter[str]()
    for node in nodes:
        free = {name: node.free.get(name, 0) + ours[node.id][name] for name in ("CPU", "GPU")}
        found.update(free)
        short = [
            f"{free[name]:g} of {node.total.get(name, 0):g} {name} free"
            for name in ("CPU", "GPU")
            if any(free[name] < one.get(name, 0) for _, _, one in asked)
        ]
        lacking.append(f"{node.name} has {' and '.join(short) or 'room'}")
    total = ""
    if kinds:
        needed = Counter[str]()
        for _, number, one in asked:
            needed.update({name: number * amount for name, amount in one.items()})
        needs = [f"{amount:g} {name} of {found[name]:g} free" for name, amount in needed.items()]
        total = f": {' and '.join(needs)} in all"
    return (
        f"no room for {' and '.join(wanted)}{total}, for {wait:.0f} s; found {counted(len(nodes), 'nodes')}: "
        f"{'; '.join(lacking)}; add nodes, end what runs there, or ask for less"
    )


def _listed(need: Mapping[str, float]) -> str:
    return " and ".join(f"{number:g} {name}" for name, number in need.items())


def _set_aside(groups: Sequence[Any]) -> Mapping[str, Mapping[str, float]]:
    """What placement groups hold of each node."""
    held: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for group in groups:
        table = placement_group_table(group)
        for number, node in table["bundles_to_node_id"].items():
            held[node].update(table["bundles"][number])
    return held


def _require_fit(expected: Expected, ranks: Ranks, kinds: Sequence[Servers]) -> None:
    """Raise ClusterError where a node on which ranks or servers may start lacks something. One that dies while it is
    asked, or is dead and not yet noticed to be, gets none of them: it lacks nothing.
    """
    ask = ray.remote(num_cpus=0, max_retries=0)(look)
    needs = [ranks.one, *(kind.one for kind in kinds if not kind.is_colocated)]
    asked = [
        (
            node.name,
            ask.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)
            ).remote(expected),
        )
        for node in _nodes()
        if any(
            all(node.total.get(name, 0) >= least for name, least in need.items()) for need in needs
        )
    ]
    for name, answer in asked:
        try:
            problem = ray.get(answer, timeout=ANSWERING)
        except (NodeDiedError, TaskUnschedulableError, WorkerCrashedError):
            continue
        except GetTimeoutError:
            raise ClusterError(
                f"node {name} has not answered for {ANSWERING:.0f} s; expected one that is alive; see to it, or wait "
                "until Ray has noticed that it is gone (docs/ray.md) and launch again"
            ) from None
        except RayError as error:
            cause = " ".join(str(error).split())[-200:]
            raise ClusterError(
                f"node {name} cannot run taut ({cause}); expected taut in the Python of its Ray; install it there"
            ) from error
        if problem is not None:
            raise ClusterError(f"node {name} {problem}")


def _run(
    job: Job,
    ranks: Ranks,
    folder: str,
    interrupts: Interrupts,
    placed: _PlacedServers,
    restarts: int,
    wait: float,
    resize_every: float,
) -> int:
    """Start the trainer, and stand between it and the terminal until it ends."""
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = f"{wait:g}"
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    relay = job.relay
    trainer = TorchTrainer(
        partial(_supervise, job),
        torch_config=TorchConfig(backend="gloo", timeout_s=60),
        scaling_config=ScalingConfig(
            num_workers=(ranks.fewest, ranks.most) if ranks.is_elastic else ranks.most,
            resources_per_worker=ranks.one,
            use_gpu=bool(ranks.gpus),
            elastic_resize_monitor_interval_s=resize_every,
            placement_strategy="SPREAD" if ranks.per_node == 1 else "PACK",
        ),
        run_config=RunConfig(
            name="train",
            storage_path=folder,
            failure_config=FailureConfig(max_failures=restarts),
            logging_config=LoggingConfig(log_level="ERROR"),
        ),
    )
    failures: list[Exception] = []
    fit = threading.Thread(target=_fit, args=(trainer, failures), daemon=True)
    fit.start()
    passed = False
    while fit.is_alive():
        fit.join(BEAT)
        silence = _print_lines(relay)
        placed.lead()
        placed.follow_ranks()
        if interrupts.received is not None and not passed:
            passed = ray.get(relay.pass_on.remote(_number_of(interrupts.received)))
            if not passed:  # nothing runs that could save anything
                interrupts.check()
        if silence > wait and _is_short(ranks):
            raise ClusterError(_missing(ranks, (), wait))
    _print_lines(relay)
    attempt, count = ray.get(relay.last.remote())
    return _outcome(attempt, count, failures, interrupts, restarts)


def _fit(trainer: Any, failures: list[Exception]) -> None:
    """In a thread, so that signals reach the command and not Ray's handler."""
    try:
        trainer.fit()
    except Exception as error:  # noqa: BLE001 - looked at in the main thread
        failures.append(error)


def _print_lines(relay: Any) -> float:
    """Print what has come; for how many seconds no rank has been heard of."""
    lines, silence = ray.get(relay.take.remote())
    for name, line in lines:
        stream = sys.stdout if name == "stdout" else sys.stderr
        stream.write(line)
    sys.stdout.flush()
    return float(silence)


def _outcome(
    attempt: Attempt | None,
    count: int,
    failures: Sequence[Exception],
    interrupts: Interrupts,
    restarts: int,
) -> int:
    signalled = None if interrupts.received is None else _number_of(interrupts.received)
    if attempt is None:
        interrupts.check()
        cause = " ".join(str(failures[0] if failures else "").split())[-300:]
        raise ClusterError(
            f"Ray started no rank ({cause}); expected workers that meet; see the logs of its session"
        )
    why = attempt.failure(signalled)
    if why is not None and failures:
        raise RankFailed(
            f"{why}, after {count - 1} restart{'s' * (count != 2)} (restarts={restarts}); expected the ranks to live; "
            "their lines above tell more; the same command with resume=true goes on"
        )
    return attempt.exit_code


def _number_of(name: str) -> int:
    return int(signal.Signals[name])


def _supervise(job: Job) -> None:
    """On a worker of Ray Train: start the rank, hand on what it says and what it is told, until it ends. Raises where
    another attempt has to follow.
    """
    import torch.distributed as dist
    from ray.train import get_context

    context = get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    host = os.environ["MASTER_ADDR"]
    shared: list[Any] = [None]
    if rank == 0:
        number = ray.get(job.relay.begin.remote(size))
        if job.port and port_in_use(host, job.port):
            line = f"{STATED}port {job.port} of {host} is in use; expected a free one; set port=0 for any\n"
            ray.get(job.relay.say.remote(number, [("stderr", line)]))
            shared = [(number, None)]
        else:
            shared = [(number, job.port or free_port(host))]
    dist.broadcast_object_list(shared)
    number, port = shared[0]
    _, node = _here()
    devices = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    place = Place(ray.get_runtime_context().get_node_id(), tuple(devices))
    ray.get(job.relay.join.remote(number, rank, node, place))
    code = 2 if port is None else _run_rank(job, number, port)
    failure = ray.get(job.relay.ended.remote(number, rank, code))
    if failure is not None:
        raise RuntimeError(failure)


def _run_rank(job: Job, number: int, port: int) -> int:
    """The exit code of the rank."""
    relay = job.relay
    while job.waits and not ray.get(relay.is_released.remote(number)):
        if ray.get(relay.heed.remote(number)) is not None:
            return Interrupted.exit_code
        time.sleep(BEAT)
    lines: SimpleQueue[tuple[Stream, str]] = SimpleQueue()
    process = RankProcess(
        job.words,
        {**job.environment, "MASTER_PORT": str(port)},
        job.directory,
        lambda stream, line: lines.put((stream, line)),
    )
    passed = False
    while process.is_alive:
        time.sleep(BEAT)
        _hand_on(relay, number, lines)
        received = ray.get(relay.heed.remote(number))
        if received is not None and not passed:
            process.signal(received)
            passed = True
    code = process.wait()
    _hand_on(relay, number, lines)
    return code


def _hand_on(relay: Any, number: int, lines: SimpleQueue[tuple[Stream, str]]) -> None:
    waiting = [lines.get() for _ in range(lines.qsize())]
    if waiting:
        ray.get(relay.say.remote(number, waiting))


# -- servers


@contextmanager
def _serving(
    job: Job, kinds: Sequence[Servers], group: Any, interrupts: Interrupts
) -> Iterator[_PlacedServers]:
    """The servers, all ready but those on the GPUs of the ranks. Raises ClusterError where one ends before, or is not
    ready in time.
    """
    host, _ = _here()
    placed = _PlacedServers(job, kinds, host, Doors(host, kinds))
    try:
        bundle = 0
        for kind in kinds:
            if not kind.is_colocated:
                placed.start(kind, [_request(kind, group, bundle + n) for n in range(kind.number)])
                bundle += kind.number
        with interrupts.at_once():
            while placed.starting:
                placed.lead()
                _print_lines(job.relay)
                time.sleep(BEAT)
        yield placed
    finally:
        placed.close()


def _request(kind: Servers, group: Any, bundle: int) -> dict[str, Any]:
    """What Ray is asked for, for a server in a placement group."""
    return {
        "num_cpus": kind.cpus,
        "num_gpus": kind.gpus,
        "max_restarts": kind.restarts,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle),
    }


def _request_at(kind: Servers, place: Place) -> dict[str, Any]:
    """The same for a server on GPUs that are the ranks'. It is started again on its node or, with new ranks, not at
    all.
    """
    return {
        "num_cpus": 0,
        "num_gpus": 0,
        "max_restarts": kind.restarts,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(place.node_id, soft=False),
    }


@dataclass
class _PlacedServers:
    """The servers of a launch, and the doors that lead to them."""

    job: Job
    kinds: Sequence[Servers]
    host: str
    """Where the doors are."""
    doors: Doors
    actors: dict[str, list[Any]] = field(default_factory=dict)
    starting: dict[str, float] = field(default_factory=dict)
    """The kinds that are not all ready yet, and when they were started."""
    attempt: int = -1
    """The ranks next to which servers were last placed."""
    places: list[Place] = field(default_factory=list)

    def start(
        self,
        kind: Servers,
        requests: Sequence[Mapping[str, Any]],
        devices: Sequence[str] = (),
    ) -> None:
        """``devices``: the CUDA_VISIBLE_DEVICES of each; where there are none Ray sets it."""
        command = kind.command.replace("{door}", self.host)
        self.starting[kind.name] = time.monotonic()
        self.actors[kind.name] = actors = []
        for number, request in enumerate(requests):
            visible = {"CUDA_VISIBLE_DEVICES": devices[number]} if devices else {}
            job = replace(self.job, environment={**self.job.environment, **visible})
            actor = ray.remote(_Server).options(**request)
            actors.append(actor.remote(job, kind.name, command, number))

    def lead(self) -> None:
        """Let the doors lead to where the servers are now. While a kind is starting, none may end."""
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
        """Start the servers on the GPUs of the ranks where those have been placed, and let these ranks start once their
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
    """The actor of a server, which lives as long as the server."""

    def __init__(self, job: Job, name: str, command: str, number: int) -> None:
        self._job, self._which = job, (name, number)
        host, self._node = _here()
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
        """Into the log of Ray's worker."""
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
