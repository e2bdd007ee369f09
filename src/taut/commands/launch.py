"""``taut launch ray|slurm RUN.toml [key=value ...]``: a run on several machines.

What is launched is the command of one machine, ``taut METHOD RUN.toml ... resume=true``, once a rank: the training
loop knows of no launcher, and a run that is started again goes on from its newest checkpoint, with as many ranks as
there are then. The keys of a launcher (``LaunchRay``) and of the run stand next to each other in the command.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Generic, TypeVar

from pydantic import Field

from taut.cluster.servers import REWARDS_PLACE, ROLLOUT_SERVER, Servers
from taut.config import changed, configclass, fields_of, home_path, load, read_settings, user_path
from taut.errors import ConfigError
from taut.inference.weight_sync import serve_command
from taut.io.temporary import TemporaryFolder
from taut.methods import command_of
from taut.methods.method import RunConfig, class_of
from taut.methods.online import OnlineMethod
from taut.migrate.run_file import toml
from taut.train.distributed import require_divisors
from taut.train.run_dir import dotted, require_usable

Launcher = TypeVar("Launcher")
Count = Annotated[int, Field(ge=1)]
NEEDS = {
    "servers": (
        "gpus_per_server",
        "cpus_per_server",
        "server_command",
        "server_restarts",
        "server_start",
        "colocate",
    ),
    "reward_servers": (
        "gpus_per_reward_server",
        "cpus_per_reward_server",
        "reward_server_command",
        "reward_server_restarts",
        "reward_server_start",
    ),
}
"""Keys that are read only where there are servers of a kind."""
SERVE_REWARD = (
    f"exec {shlex.quote(sys.executable)} -m taut serve-reward host={{host}} port={{port}} 'hosts=[{{door}}]' "
    "without_key=true"
)
"""The ranks reach it as the host that they are told."""
SLEEP = "rollout.server.sync.sleep=true"


@configclass
class LaunchRay:
    """Ranks on a Ray cluster. All other keys are the run's."""

    nodes: Count = 1
    """Machines."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 1
    """GPUs of each, one rank on each GPU; 0: ranks compute on processors."""
    workers_per_node: Count | None = None
    """Ranks on each machine, with gpus_per_node=0; default: 1."""
    cpus_per_worker: Count = 1
    """Processors that Ray sets aside for each rank, and the threads in which it computes on a processor."""
    min_workers: Count | None = None
    """Fewest ranks with which the run goes on where machines are lost; default: all of them."""
    max_workers: Count | None = None
    """Most ranks, started where there is room for them; default: nodes times the ranks on each. With fewer or more
    ranks the samples of each step stay the same."""
    resize_every: Annotated[float, Field(gt=0)] = 60.0
    """Seconds between two looks whether there is room for more ranks; taking them in starts all ranks again."""
    restarts: Annotated[int, Field(ge=0)] = 3
    """How often the run is started again, from its newest checkpoint, after a rank or a machine has died."""
    address: str | None = None
    """HOST:PORT of the cluster; default: RAY_ADDRESS, or the cluster of this machine. local: start Ray here, for this
    run alone."""
    wait: Annotated[float, Field(gt=0, le=3600)] = 45.0
    """Seconds that machines may take to be had; then what is missing is printed. Longer where a cluster grows on
    demand."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the first machine on which the ranks meet; 0: a free one."""
    servers: Annotated[int, Field(ge=0)] = 0
    """Roll-out servers that Ray starts next to the ranks and starts again when they die; the run asks them
    (rollout.engine=server). 0: none."""
    gpus_per_server: Annotated[int, Field(ge=0)] = 1
    """GPUs of each server, all on one machine; 0: it computes on processors."""
    cpus_per_server: Count = 1
    """Processors that Ray sets aside for each server."""
    server_command: str = "{vllm}"
    """Shell command of a server, in which {host} and {port} stand for where it is to listen, {model} for the model, and
    {vllm} for `vllm serve` with the options that taut needs: "{vllm} --max-model-len 4096"."""
    server_restarts: Annotated[int, Field(ge=0)] = 3
    """How often each server is started again."""
    server_start: Annotated[float, Field(gt=0)] = 900.0
    """Seconds in which a server has to answer at /health."""
    colocate: bool = False
    """Servers are on the GPUs of the ranks, and sleep while those train (rollout.server.sync.sleep): one on each
    gpus_per_server GPUs of a machine."""
    reward_servers: Annotated[int, Field(ge=0)] = 0
    """Servers of rewards that Ray starts next to the ranks and starts again when they die; all have one URL, which
    stands in the run's settings as {reward_servers}. 0: none."""
    gpus_per_reward_server: Annotated[int, Field(ge=0)] = 1
    """GPUs of each, all on one machine; 0: it computes on processors."""
    cpus_per_reward_server: Count = 1
    """Processors that Ray sets aside for each."""
    reward_server_command: str | None = None
    """Shell command of each, in which {host} and {port} stand for where it is to listen, {door} for the host of the
    URL, and {serve} for `taut serve-reward` with the options that it needs: "{serve} runs/rm/model"."""
    reward_server_restarts: Annotated[int, Field(ge=0)] = 3
    """How often each is started again."""
    reward_server_start: Annotated[float, Field(gt=0)] = 900.0
    """Seconds in which each has to answer at /health."""
    env: list[str] = field(default_factory=list)
    """Names of environment variables that every rank gets from here, e.g. [HF_HOME, WANDB_API_KEY]. Others are those of
    the cluster's processes."""


