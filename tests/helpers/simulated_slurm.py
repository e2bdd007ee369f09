"""Slurm's commands for tests, as programs in a folder for PATH, and two nodes that are one machine.

    sbatch      keeps the script that it reads, and prints the number 4711
    scontrol    names this machine once a node; notes that a job is queued again
    srun        starts the command once a node, passes on USR1 to all processes of the job, as Slurm does, and kills all
                of them when one has failed (--kill-on-bad-exit)

Ranks take themselves for machines of their own: ``sitecustomize.py`` gives each node another host name.
"""

from __future__ import annotations

import sys
from pathlib import Path

SBATCH = """\
#!/bin/sh
cat > "$(dirname "$0")/job.sh"
echo 4711
"""
SCONTROL = """\
#!/bin/sh
case $1 in
show) echo 127.0.0.1; echo 127.0.0.1 ;;
requeue) echo "$2" >> "$(dirname "$0")/requeued" ;;
esac
"""
SRUN = """\
import os, signal, subprocess, sys, time
from pathlib import Path

words = sys.argv[1:]
Path(__file__).with_name("srun.words").write_text("\\n".join(words))
is_fatal = "--kill-on-bad-exit=1" in words
command = words[next(i for i, word in enumerate(words) if not word.startswith("--")) :]

def start(node):
    own = {"SLURM_NODEID": str(node), "SLURMD_NODENAME": "127.0.0.1", "NODE": f"node{node}"}
    return subprocess.Popen(command, env={**os.environ, **own})

nodes = [start(node) for node in range(int(os.environ["SLURM_NNODES"]))]

def of_job():
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found = {node.pid for node in nodes if node.poll() is None}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found

def pass_on(number):
    for pid in of_job():
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass

signal.signal(signal.SIGUSR1, lambda number, _: pass_on(number))
while any(node.poll() is None for node in nodes):
    if is_fatal and any(node.poll() for node in nodes):
        pass_on(signal.SIGKILL)
    time.sleep(0.02)
sys.exit(max(node.returncode != 0 for node in nodes))
"""
HOST = """\
import os, socket
if "NODE" in os.environ and "RANK" in os.environ:
    socket.gethostname = lambda: os.environ["NODE"]
"""


def write_commands(folder: Path, python_path: str) -> dict[str, str]:
    """Write the programs to a folder; the environment in which they are found, and ranks have hosts of their own."""
    folder.mkdir()
    programs = {"sbatch": SBATCH, "scontrol": SCONTROL, "srun": f"#!{sys.executable}\n{SRUN}"}
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "sitecustomize.py").write_text(HOST)
    here = Path(sys.executable).parent
    return {
        "PATH": f"{folder}:{here}:/usr/bin:/bin",
        "PYTHONPATH": f"{folder}:{python_path}",
        "OMP_NUM_THREADS": "1",
    }
