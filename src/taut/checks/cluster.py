"""The preflight: whether the machines of a run are ready for it, and alike.

``taut check --cluster`` asks these checks; a run on several machines asks them too before it reads its data. Every
question is asked of all ranks together, and all ranks come to the same finding. The first rank of a machine (a *node*)
answers for it. The finding names the nodes whose answer differs from most (in a tie, from the first node's), and a node
that cannot answer, with its error.

    cluster.processes    processes, and the nodes they are on
    cluster.versions     python, taut and its source, torch, transformers, ..., CUDA, driver, NCCL
    cluster.settings     the configuration that each node has read
    cluster.output       one folder, or one on each node: the other nodes look for a file that the first rank writes
    cluster.cache        the cache of tokenized data, in the same way
    cluster.data         the files that the run reads, by hash
    cluster.model        the models that it reads, by hash
    cluster.clocks       differences of the nodes' clocks
    cluster.gpus         names and memory of the devices that compute
    cluster.all_reduce   whether sums over ranks are right, and their speed
    cluster.disk         room for output, cache and temporary files

Files are hashed whole up to ``BUDGET`` bytes in all; beyond that each file's size, its ends and blocks between them.
That finds another model or other data, but not a single damaged byte in a large file. Takes seconds and no model in
memory.
"""

from __future__ import annotations

import glob
import hashlib
import os
import secrets
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from taut.checks.registry import Finding, check, failed, passed, skip_if, warned
from taut.config import to_dict, user_path
from taut.data.settings import IS_PATTERN
from taut.data.store.cache import directory_of
from taut.errors import CheckFailed, TautError, redacted_in
from taut.io import files
from taut.io.console import call_if_slow, counted, print_line
from taut.methods.method import RunConfig
from taut.models.load import load_config
from taut.run.origin import describe, versions
from taut.train import distributed
from taut.train.distributed import Ranks, outcome_of
from taut.train.run_dir import dotted
from taut.train.watch import this_machine

T = TypeVar("T")

DEADLINE = 60.0
"""Maximum seconds for ranks to connect, or to finish a sum."""
MUST_AGREE = ("python", "taut", "taut's source", "torch", "transformers", "cuda", "nccl")
"""Versions that may not differ, because ranks would compute or communicate differently. Other differences are a
warning."""
BUDGET, BLOCK = 2 * 2**30, 2**20
"""Bytes of the files of one question that a node reads, and of one block."""
CLOCK_LIMIT, CLOCK_ROUNDS = 2.0, 5
"""Seconds that clocks may be apart, and how often they are compared: the median counts."""
SUMMED = {"cuda": 2**26, "cpu": 2**22}
"""Count of float32 numbers to sum, by the kind of device."""
SLOWEST = {"cuda": 1e9, "cpu": 5e7}
"""Bytes a second on each link below which there is a warning: a GPU whose network is no faster than 10 Gbit/s waits
for it, and a CPU's is then slower than 1 Gbit/s."""
NETWORKS = {"cuda": "NCCL", "cpu": "gloo"}
ROOM = 2**30
"""Minimum free bytes in each place, beyond the files that go there."""


@dataclass(frozen=True)
class Cluster:
    """The ranks of a run, by the machines that they are on."""

    run: RunConfig
    ranks: Ranks

    @cached_property
    def nodes(self) -> dict[str, list[int]]:
        """The ranks of each machine, by its name, in rank order. Every rank asks for it."""
        members: dict[str, list[int]] = {}
        for rank, machine in enumerate(self.ranks.gather(this_machine())):
            members.setdefault(machine, []).append(rank)
        names = [machine.split("/")[0] for machine in members]
        twice = {name for name, number in Counter(names).items() if number > 1}
        return {
            f"{name} (rank {ranks[0]})" if name in twice else name: ranks
            for name, ranks in zip(names, members.values(), strict=True)
        }

    def require_several(self) -> None:
        """End a check that compares nodes if there is only one."""
        skip_if(len(self.nodes) == 1, "there is one node")

    def on_each_node(self, ask: Callable[[], T]) -> dict[str, T]:
        """The answer of the first rank of each node. Raises CheckFailed, on all ranks, where one fails."""
        is_first = any(self.ranks.rank == ranks[0] for ranks in self.nodes.values())
        outcomes = self.ranks.gather(outcome_of(ask, (OSError, TautError)) if is_first else None)
        by_node: dict[str, T] = {}
        for node, ranks in self.nodes.items():
            outcome = outcomes[ranks[0]]
            if isinstance(outcome, Exception):
                remedy = "" if "; " in str(outcome) else "; see to it on that node"
                raise CheckFailed(f"on {node}: {outcome}{remedy}")
            by_node[node] = outcome
        return by_node


