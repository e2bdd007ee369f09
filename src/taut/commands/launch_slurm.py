"""``taut launch slurm RUN.toml [key=value ...]``: a run as a job of Slurm, and what it does at its time limit.

The job is a script (``script_of``) that any cluster takes, as people write it: one torchrun on each node, which meet at
the first one (c10d), and the command of one machine with resume=true, once a rank. With --dry-run the script is
printed; otherwise it is given to ``sbatch``. Nothing else of taut knows of Slurm:

    USR1            comes ``notice`` seconds before the time limit; the script hands it on; taut saves the last whole
                    step and ends, and the job is queued again. Not where nothing was saved since it started: a limit
                    too short for a step would start it for ever
    TERM            scancel, or another job of higher priority: taut saves, and the job is not queued by the script
    a node fails    Slurm queues the job again (--requeue), which goes on from the newest checkpoint
    a rank fails    its line is in the log, and the job ends (--kill-on-bad-exit): it would fail again
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from taut.commands.launch import Count, Launch, read
from taut.config import configclass
from taut.errors import ClusterError, ConfigError
from taut.train.distributed import require_divisors
from taut.train.run_dir import CHECKPOINTS, LATEST

TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
"""Slurm's: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
SUBMITTING = 60.0
"""Seconds that sbatch may take."""


@configclass
class LaunchSlurm:
    """Ranks as a job of Slurm. All other keys are the run's."""

    nodes: Count = 1
    """Machines."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 1
    """GPUs of each, one rank on each GPU; 0: ranks compute on processors."""
    workers_per_node: Count | None = None
    """Ranks on each machine, with gpus_per_node=0; default: 1."""
    cpus_per_node: Count | None = None
    """Processors of each machine; default: whole machines, with all of their processors and memory (--exclusive)."""
    time: str = "24:00:00"
    """The time limit of the job, as sbatch takes it. At its end the run is saved and queued again."""
    notice: Annotated[int, Field(ge=30)] = 300
    """Seconds before the limit at which the run is told to save: more than a step and a checkpoint take."""
    partition: str | None = None
    """Partition of the cluster."""
    account: str | None = None
    """Account that the job is charged to."""
    sbatch: str | None = None
    """Further options of sbatch, e.g. "--qos=high --constraint=h100"."""
    setup: str | None = None
    """Shell commands before taut on each node, e.g. "source .venv/bin/activate"."""
    container: str | None = None
    """Image in which each node runs setup and taut (srun --container-image, of pyxis)."""
    mounts: str | None = None
    """Folders that the container sees, FROM:TO,FROM:TO; the current directory is one."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the first machine on which the ranks meet; 0: 10000 to 29999, by the number of the job."""
    dry_run: bool = False
    """Print the script and submit nothing."""

    def __post_init__(self) -> None:
        if self.workers_per_node is not None and self.gpus_per_node:
            raise ConfigError(
                f"workers_per_node={self.workers_per_node} and gpus_per_node={self.gpus_per_node}; expected one "
                "rank on each GPU; take workers_per_node out, or set gpus_per_node=0"
            )
        if self.notice >= seconds_of(self.time):
            raise ConfigError(
                f"notice={self.notice} and time={self.time}; expected a shorter notice than the time limit; lower "
                "notice, or raise time"
            )
        if self.mounts is not None and self.container is None:
            raise ConfigError("mounts is set and container is not; expected an image; set it")
        for key in ("partition", "account", "container", "mounts"):
            if re.search(r"[\s\"'\\]", getattr(self, key) or ""):
                raise ConfigError(
                    f"{key}={getattr(self, key)!r}; expected no spaces or quotes; correct it"
                )
        for option in self.options:
            if not re.fullmatch(r"--[a-z][\w-]*(=[^\s\"'\\]*)?", option):
                raise ConfigError(
                    f"sbatch: found {option!r}; expected options like --qos=high; correct it"
                )

    @property
    def options(self) -> list[str]:
        """The further options, one by one."""
        return (self.sbatch or "").split()

    @property
    def ranks_per_node(self) -> int:
        return self.gpus_per_node or self.workers_per_node or 1


def seconds_of(time: str) -> int:
    """A time limit of Slurm in seconds: ``90`` are minutes, ``1-2`` a day and two hours."""
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


