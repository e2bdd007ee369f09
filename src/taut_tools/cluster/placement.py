"""Connect to a Ray cluster, and check that ranks and servers have room at the same time, and that each node on which
they may start can run them. An error is one line that names the node.
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

from taut.errors import ClusterError
from taut.io.console import counted
from taut_tools.cluster.preflight import Expected, preflight
from taut_tools.cluster.servers import Servers

LOCAL = "local"
"""The address that starts Ray on this machine, for this launch alone."""
ANSWERING = 60.0
"""Seconds in which a node answers whether it fits: a process of Ray starts there and imports taut."""


class Ranks(NamedTuple):
    """The ranks that a launch places, and the resources of each."""

    nodes: int
    per_node: int
    fewest: int
    """Number of ranks in all with which the run still goes on."""
    most: int
    """Number of ranks in all that are started if there is room."""
    cpus: int
    """CPUs of one rank."""
    gpus: int
    """GPUs of one rank: 0 or 1."""

    @property
    def is_elastic(self) -> bool:
        return self.fewest < self.most

    @property
    def wanted(self) -> str:
        """The required ranks or nodes, in words."""
        return f"{self.fewest} ranks" if self.is_elastic else f"{self.nodes} nodes"

    @property
    def one(self) -> dict[str, float]:
        """The resources of one rank."""
        return {"CPU": float(self.cpus), **({"GPU": float(self.gpus)} if self.gpus else {})}

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Resources required at the same time: of each node, or of each rank of an elastic run."""
        if self.is_elastic:
            return [self.one] * self.fewest
        return [{name: number * self.per_node for name, number in self.one.items()}] * self.nodes


def connect(address: str | None, ranks: Ranks, kinds: Sequence[Servers]) -> None:
    """Connect to the cluster, or start Ray here for ``address=local``. Raises ClusterError."""
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
            f"{where}: found none ({text[:200]}); expected a running cluster; run ray start --head (docs/cluster.md), "
            f"or set address={LOCAL} for this machine alone"
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
    """The name of a node in messages."""
    return f"{address} ({node_id[:6]})"


def here() -> tuple[str, str]:
    """The address of this process's node in the cluster, and its name in messages. Not by
    ``ray.util.get_node_ip_address``: in a worker that is an address towards the internet, which may be another one.
    """
    node_id = ray.get_runtime_context().get_node_id()
    (host,) = (node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id)
    return host, _name_of(host, node_id)


def require_room(ranks: Ranks, kinds: Sequence[Servers], wait: float) -> Any:
    """Return the servers' placement group, or None without servers. Raises ClusterError unless ranks and servers can be
    placed at the same time within ``wait`` seconds. The ranks' group is removed: Ray Train makes its own.
    """
    deadline = time.monotonic() + wait
    kinds = [kind for kind in kinds if not kind.is_colocated]
    strategy = "PACK" if ranks.is_elastic else "STRICT_SPREAD"
    asked = [("ranks", ranks.bundles, strategy)]
    if kinds:
        bundles = [kind.one for kind in kinds for _ in range(kind.number)]
        asked.append(("servers", bundles, "PACK"))
    # The hardest to place comes first: Ray places a group without regard to the next one.
    asked.sort(
        key=lambda group: max((bundle.get("GPU", 0.0), bundle["CPU"]) for bundle in group[1]),
        reverse=True,
    )
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


def is_short(ranks: Ranks) -> bool:
    """Whether the cluster is too small for the ranks even if all of it were free, or some group waits for a place."""
    groups = placement_group_table().values()
    num_fitting = sum(
        min(int(node.total.get(name, 0) // number) for name, number in ranks.bundles[0].items())
        for node in _nodes()
    )
    return num_fitting < len(ranks.bundles) or any(group["state"] == "PENDING" for group in groups)


def no_room(ranks: Ranks, kinds: Sequence[Servers], wait: float, groups: Sequence[Any] = ()) -> str:
    """The message that lists what each node lacks, of all that is needed at the same time. ``groups`` are placed for
    this launch: what they hold counts as free.
    """
    asked = [(ranks.wanted, len(ranks.bundles), ranks.bundles[0])]
    asked += [(kind.wanted, kind.number, kind.one) for kind in kinds]
    wanted = [f"{words} with {_listed(one)} each" for words, _, one in asked]
    ours: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for group in groups:
        table = placement_group_table(group)
        for number, node_id in table["bundles_to_node_id"].items():
            ours[node_id].update(table["bundles"][number])
    # Compare each node with the largest need.
    nodes = _nodes()
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
    # Where ranks and servers share the cluster, also compare the sums.
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


def require_fit(expected: Expected, ranks: Ranks, kinds: Sequence[Servers]) -> None:
    """Raise ClusterError where a node on which ranks or servers may start lacks something. A node that is dead, or dies
    while it is asked, passes: Ray places nothing on it.
    """
    # Ask all nodes at once, each in a process of Ray on it.
    ask = ray.remote(num_cpus=0, max_retries=0)(preflight)
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
                f"node {name} has not answered for {ANSWERING:.0f} s; expected one that is alive; mend it, or launch "
                "again once Ray has noticed its end (docs/cluster.md)"
            ) from None
        except RayError as error:
            cause = " ".join(str(error).split())[-200:]
            raise ClusterError(
                f"node {name} cannot run taut ({cause}); expected taut in the Python of its Ray; install it there"
            ) from error
        if problem is not None:
            raise ClusterError(f"node {name} {problem}")