class Odd(NamedTuple):
    """A node's value, and the value expected of it."""

    node: str
    found: Any
    expected: Any


def odd_ones(answers: Mapping[str, Any]) -> list[Odd]:
    """Nodes whose answer differs from the answer of most nodes; in a tie, from the first node's."""
    counts = Counter(map(repr, answers.values()))
    expected = max(answers.values(), key=lambda answer: counts[repr(answer)])
    return [Odd(node, found, expected) for node, found in answers.items() if found != expected]


# -- who is there


@check("cluster.processes")
def processes_are_on_all_nodes(cluster: Cluster) -> Finding:
    """Which processes see each other, and has each node as many as the others?"""
    nodes, size = cluster.nodes, cluster.ranks.size
    if size == 1:
        return passed(
            f"one process, on {next(iter(nodes))}; to compare nodes, start it on all of them with torchrun",
            1,
            "ranks",
        )
    lines = [f"{node}: {_listed(ranks)}" for node, ranks in nodes.items()]
    odd = odd_ones({node: len(ranks) for node, ranks in nodes.items()})
    says = f"{size} processes on {counted(len(nodes), 'nodes')}"
    if odd:
        return warned(
            f"{says}: {odd[0].node} has {odd[0].found}, expected {odd[0].expected} as on the others",
            remedy="give torchrun the same --nproc-per-node on each node, unless this is meant",
            measured=(size, "ranks"),
            evidence=lines,
        )
    return passed(says, size, "ranks", lines)


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


# -- what they have


@check("cluster.versions")
def versions_agree(cluster: Cluster) -> Finding:
    """Have all nodes the same Python, packages, taut, CUDA, driver and NCCL?"""
    cluster.require_several()
    found = cluster.on_each_node(partial(installed, cluster.ranks.device))
    remedy = (
        "install the same versions there (one shared environment, or one container, is simplest)"
    )
    first = islice(next(iter(found.values())).items(), 6)
    notes = [", ".join(f"{name} {value}" for name, value in first)]
    return _compared(found, "versions", MUST_AGREE, remedy, notes)


def installed(device: torch.device) -> dict[str, str]:
    """Versions of this process, and a digest of taut's own source."""
    return {
        "taut": version("taut"),
        "taut's source": files.source_digest()[:12],
        **versions(device),
    }


@check("cluster.settings")
def settings_agree(cluster: Cluster) -> Finding:
    """Has each node read the same settings?"""
    cluster.require_several()
    found = cluster.on_each_node(lambda: redacted_in(dict(dotted(to_dict(cluster.run)))))
    remedy = "start every node with the same file and the same settings on top of it"
    return _compared(found, "settings", None, remedy)


def _compared(
    found: Mapping[str, Mapping[str, Any]],
    unit: str,
    must_agree: Collection[str] | None,
    remedy: str,
    notes: Sequence[str] = (),
) -> Finding:
    """The finding on names that should have one value on all nodes: failed if a name in ``must_agree``,
    by default any, has several.
    """
    names = list(dict.fromkeys(name for of_node in found.values() for name in of_node))
    fatal = names if must_agree is None else must_agree
    odd: dict[str, list[Odd]] = {}
    for name in sorted(names, key=lambda name: name not in fatal):
        if ones := odd_ones({node: of_node.get(name, "none") for node, of_node in found.items()}):
            odd[name] = ones
    if not odd:
        return passed(f"{len(names)} {unit} agree", len(names), unit, notes)
    lines = [
        f"{one.node}: {name} is {one.found}; expected {one.expected}"
        for name, ones in odd.items()
        for one in ones
    ]
    answer = failed if any(name in fatal for name in odd) else warned
    return answer(
        lines[0],
        remedy=remedy,
        measured=(len(odd), f"of {len(names)} {unit}"),
        evidence=lines[1:],
    )


