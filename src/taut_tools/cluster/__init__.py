"""``taut launch``: start the ranks of a run on several machines, and start them again where some die.

launch.py       ``taut launch ray``: the ranks of a run, and servers beside it, on a Ray cluster
slurm.py        ``taut launch slurm``: a job script
ray_cluster.py  Ray places ranks, notices dead ones and starts them again; the other files are its parts
"""

import os

from taut.commands.registry import LAUNCH, Command

# Set before ray is imported: no reports to its makers, and no warnings about features that taut does not use.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
os.environ.setdefault("RAY_TRAIN_METRICS_ENABLED", "0")
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")

RAY = Command(
    "RUN.toml [nodes=2] [gpus_per_node=8] [key=value ...]",
    "train on several machines of a Ray cluster, and go on where one of them dies",
    "taut_tools.cluster.launch:ray",
    "taut_tools.cluster.settings:LaunchRay",
    group=LAUNCH,
    is_raw=True,
    has_method=True,
    extras=("train", "ray"),
)
SLURM = Command(
    "RUN.toml [nodes=2] [gpus_per_node=8] [--dry-run] [key=value ...]",
    "train on several machines as a job of Slurm, which goes on after its time limit",
    "taut_tools.cluster.slurm:slurm",
    "taut_tools.cluster.settings:LaunchSlurm",
    group=LAUNCH,
    is_raw=True,
    has_method=True,
)
