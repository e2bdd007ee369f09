"""``taut launch ray|slurm RUN.toml [key=value ...]``: a run on several machines.

Every rank runs the command of one machine, ``taut METHOD RUN.toml ... resume=true``. So the training loop knows of no
launcher, and a run that is started again goes on from its newest checkpoint, with as many ranks as there are then. The
command line mixes keys of the launcher (``LaunchRay``) and keys of the run.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from taut.config import fields_of, home_path, load, read_settings, toml, user_path
from taut.errors import ConfigError
from taut.inference.weight_sync import (
    EXTENSION,
    LOADS_ADAPTERS,
    PROCESSED,
    adapters_of,
    full_weights,
)
from taut.io.temporary import TemporaryFolder
from taut.methods import command_of
from taut.methods.method import RunConfig, class_of
from taut.methods.online import OnlineMethod
from taut.train.distributed import require_divisors
from taut.train.run_dir import dotted, require_usable
from taut_tools.cluster.servers import REWARDS_PLACE, ROLLOUT_SERVER, Servers
from taut_tools.cluster.settings import LaunchRay

Launcher = TypeVar("Launcher")
SERVE_REWARD = (
    f"exec {shlex.quote(sys.executable)} -m taut serve-reward host={{host}} port={{port}} 'hosts=[{{door}}]' "
    "without_key=true"
)
"""Command of a reward server, which admits the host name that the ranks use."""
SLEEP = "rollout.server.sync.sleep=true"


@dataclass(frozen=True)
class Launch(Generic[Launcher]):
    """A launch as the command line states it."""

    launcher: Launcher
    """Keys of the launcher."""
    run: RunConfig
    out: Path
    words: tuple[str, ...]
    """Arguments of ``taut`` on every rank: method, file, settings, resume=true."""


def read(
    cls: type[Launcher],
    path: Path | None,
    overrides: Sequence[str],
    added: Callable[[Launcher, Sequence[str]], Sequence[str]] = lambda launcher, rest: (),
) -> Launch[Launcher]:
    """Split the command line into keys of the launcher and of the run, and load both. ``added`` gives the settings of
    the run that the launcher fills in later. Raises ConfigError for a run that cannot be launched, and OutputError
    where ``out`` is in use.
    """
    # Separate the keys of the launcher from the keys of the run.
    ours = set(fields_of(cls))
    mine = [word for word in overrides if _key(word) in ours]
    rest = [word for word in overrides if _key(word) not in ours]
    launcher = load(cls, None, mine)
    # Load the run as its ranks will, with the settings that the launcher fills in, so that mistakes show here.
    filled = added(launcher, rest)
    others = [word for word in rest if _key(word) not in {*map(_key, filled)}]
    run = load(class_of(path, rest), path, [*filled, *others])
    if run.out is None:
        raise ConfigError(
            "out is not set; expected a directory that every machine sees; set out=DIR"
        )
    if run.overwrite:
        raise ConfigError(
            "overwrite=true: a launched run that is restarted would replace itself; expected a new out; name another, "
            "or remove the directory first"
        )
    # Make the command of a rank.
    out = user_path(run.out, "out")
    require_usable(out, resume=run.resume, overwrite=False)
    method = command_of(run.method).split()[1]
    kept = [word for word in rest if _key(word) not in ("resume", "method")]
    file = [] if path is None else [str(path)]
    return Launch(launcher, run, out, (method, *file, *kept, "resume=true"))


def ray(path: Path | None, overrides: Sequence[str]) -> int:
    """Run ``taut launch ray``, which has the exit code of the ranks."""
    asked = read(LaunchRay, path, overrides, partial(_served, path))
    launcher, run = asked.launcher, asked.run
    # Count the ranks, and refuse numbers that do not fit together.
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

    # Start them, with what servers and ranks have to know of each other.
    from taut_tools.cluster import ray_cluster
    from taut_tools.cluster.placement import Ranks
    from taut_tools.cluster.preflight import Expected, versions
    from taut_tools.cluster.relay import Job

    gpus = 1 if launcher.gpus_per_node else 0
    ranks = Ranks(launcher.nodes, per_node, fewest, most, launcher.cpus_per_worker, gpus)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryFolder("launch", asked.out.absolute().parent) as folder:
        words = [*asked.words, *_named_in_file(path, asked.words)]
        if launcher.servers:
            assert isinstance(run, OnlineMethod)
            if run.rollout.server.sync.folder is None:  # servers on other machines read weights
                words.append(f"rollout.server.sync.folder={folder}")
        if launcher.colocate:
            words.append(SLEEP)
        return ray_cluster.launch(
            Job(
                words,
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
    """The run's settings for servers that do not run yet, with URLs that hold their place."""
    settings: list[str] = []
    if launcher.servers:
        method = class_of(path, rest)
        if not issubclass(method, OnlineMethod):
            raise ConfigError(
                f"servers={launcher.servers} and {method.__name__.lower()}, which asks none; expected a method that "
                "learns from completions, such as grpo; take servers out"
            )
        keys = {*map(_key, rest), *(key for key, _ in dotted(read_settings(path)))}
        filled = sorted(keys & {"rollout.engine", "rollout.url", "rollout.urls"})
        if filled:
            raise ConfigError(
                f"servers={launcher.servers} and {filled[0]}: Ray starts servers, and fills in rollout.engine and "
                "rollout.urls; expected one of the two; take one out"
            )
        urls = [f"http://server-{number}/v1" for number in range(launcher.servers)]
        settings += ["rollout.engine=server", f"rollout.urls={json.dumps(urls)}"]
        settings += [SLEEP] if launcher.colocate else []
    if launcher.reward_servers:
        if launcher.reward_server_command is None:
            raise ConfigError(
                f"reward_servers={launcher.reward_servers} and no command that starts one; expected it; set "
                'reward_server_command="{serve} DIR", with the directory of a reward model'
            )
        named = [word for word in (*_named_in_file(path, rest), *rest) if REWARDS_PLACE in word]
        if not named:
            raise ConfigError(
                f"reward_servers={launcher.reward_servers}, and no setting of the run names {REWARDS_PLACE}; expected "
                'the URL of a reward there; set rewards=[{name = "reward_server", options.url = "'
                f'{REWARDS_PLACE}"}}]'
            )
        settings += [word.replace(REWARDS_PLACE, "http://reward-servers") for word in named]
    return settings


