"""``taut launch slurm RUN.toml [key=value ...]``: submit a run as a job of Slurm, which goes on after its time limit.

The job is a script (``script_of``) as people write it: one torchrun on each node, which meet at the first node (c10d),
and the command of one machine with resume=true on every rank. With --dry-run the script is printed; otherwise it is
given to ``sbatch``. Nothing else in taut knows of Slurm:

    USR1            comes ``notice`` seconds before the time limit; the script hands it on; taut saves the last whole
                    step and ends, and the job is queued again, unless nothing was saved since it started: a limit too
                    short for a step would start it for ever
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

from taut.errors import ClusterError
from taut.train.distributed import require_divisors
from taut.train.run_dir import CHECKPOINTS, LATEST
from taut_tools.cluster.launch import Launch, read
from taut_tools.cluster.settings import LaunchSlurm

SUBMITTING = 60.0
"""Seconds that sbatch may take."""


def slurm(path: Path | None, overrides: Sequence[str]) -> int:
    """Run ``taut launch slurm``; its exit code."""
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
    """Submit the script with sbatch; the number of the job."""
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
    """The name of the job, from the run's directory."""
    return re.sub(r"[^\w.-]+", "-", out.absolute().name)


def script_of(asked: Launch[LaunchSlurm], directory: Path) -> str:
    """The script of the job; ``directory`` is the working directory of the command."""
    keys, name = asked.launcher, name_of(asked.out)
    # Options of the job, then of the step that starts one torchrun on each node.
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