@dataclass(frozen=True)
class Launch(Generic[Launcher]):
    """What a command of ``taut launch`` asks for."""

    launcher: Launcher
    """The launcher's keys."""
    run: RunConfig
    out: Path
    words: tuple[str, ...]
    """The arguments of ``taut`` on every rank: method, file, settings, resume=true."""


def read(
    cls: type[Launcher],
    path: Path | None,
    overrides: Sequence[str],
    added: Callable[[Launcher, Sequence[str]], Sequence[str]] = lambda launcher, rest: (),
) -> Launch[Launcher]:
    """The launcher's keys and the run's, told apart by name. Raises ConfigError for a run that cannot be launched, and
    OutputError where ``out`` is in use. ``added``: settings of the run that the launcher fills in later, of its keys
    and those of the run.
    """
    ours = set(fields_of(cls))
    mine = [word for word in overrides if _key(word) in ours]
    rest = [word for word in overrides if _key(word) not in ours]
    launcher = load(cls, None, mine)
    filled = added(launcher, rest)
    others = [word for word in rest if _key(word) not in {*map(_key, filled)}]
    run = load(class_of(path, rest), path, [*filled, *others])
    if run.out is None:
        raise ConfigError(
            "out is not set; expected a directory that every machine sees; set out=DIR"
        )
    if run.overwrite:
        raise ConfigError(
            "overwrite=true: a launched run is started again after a failure, and would then replace itself; expected "
            "a new out; name another, or remove the directory first"
        )
    out = user_path(run.out, "out")
    require_usable(out, resume=run.resume, overwrite=False)
    method = command_of(run.method).split()[1]
    kept = [word for word in rest if _key(word) not in ("resume", "method")]
    file = [] if path is None else [str(path)]
    return Launch(launcher, run, out, (method, *file, *kept, "resume=true"))


def ray(path: Path | None, overrides: Sequence[str]) -> int:
    """The command; its exit code is that of the ranks."""
    asked = read(LaunchRay, path, overrides, partial(_served, path))
    launcher, run = asked.launcher, asked.run
    per_node = launcher.gpus_per_node or launcher.workers_per_node or 1
    if launcher.workers_per_node not in (None, per_node):
        raise ConfigError(
            f"workers_per_node={launcher.workers_per_node} and gpus_per_node={launcher.gpus_per_node}; expected one "
            "rank on each GPU; take workers_per_node out, or set gpus_per_node=0"
        )
    most = launcher.max_workers or launcher.nodes * per_node
    fewest = launcher.min_workers or min(most, launcher.nodes * per_node)
    if fewest > most:
        raise ConfigError(
            f"min_workers={fewest} and at most {most} ranks; expected no more; lower it, or raise max_workers"
        )
    for number in {fewest, most}:
        require_divisors(number, run.parallel)
    if launcher.colocate:
        _require_colocated(launcher, fewest, most)
    unset = [name for name in launcher.env if name not in os.environ]
    if unset:
        raise ConfigError(
            f"env: {unset[0]} is not set here; expected variables that are; set it, or take it out"
        )

    from taut.cluster import ray_cluster
    from taut.cluster.look import Expected, versions
    from taut.cluster.placement import Ranks
    from taut.cluster.relay import Job

    gpus = 1 if launcher.gpus_per_node else 0
    ranks = Ranks(launcher.nodes, per_node, fewest, most, launcher.cpus_per_worker, gpus)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryFolder("launch", asked.out.absolute().parent) as folder:
        return ray_cluster.launch(
            Job(
                (
                    *asked.words,
                    *_named_in_file(path, asked.words),
                    *(_shared_weights(run, folder) if launcher.servers else ()),
                    *([SLEEP] if launcher.colocate else ()),
                ),
                str(Path.cwd()),
                {name: os.environ[name] for name in launcher.env},
                launcher.port,
            ),
            ranks,
            Expected(str(Path.cwd()), str(folder), versions()),
            _servers(launcher, run),
            address=launcher.address,
            restarts=launcher.restarts,
            wait=launcher.wait,
            resize_every=launcher.resize_every,
        )


def _served(path: Path | None, launcher: LaunchRay, rest: Sequence[str]) -> list[str]:
    """Settings that stand for servers which do not run yet."""
    for number, keys in NEEDS.items():
        unread = changed(launcher, keys)
        if unread and not getattr(launcher, number):
            raise ConfigError(
                f"{unread[0]} is set and {number}=0; expected servers; set {number}, or take it out"
            )
    return [*_rollout_servers(path, launcher, rest), *_reward_servers(path, launcher, rest)]