def _require_colocated(launcher: LaunchRay, fewest: int, most: int) -> None:
    """Raise ConfigError unless each rank shares its GPU with exactly one server."""
    if fewest < most:
        raise ConfigError(
            f"colocate=true with {fewest} to {most} ranks: each GPU has a rank and a server; expected a fixed number; "
            "take min_workers and max_workers out"
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


def _named_in_file(path: Path | None, rest: Sequence[str]) -> list[str]:
    """Settings of the run's file that name the URL of the reward servers, and that the command does not override."""
    mine = {_key(word) for word in rest}
    settings = [
        f"{key}={toml(value)}" for key, value in dotted(read_settings(path)) if key not in mine
    ]
    return [word for word in settings if REWARDS_PLACE in word]


def _servers(launcher: LaunchRay, run: RunConfig) -> list[Servers]:
    """The servers that Ray starts, one entry for each kind."""
    kinds = []
    if launcher.servers:
        model = str(home_path(run.model))
        vllm = _serve_command(model, run.lora.saved_rank, launcher.gpus_per_server)
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


def _serve_command(model: str, rank: int, gpus: int) -> str:
    """The shell command of a server that takes every weight, and adapters of a rank above 0. {host} and {port} stand
    for where it listens.
    """
    words = [
        full_weights(),
        *([LOADS_ADAPTERS] if rank else []),
        f"vllm serve {shlex.quote(model)} --served-model-name policy --host {{host}} --port {{port}}",
        f"{EXTENSION} {PROCESSED}",
        *([adapters_of(rank)] if rank else []),
        *([f"--tensor-parallel-size {gpus}"] if gpus > 1 else []),
    ]
    return " ".join(words)