# -- folders


@check("cluster.output")
def output_is_shared(cluster: Cluster) -> Finding:
    """Do all nodes see one and the same out, and may they write there?"""
    cluster.require_several()
    skip_if(cluster.run.out is None, "out is not set")
    out = user_path(cluster.run.out or "", "out")
    blind, unit = _blind(cluster, out), f"of {len(cluster.nodes)} nodes"
    if blind:
        return failed(
            f"{blind[0]}; expected the folder that {next(iter(cluster.nodes))} writes to",
            remedy="name an out in a folder that all nodes mount: every rank writes its part of a checkpoint there, "
            "and a resume reads all of them",
            measured=(blind, unit),
        )
    return passed(f"{out} is shared, and all may write there", len(cluster.nodes), "nodes")


@check("cluster.cache")
def cache_is_known(cluster: Cluster) -> Finding:
    """Is the cache of tokenized data shared, where the run needs it to be?"""
    cluster.require_several()
    data = cluster.run.data
    cache = directory_of(data.cache)
    cluster.on_each_node(lambda: cache.mkdir(parents=True, exist_ok=True))
    blind, unit = _blind(cluster, cache), f"of {len(cluster.nodes)} nodes"
    if not blind:
        return passed(f"{cache} is shared: data is tokenized once", len(cluster.nodes), "nodes")
    if data.is_stream:
        return failed(
            f"{blind[0]}; expected one folder: a stream is recorded there for all ranks",
            remedy="set data.cache, or TAUT_CACHE, to a folder that all nodes mount",
            measured=(blind, unit),
        )
    says = f"{cache} is not shared: each node tokenizes the data for itself"
    return passed(says, len(blind), unit, blind)


def _blind(cluster: Cluster, folder: Path) -> list[str]:
    """The nodes that do not see the first rank's file in a folder, or in the nearest existing parent, each with the
    reason. Raises CheckFailed on all ranks if the first rank cannot write there.
    """
    written: list[Path] = []
    first = next(iter(cluster.nodes))

    def write() -> tuple[int, str]:
        place, up = folder.absolute(), 0
        try:
            while not place.is_dir() and place != place.parent:
                place, up = place.parent, up + 1
            file = place / f".taut-preflight-{secrets.token_hex(8)}"
            written.append(file)
            file.touch(exist_ok=False)
        except OSError as error:
            raise CheckFailed(
                f"on {first}: {place} cannot be written: {error.strerror}; expected a folder with room; name another"
            ) from error
        return up, file.name

    try:
        # the first rank writes, every node looks
        up, name = cluster.ranks.run_on_writer(write)
        seen = cluster.on_each_node(partial(_look, folder, up, name))
        return [f"{folder} on {node}: {what}" for node, what in seen.items() if what != "seen"]
    finally:
        for file in written:
            with suppress(OSError):
                file.unlink(missing_ok=True)


def _look(folder: Path, up: int, name: str) -> str:
    """Return whether this node sees a file that another node has written ``up`` levels above a folder."""
    place = [folder.absolute(), *folder.absolute().parents][up]
    if not place.is_dir():
        return f"there is no {place}"
    if not (place / name).exists():
        return "another folder of the same name"
    if not os.access(place, os.W_OK | os.X_OK):
        return "no permission to write"
    return "seen"


# -- files


class Hashed(NamedTuple):
    """A file, as far as it was read."""

    size: int
    digest: str
    num_read: int


@check("cluster.data", after=["cluster.settings"])
def data_agrees(cluster: Cluster) -> Finding:
    """Does each node read the same data, code and other files?"""
    cluster.require_several()
    run = cluster.run
    others = {*_models(run), run.data.cache}
    return _same_files(cluster, "data", [path for path in run.input_files() if path not in others])