def _require_colocated(launcher: LaunchRay, fewest: int, most: int) -> None:
    """Raise ConfigError unless each rank is of one server."""
    if fewest < most:
        raise ConfigError(
            f"colocate=true with {fewest} to {most} ranks: each GPU has a rank and a server; expected a fixed number; "
            "take min_workers and max_workers out"
        )
    if launcher.cpus_per_server != LaunchRay.cpus_per_server:
        raise ConfigError(
            "cpus_per_server is set with colocate=true: servers take what the ranks have; expected it in "
            "cpus_per_worker; take it out"
        )
    size = launcher.gpus_per_server or 1
    if (
        bool(launcher.gpus_per_server) != bool(launcher.gpus_per_node)
        or launcher.servers * size != most
    ):
        raise ConfigError(
            f"colocate=true with servers={launcher.servers}, gpus_per_server={launcher.gpus_per_server} and {most} "
            f"ranks, gpus_per_node={launcher.gpus_per_node}; expected a rank on each GPU of a server; set servers="
            f"{most // size or 1}"
        )


def _rollout_servers(path: Path | None, launcher: LaunchRay, rest: Sequence[str]) -> list[str]:
    if not launcher.servers:
        return []
    method = class_of(path, rest)
    if not issubclass(method, OnlineMethod):
        raise ConfigError(
            f"servers={launcher.servers} and {method.__name__.lower()}, which asks none; expected a method that learns "
            "from completions, such as grpo; take servers out"
        )
    keys = {*map(_key, rest), *(key for key, _ in dotted(read_settings(path)))}
    filled = sorted(keys & {"rollout.engine", "rollout.url", "rollout.urls"})
    if filled:
        raise ConfigError(
            f"servers={launcher.servers} and {filled[0]}: Ray starts servers, and fills in rollout.engine and "
            "rollout.urls; expected one of the two; take one out"
        )
    urls = [f"http://server-{number}/v1" for number in range(launcher.servers)]
    sleep = [SLEEP] if launcher.colocate else []
    return ["rollout.engine=server", f"rollout.urls={json.dumps(urls)}", *sleep]


def _reward_servers(path: Path | None, launcher: LaunchRay, rest: Sequence[str]) -> list[str]:
    if not launcher.reward_servers:
        return []
    if launcher.reward_server_command is None:
        raise ConfigError(
            f"reward_servers={launcher.reward_servers} and no command that starts one; expected it; set "
            'reward_server_command="{serve} DIR", with the directory of a reward model'
        )
    named = [word for word in (*_named_in_file(path, rest), *rest) if REWARDS_PLACE in word]
    if not named:
        raise ConfigError(
            f"reward_servers={launcher.reward_servers}, and no setting of the run names {REWARDS_PLACE}; expected the "
            'URL of a reward there; set rewards=[{name = "reward_server", options.url = "'
            f'{REWARDS_PLACE}"}}]'
        )
    return [word.replace(REWARDS_PLACE, "http://reward-servers") for word in named]


def _named_in_file(path: Path | None, rest: Sequence[str]) -> list[str]:
    """The settings of the run's file that name the URL of the servers of rewards, unless the command sets others."""
    mine = {_key(word) for word in rest}
    settings = [
        f"{key}={toml(value)}" for key, value in dotted(read_settings(path)) if key not in mine
    ]
    return [word for word in settings if REWARDS_PLACE in word]


def _shared_weights(run: RunConfig, folder: Path) -> list[str]:
    """Where the run puts weights for servers on other machines: next to ``out``, if it names no place."""
    assert isinstance(run, OnlineMethod)
    if run.rollout.server.sync.folder is not None:
        return []
    return [f"rollout.server.sync.folder={folder}"]


def _servers(launcher: LaunchRay, run: RunConfig) -> list[Servers]:
    """The servers that Ray is to start, of each kind."""
    kinds = []
    if launcher.servers:
        model = str(home_path(run.model))
        vllm = serve_command(model, run.lora.saved_rank, launcher.gpus_per_server)
        vllm += " --enable-sleep-mode" if launcher.colocate else ""
        command = launcher.server_command.replace("{vllm}", vllm)
        kinds.append(
            Servers(
                ROLLOUT_SERVER,
                launcher.servers,
                command.replace("{model}", shlex.quote(model)),
                launcher.gpus_per_server,
                launcher.cpus_per_server,
                launcher.server_restarts,
                launcher.server_start,
                is_colocated=launcher.colocate,
            )
        )
    if launcher.reward_servers:
        assert launcher.reward_server_command is not None
        kinds.append(
            Servers(
                "reward server",
                launcher.reward_servers,
                launcher.reward_server_command.replace("{serve}", SERVE_REWARD),
                launcher.gpus_per_reward_server,
                launcher.cpus_per_reward_server,
                launcher.reward_server_restarts,
                launcher.reward_server_start,
                has_one_address=True,
            )
        )
    return kinds


def _key(word: str) -> str:
    return word.partition("=")[0].strip()
