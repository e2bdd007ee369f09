"""Where a launch may run: the cluster it connects to, whether ranks and servers have room at the same time, and whether
each node on which they may start can run them. What is lacking is one line that names the node.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from taut.cluster.look import Expected, look
from taut.cluster.servers import Servers
from taut.errors import ClusterError
from taut.io.console import counted

LOCAL = "local"
"""The address that starts Ray on this machine, for this launch alone."""
ANSWERING = 60.0
"""Seconds in which a node says whether it fits: a process of Ray starts there and imports taut."""


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


def connect(address: str | None, ranks: Ranks, kinds: Sequence[Servers]) -> None:
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


def here() -> tuple[str, str]:
    """The address of this process's node in the cluster, and the node as it is shown. In a worker
    ``ray.util.get_node_ip_address`` is the address of a way to the internet, which may be another one.
    """
    node_id = ray.get_runtime_context().get_node_id()
    (host,) = (node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id)
    return host, _name_of(host, node_id)


def require_room(ranks: Ranks, kinds: Sequence[Servers], wait: float) -> Any:
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
                raise ClusterError(no_room(ranks, kinds, wait, [*groups.values()][:-1]))
        return groups.pop("servers", None)
    finally:
        for group in groups.values():
            remove_placement_group(group)


def _size(bundle: Mapping[str, float]) -> tuple[float, float]:
    return bundle.get("GPU", 0.0), bundle["CPU"]


def is_short(ranks: Ranks) -> bool:
    """Whether what is needed is not there, though all of it were free, or something waits for a place."""
    groups = placement_group_table().values()
    num_fitting = sum(
        min(int(node.total.get(name, 0) // number) for name, number in ranks.bundles[0].items())
        for node in _nodes()
    )
    return num_fitting < len(ranks.bundles) or any(group["state"] == "PENDING" for group in groups)


def no_room(ranks: Ranks, kinds: Sequence[Servers], wait: float, groups: Sequence[Any] = ()) -> str:
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


def require_fit(expected: Expected, ranks: Ranks, kinds: Sequence[Servers]) -> None:
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