def slurm(path: Path | None, overrides: Sequence[str]) -> int:
    """The command; its exit code."""
    asked = read(LaunchSlurm, path, overrides)
    require_divisors(asked.launcher.nodes * asked.launcher.ranks_per_node, asked.run.parallel)
    script = script_of(asked, Path.cwd())
    if asked.launcher.dry_run:
        sys.stdout.write(script)
        return 0
    number = submit(script)
    log = f"{name_of(asked.out)}-{number}.log"
    sys.stdout.write(f"job {number} is in the queue; its log will be {Path.cwd() / log}\n")
    return 0


def submit(script: str) -> str:
    """Give the script to sbatch; the number of the job."""
    program = shutil.which("sbatch")
    if program is None:
        raise ClusterError(
            "there is no sbatch here; expected a machine that submits to a Slurm cluster; run the command there, or "
            "write the script with --dry-run > run.sbatch"
        )
    try:
        done = subprocess.run(
            [program, "--parsable"],
            input=script,
            capture_output=True,
            text=True,
            timeout=SUBMITTING,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(
            f"sbatch has not answered for {SUBMITTING:.0f} s; expected a number; see whether squeue has the job"
        ) from None
    if done.returncode or not done.stdout.strip():
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ClusterError(
            f"sbatch did not take the job: {said}; expected a number; correct what it names"
        )
    return done.stdout.strip().partition(";")[0]  # NUMBER;CLUSTER where there are several


def name_of(out: Path) -> str:
    """The name of the job, of a run's directory."""
    return re.sub(r"[^\w.-]+", "-", out.absolute().name)


def script_of(asked: Launch[LaunchSlurm], directory: Path) -> str:
    """The script of the job. ``directory``: that the command was given in."""
    keys, name = asked.launcher, name_of(asked.out)
    options = [
        f"--job-name={name}",
        f"--nodes={keys.nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={keys.gpus_per_node}"] if keys.gpus_per_node else []),
        *(
            ["--exclusive", "--mem=0"]
            if keys.cpus_per_node is None
            else [f"--cpus-per-task={keys.cpus_per_node}"]
        ),
        f"--time={keys.time}",
        *([f"--partition={keys.partition}"] if keys.partition else []),
        *([f"--account={keys.account}"] if keys.account else []),
        f"--output={name}-%j.log",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{keys.notice}",
        *keys.options,
    ]
    srun = ["srun", "--kill-on-bad-exit=1"]
    srun += (
        ["--cpu-bind=none"]
        if keys.cpus_per_node is None
        else [f"--cpus-per-task={keys.cpus_per_node}"]
    )
    if keys.container is not None:
        mounts = ",".join([f"{directory}:{directory}", *([keys.mounts] if keys.mounts else [])])
        srun += [
            f"--container-image={keys.container}",
            f"--container-mounts={mounts}",
            f"--container-workdir={directory}",
        ]
    port = keys.port or "$((10000 + SLURM_JOB_ID % 20000))"
    setup = "" if keys.setup is None else f"{keys.setup}\n"
    latest = shlex.quote(str(asked.out / CHECKPOINTS / LATEST))
    return f"""\
#!/bin/bash
{"".join(f"#SBATCH {option}" + chr(10) for option in options)}
cd {shlex.quote(str(directory))} || exit 2

read -r -d "" node <<'END_OF_NODE'
first=$1
shift
{setup}if [ "$SLURM_NODEID" = 0 ]; then is_host=1; else is_host=0; fi
exec torchrun --nnodes {keys.nodes} --nproc-per-node {keys.ranks_per_node} \\
    --rdzv-backend c10d --rdzv-endpoint "$first" --rdzv-conf "is_host=$is_host" \\
    --local-addr "$SLURMD_NODENAME" --rdzv-id "$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}" \\
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout {max(keys.notice - 15, 15)} \\
    -m taut "$@"
END_OF_NODE

latest={latest}
saved() {{ cat "$latest" 2>/dev/null; }}
before=$(saved)
notice=
step=
trap 'notice=yes; [ -z "$step" ] || kill -USR1 "$step"' USR1

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):{port}
{shlex.join(srun)} bash -c "$node" taut "$first" \\
    {shlex.join(asked.words)} &
step=$!
until wait "$step"; code=$?; [ "$code" -le 128 ] || ! kill -0 "$step" 2>/dev/null; do :; done

if [ -n "$notice" ] && [ "$code" -ne 0 ]; then
    if [ "$(saved)" = "$before" ]; then
        echo "taut: error: no step was saved before the time limit; expected one; raise time, or notice" >&2
        exit 1
    fi
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