@check("cluster.model", after=["cluster.settings"])
def models_agree(cluster: Cluster) -> Finding:
    """Does each node read the same model?"""
    cluster.require_several()
    return _same_files(cluster, "model", _models(cluster.run))


def _models(run: RunConfig) -> list[str]:
    return [run.model, *(path for _, _, path in run.models().directories)]


def _same_files(cluster: Cluster, what: Literal["data", "model"], paths: Iterable[str]) -> Finding:
    """The finding on files that every node should have alike."""
    named = list(dict.fromkeys(paths))
    trusts = cluster.run.trust_remote_code
    hashed = cluster.on_each_node(lambda: hash_files(named, what, trusts))
    names = sorted({name for of_node in hashed.values() for name in of_node})
    lines = [
        f"{one.node}: {name} {_difference(one.found, one.expected)}"
        for name in names
        for one in odd_ones({node: of_node.get(name) for node, of_node in hashed.items()})
    ]
    if lines:
        return failed(
            lines[0],
            remedy=f"copy the {what} to that node again, or read it from a folder that all nodes mount",
            measured=(len(lines), f"of {counted(len(names), 'files')}"),
            evidence=lines[1:],
        )
    first = next(iter(hashed.values()))
    skip_if(not first, f"no files of the nodes' own: {', '.join(named[:3]) or 'none is named'}")
    size = sum(file.size for file in first.values())
    num_read = sum(file.num_read for file in first.values())
    whole = "whole" if num_read == size else f"by size and {num_read / 1e9:.1f} GB of content"
    shown = f"{size / 1e9:.2f} GB" if size > 1e7 else f"{size:,} bytes"
    return passed(f"the same on all nodes: {shown}, compared {whole}", len(first), "files")


def _difference(found: Hashed | None, expected: Hashed | None) -> str:
    if found is None:
        return "is not there; expected it, as on the other nodes"
    if expected is None:
        return "is there, and on no other node; expected none"
    if found.size != expected.size:
        return f"has {found.size:,} bytes; expected {expected.size:,}"
    return f"has other content ({found.digest[:12]}); expected {expected.digest[:12]}"


def hash_files(
    paths: Sequence[str], what: Literal["data", "model"], trust_remote_code: bool
) -> dict[str, Hashed]:
    """Hash the files of this machine that the paths name (a file, a pattern, or all files of a directory), by name. A
    model's hub name counts as its commit; other names and addresses are left out, because a run compares the contents
    it has read.
    """
    found: dict[str, Path] = {}
    commits: dict[str, Hashed] = {}
    for text in paths:
        path = user_path(text, what)
        if path.is_dir():
            found |= {f"{text}/{file.name}": file for file in path.glob("[!.]*") if file.is_file()}
        elif path.is_file():
            found[text] = path
        elif what == "model" and not path.exists():
            commit = str(getattr(load_config(text, trust_remote_code), "_commit_hash", None))
            commits[f"{text} (commit)"] = Hashed(0, commit, 0)
        elif IS_PATTERN.search(text):
            found |= {name: Path(name) for name in glob.glob(str(path), recursive=True)}  # noqa: PTH207
    # whole if all fit into the budget, else equal shares of it
    sizes = {name: file.stat().st_size for name, file in found.items()}
    most = BUDGET if sum(sizes.values()) <= BUDGET else BUDGET // len(found)
    with ThreadPoolExecutor(4) as threads:
        hashed = list(threads.map(partial(hash_file, most=most), found.values()))
    return dict(zip(found, hashed, strict=True)) | commits


