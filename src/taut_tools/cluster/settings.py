"""Keys of ``taut launch``."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Annotated, ClassVar

from pydantic import Field

from taut.config import configclass
from taut.conflicts import conflict
from taut.errors import ConfigError

Count = Annotated[int, Field(ge=1)]


@configclass
class LaunchRay:
    """Ranks on a Ray cluster. All other keys are the run's."""

    nodes: Count = 1
    """Machines."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 1
    """GPUs of each machine, with one rank on each GPU; with 0, ranks compute on processors."""
    workers_per_node: Count | None = None
    """Ranks on each machine, with gpus_per_node=0; default: 1."""
    cpus_per_worker: Count = 1
    """Processors that Ray sets aside for each rank, and the threads in which it computes on a processor."""
    min_workers: Count | None = None
    """Minimum ranks with which the run goes on after machines are lost; default: all of them."""
    max_workers: Count | None = None
    """Maximum ranks, started while there is room for them; default: nodes times the ranks on each. The samples of each
    step do not depend on the number of ranks."""
    resize_every: Annotated[float, Field(gt=0)] = 60.0
    """Seconds between checks for room for more ranks; adding ranks starts all of them again."""
    restarts: Annotated[int, Field(ge=0)] = 3
    """Maximum restarts of the run from its newest checkpoint, after a rank or a machine has died."""
    address: str | None = None
    """HOST:PORT of the cluster; default: RAY_ADDRESS, or the cluster of this machine. address=local starts Ray on this
    machine, for this run alone."""
    wait: Annotated[float, Field(gt=0, le=3600)] = 45.0
    """Seconds to wait for machines before the launch ends with the list of missing ones. Set more for a cluster that
    grows on demand."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the first machine on which the ranks meet; 0 takes a free one."""
    servers: Annotated[int, Field(ge=0)] = 0
    """Number of rollout servers that Ray starts next to the ranks and starts again when they die; the run generates
    with them (rollout.engine=server)."""
    gpus_per_server: Annotated[int, Field(ge=0)] = 1
    """GPUs of each server, all on one machine; with 0 it computes on processors."""
    cpus_per_server: Count = 1
    """Processors that Ray sets aside for each server."""
    server_command: str = "{vllm}"
    """Shell command of a server, e.g. "{vllm} --max-model-len 4096". Its placeholders are {host} and {port} to listen
    on, {model}, and {vllm}: `vllm serve` with the options that taut needs."""
    server_restarts: Annotated[int, Field(ge=0)] = 3
    """Maximum restarts of each server."""
    server_start: Annotated[float, Field(gt=0)] = 900.0
    """Seconds in which a server has to answer at /health."""
    colocate: bool = False
    """Place servers on the GPUs of the ranks, each on gpus_per_server GPUs of one machine; they sleep while the ranks
    train (rollout.server.sync.sleep)."""
    reward_servers: Annotated[int, Field(ge=0)] = 0
    """Number of reward servers that Ray starts next to the ranks and starts again when they die. All share one URL,
    for which the run's settings have the placeholder {reward_servers}."""
    gpus_per_reward_server: Annotated[int, Field(ge=0)] = 1
    """GPUs of each reward server, all on one machine; with 0 it computes on processors."""
    cpus_per_reward_server: Count = 1
    """Processors that Ray sets aside for each reward server."""
    reward_server_command: str | None = None
    """Shell command of a reward server, e.g. "{serve} runs/rm/model". Its placeholders are {host} and {port} to listen
    on, {door}, the host of the URL, and {serve}: `taut serve-reward` with the options that it needs."""
    reward_server_restarts: Annotated[int, Field(ge=0)] = 3
    """Maximum restarts of each reward server."""
    reward_server_start: Annotated[float, Field(gt=0)] = 900.0
    """Seconds in which a reward server has to answer at /health."""
    env: list[str] = field(default_factory=list)
    """Names of environment variables that every rank inherits from this command, e.g. [HF_HOME, WANDB_API_KEY]. All
    other variables come from the cluster's processes."""

    rules: ClassVar[str] = """
        gpus_per_server cpus_per_server server_command server_restarts server_start colocate needs servers>0
        gpus_per_reward_server cpus_per_reward_server reward_server_command reward_server_restarts reward_server_start
            needs reward_servers>0
        cpus_per_server excludes colocate=true: servers take what the ranks have, which cpus_per_worker says
    """


@configclass
class LaunchSlurm:
    """Ranks as a job of Slurm. All other keys are the run's."""

    nodes: Count = 1
    """Machines."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 1
    """GPUs of each machine, with one rank on each GPU; with 0, ranks compute on processors."""
    workers_per_node: Count | None = None
    """Ranks on each machine, with gpus_per_node=0; default: 1."""
    cpus_per_node: Count | None = None
    """Processors of each machine; default: whole machines, with all their processors and memory (--exclusive)."""
    time: str = "24:00:00"
    """Time limit of the job, as sbatch takes it. At its end the run is saved and queued again."""
    notice: Annotated[int, Field(ge=30)] = 300
    """Seconds before the time limit at which the run starts to save: more than a step and a checkpoint take."""
    partition: str | None = None
    """Partition of the cluster."""
    account: str | None = None
    """Account to which the job is charged."""
    sbatch: str | None = None
    """Further options of sbatch, e.g. "--qos=high --constraint=h100"."""
    setup: str | None = None
    """Shell commands that run before taut on each node, e.g. "source .venv/bin/activate"."""
    container: str | None = None
    """Image in which each node runs setup and taut (srun --container-image, of pyxis)."""
    mounts: str | None = None
    """Folders that the container sees besides the current directory, as FROM:TO,FROM:TO."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the first machine on which the ranks meet; 0 takes one of 10000 to 29999 by the number of the job."""
    dry_run: bool = False
    """Print the script and submit nothing."""

    rules: ClassVar[str] = """
        workers_per_node excludes gpus_per_node>0: each GPU has one rank; expected one of the two; leave
            `workers_per_node` out, or set `gpus_per_node`=0
        mounts needs container: an image sees the folders
    """

    def __post_init__(self) -> None:
        if self.notice >= seconds_of(self.time):
            why = "a notice comes before the time limit"
            raise conflict(self, "notice time", why, "lower `notice`, or raise `time`")
        for key in ("partition", "account", "container", "mounts"):
            if re.search(r"[\s\"'\\]", getattr(self, key) or ""):
                raise conflict(
                    self, key, "spaces and quotes end a word", "expected none; correct it"
                )
        for option in self.options:
            if not re.fullmatch(r"--[a-z][\w-]*(=[^\s\"'\\]*)?", option):
                remedy = "expected options like --qos=high; correct it"
                raise conflict(self, "sbatch", f"{option!r} is none", remedy)

    @property
    def options(self) -> list[str]:
        """Further options of sbatch, one by one."""
        return (self.sbatch or "").split()

    @property
    def ranks_per_node(self) -> int:
        return self.gpus_per_node or self.workers_per_node or 1


TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
"""Slurm's: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""


def seconds_of(time: str) -> int:
    """Seconds of a time limit of Slurm: ``90`` are minutes, ``1-2`` a day and two hours."""
    match = TIME.fullmatch(time)
    if match is None:
        raise ConfigError(
            f"time={time}; expected minutes, HH:MM:SS or D-HH:MM:SS, as sbatch takes them; correct it"
        )
    days, *rest = match.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is not None or len(numbers) == 3:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    minutes, seconds = [*numbers, 0][:2]
    return minutes * 60 + seconds
