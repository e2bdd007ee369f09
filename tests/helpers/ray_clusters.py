"""Simulated nodes of a Ray cluster on this machine, and launches on them.

    with nodes(2) as cluster:
        launch("sft", keys, cluster)        the command, to its end
        cluster.remove_node(...)

Each node has Ray processes of its own and shares all else; those of a killed node are killed (SIGKILL), with the ranks
on it.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import torch
from ray.cluster_utils import Cluster
from tests.helpers.chat_runs import column
from tests.helpers.online_runs import train
from tests.helpers.sampling_server import SamplingServer
from transformers import AutoModelForCausalLM

NODE: dict[str, Any] = {
    "num_cpus": 1,
    "num_gpus": 0,
    "object_store_memory": 80 * 2**20,
    "include_dashboard": False,
}
LIMIT = 600.0
"""Seconds of a launch on a busy machine."""


@contextmanager
def nodes(num_nodes: int, **options: Any) -> Iterator[Cluster]:
    """A cluster, until the end of the block."""
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, **options})
    try:
        for _ in range(num_nodes - 1):
            cluster.add_node(**{**NODE, **options})
        yield cluster
    finally:
        cluster.shutdown()


def node_of(cluster: Cluster, pid: int) -> Any:
    """The node, other than the head, on which a process runs: Ray's node has started it, or what started it."""
    raylets = {
        info.process.pid: node
        for node in cluster.worker_nodes
        for infos in node.all_processes.values()
        for info in infos
    }
    while pid > 1 and pid not in raylets:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return raylets.get(pid)


def processes_of(node: Any) -> list[int]:
    """The processes of a node, and all that they have started."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [info.process.pid for infos in node.all_processes.values() for info in infos]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def begin(
    keys: Mapping[str, Any], address: str, *words: str, **environment: str
) -> subprocess.Popen[str]:
    """``taut launch ray`` with the keys of a run in a file, and further words."""
    out = Path(keys["out"])
    file = out.with_name(f"{out.name}.toml")
    file.write_text(as_toml(keys))
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "taut", "launch", "ray", str(file)),
            *(f"address={address}", "gpus_per_node=0", *words),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def as_toml(keys: Mapping[str, Any]) -> str:
    """Dotted keys are TOML's own; values of JSON are, but for tables."""
    return "".join(f"{key} = {_value(value)}\n" for key, value in keys.items())


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value)


def serving(folder: Path) -> str:
    """The setting with which ``taut launch`` starts roll-out servers (sampling_server.py). ``folder`` is made, for what
    they write.
    """
    folder.mkdir()
    python = shlex.quote(sys.executable)
    return f"server_command=exec {python} -m tests.helpers.sampling_server {{model}} {{host}} {{port}} {folder}"


def losses_alone(keys: Mapping[str, Any], out: Path) -> list[float]:
    """The losses of the run in this process, which asks one server that samples."""
    model = AutoModelForCausalLM.from_pretrained(keys["model"], dtype=torch.float32)
    with SamplingServer(model=model) as server:
        urls = {"rollout.engine": "server", "rollout.urls": server.url}
        train({**keys, **urls, "out": str(out)})
    return column(out, "loss")