def hash_file(path: Path, most: int) -> Hashed:
    """Hash a file: all of it up to this many bytes, otherwise its ends and evenly spaced blocks."""
    digest, num_read = hashlib.sha256(), 0
    with files.open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        num_blocks = max(2, most // BLOCK)
        places = [0]
        if size > most:
            last = size - BLOCK
            places = sorted({last * block // (num_blocks - 1) for block in range(num_blocks)})
        for place in places:
            file.seek(place)
            left = size if size <= most else BLOCK
            while left and (block := file.read(min(left, BLOCK))):
                digest.update(block)
                num_read, left = num_read + len(block), left - len(block)
    return Hashed(size, digest.hexdigest(), num_read)


# -- clocks, devices, network, disks


@check("cluster.clocks")
def clocks_agree(cluster: Cluster) -> Finding:
    """Do the clocks of all nodes agree?"""
    cluster.require_several()
    rounds = []
    for _ in range(CLOCK_ROUNDS):
        cluster.ranks.gather_in_step(None)
        by_rank = cluster.ranks.gather_in_step(time.time())
        times = [by_rank[ranks[0]] for ranks in cluster.nodes.values()]
        # the time that most nodes agree with; in a tie, the first node's
        near = [sum(abs(time - other) <= CLOCK_LIMIT for other in times) for time in times]
        agreed = times[near.index(max(near))]
        rounds.append([time - agreed for time in times])
    offsets = {
        node: statistics.median(apart[i] for apart in rounds)
        for i, node in enumerate(cluster.nodes)
    }
    spread = max(offsets.values()) - min(offsets.values())
    if spread <= CLOCK_LIMIT:
        return passed("they agree", spread, "s apart")
    worst = max(offsets, key=lambda node: abs(offsets[node]))
    way = "ahead" if offsets[worst] > 0 else "behind"
    return warned(
        f"the clock of {worst} is {abs(offsets[worst]):,.1f} s {way}; expected at most {CLOCK_LIMIT:g} s",
        remedy="let the nodes set their clocks by one server (chrony, systemd-timesyncd): the times in logs, and what "
        "checks a certificate or a token, are wrong otherwise",
        measured=(spread, "s apart"),
        evidence=[f"{node}: {offset:+,.1f} s" for node, offset in offsets.items()],
    )


@check("cluster.gpus")
def devices_agree(cluster: Cluster) -> Finding:
    """Does each rank compute on the same kind of device?"""
    skip_if(cluster.ranks.size == 1, "there is one process")
    described = cluster.ranks.gather(describe(cluster.ranks.device))
    is_cuda = cluster.ranks.device.type == "cuda"
    node_of = {rank: node for node, ranks in cluster.nodes.items() for rank in ranks}
    answers = {
        f"{node_of[rank]}, rank {rank}": f"{one['name']} with {one['memory_bytes'] / 2**30:.0f} GiB"
        if is_cuda
        else one["name"]
        for rank, one in enumerate(described)
    }
    odd = odd_ones(answers)
    if odd:
        return warned(
            f"{odd[0].node}: {odd[0].found}; expected {odd[0].expected} as on the others",
            remedy="leave that node out, unless this is meant: every step waits for the slowest, and the smallest "
            "memory sets the batch",
            measured=(len(odd), f"of {len(answers)} ranks"),
            evidence=[f"{one.node}: {one.found}" for one in odd[1:]],
        )
    kind = "GPU" if is_cuda else "no GPU; processor"
    return passed(f"{kind} {next(iter(answers.values()))}", len(answers), "ranks")


@check("cluster.all_reduce")
def sums_are_right(cluster: Cluster) -> Finding:
    """Are sums over all ranks right, and fast enough?"""
    ranks = cluster.ranks
    skip_if(ranks.size == 1, "there is one process")
    kinds = ["cpu"] if ranks.device.type == "cpu" else ["cpu", ranks.device.type]
    measured = {}
    with deadline("in a sum over all ranks"):
        for kind in kinds:
            measured[kind] = measure_sum(
                ranks, ranks.device if kind != "cpu" else torch.device(kind)
            )
    wrong = [
        f"{node}, rank {rank}: {count:,} of {SUMMED[kind]:,} sums are wrong by {NETWORKS[kind]}"
        for kind in kinds
        for node, members in cluster.nodes.items()
        for rank in members
        if (count := measured[kind].wrong[rank])
    ]
    # sums are exact before their speed matters
    kind = kinds[-1]
    rate, network = measured[kind].rate, NETWORKS[kind]
    if wrong:
        return failed(
            f"{wrong[0]}; expected integers, exactly",
            remedy="leave that node out, and have its memory, GPU and network card examined",
            measured=(len(wrong), f"of {ranks.size} ranks"),
            evidence=wrong[1:],
        )
    says = f"all sums are exact; {rate / 1e9:.3g} GB/s a link by {network}"
    if rate < SLOWEST[kind]:
        return warned(
            f"{says}; expected {SLOWEST[kind] / 1e9:g} or more",
            remedy="see that the fast network is used: NCCL_DEBUG=INFO names it (NET/IB, not NET/Socket), "
            "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME choose it",
            measured=(rate / 1e9, "GB/s"),
        )
    return passed(says, rate / 1e9, "GB/s")


class Measured(NamedTuple):
    """A sum over ranks."""

    rate: float
    """Bytes per second carried by each link, 2 (n - 1) / n of the summed bytes: bus bandwidth in nccl-tests."""
    wrong: list[int]
    """Number of wrong sums, by rank."""


def measure_sum(ranks: Ranks, device: torch.device, rounds: int = 3) -> Measured:
    """Sum integers that float32 represents exactly: i mod 1021 + r on rank r. Every rank calls it."""
    number = SUMMED[device.type]
    mine = torch.arange(number, device=device).remainder_(1021).float()
    expected = mine * ranks.size + ranks.size * (ranks.size - 1) // 2
    seconds = []
    for _ in range(rounds + 1):  # connections are made in the first
        summed = mine + ranks.rank
        synchronize(device)
        ranks.gather_in_step(None)
        began = time.perf_counter()
        ranks.sum_in_place(summed)
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    # each rank compares its own copy; the slowest sets the rate
    wrong = ranks.gather_in_step(int((summed != expected).sum()))
    slowest = max(ranks.gather_in_step(min(seconds[1:])))
    return Measured(number * 4 * 2 * (ranks.size - 1) / ranks.size / slowest, wrong)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@check("cluster.disk")
def disks_have_room(cluster: Cluster) -> Finding:
    """Has every node room on disk for output, cache and temporary files?

    Roughly: a gibibyte in each place, and the model's size for the output. What checkpoints need is asked when the
    model is there (``run.output``).
    """
    run = cluster.run
    places = {} if run.out is None else {"out": user_path(run.out, "out")}
    places |= {
        "cache": directory_of(run.data.cache),
        "temporary files": Path(tempfile.gettempdir()),
    }
    model = user_path(run.model, "model")

    def ask() -> dict[str, tuple[int, int]]:
        goes_to_out = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        return {
            name: (files.free_space(path), ROOM + (goes_to_out if name == "out" else 0))
            for name, path in places.items()
        }

    # on each node, free and needed bytes of each place
    found = [
        (node, name, free, needed)
        for node, by_name in cluster.on_each_node(ask).items()
        for name, (free, needed) in by_name.items()
    ]
    lines = [
        f"{node}: {free / 1e9:,.2f} GB are free for {name} ({places[name]}); expected {needed / 1e9:,.2f}"
        for node, name, free, needed in found
        if free < needed
    ]
    least = min(free for _, _, free, _ in found) / 1e9
    if lines:
        return failed(
            lines[0],
            remedy="free some, or set out, data.cache (TAUT_CACHE) or TMPDIR to a folder on another disk",
            measured=(least, "GB"),
            evidence=lines[1:],
        )
    return passed("the fullest disk has room", least, "GB")


# -- waiting


def deadline(what: str) -> AbstractContextManager[None]:
    """End this process with one line if the block takes longer than ``DEADLINE``: other ranks do not come, or cannot be
    reached, and no Python code runs meanwhile.
    """

    def give_up() -> None:
        line = (
            f"rank {os.environ.get('RANK', '0')} on {this_machine().split('/')[0]} has waited {DEADLINE:.0f} s {what}; "
            "expected all ranks, with a GPU each or none, on one network; set GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME to its interface, and open its firewall (NCCL_DEBUG=INFO says more)"
        )
        if distributed.is_first_to_fail(1, line):
            print_line(f"taut: error: {line}")
        os._exit(1)

    return call_if_slow(DEADLINE, give_up)
