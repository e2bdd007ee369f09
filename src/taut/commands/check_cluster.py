"""``taut check --cluster``: find the faults of a run's machines before it is launched.

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 -m taut check --cluster RUN.toml [key=value ...]

Start it like the run, on all nodes. Prints one row per question, from the first rank: versions, settings, shared
folders, data and model, clocks, devices, sums over ranks, room on disk. Exit code 1 if a check failed; warnings do not
change it. A single process says so, and examines its disks. A run on several nodes asks the same questions as it
starts; with --cluster no model is loaded. An empty file is written to each folder, and removed again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.text import Text

from taut.checks.cluster import Cluster, deadline
from taut.checks.examine import examine
from taut.commands.check import STYLES, as_json, show_rest, show_row, summary
from taut.commands.settings import CheckClusterOptions
from taut.config import load
from taut.io.terminal import Terminal
from taut.methods.method import RunConfig, class_of
from taut.train import distributed


def main(path: Path | None, overrides: Sequence[str]) -> int:
    """The command; its exit code."""
    ours = [word for word in overrides if word.partition("=")[0].strip() in ("cluster", "json")]
    rest = [word for word in overrides if word not in ours]
    return run(load(class_of(path, rest), path, rest), load(CheckClusterOptions, None, ours))


def run(config: RunConfig, options: CheckClusterOptions) -> int:
    """Print the findings; 1 if a check failed."""
    with deadline("for the others to connect"):
        ranks = distributed.start(config.device, replace(config.parallel, cpu_offload=False))
    cluster = Cluster(config, ranks)
    examination = examine(cluster)
    distributed.stop(ranks)
    if ranks.is_writer and options.json:
        found = as_json(examination, {"model": config.model})
        sys.stdout.write(json.dumps(found, allow_nan=False) + "\n")
    elif ranks.is_writer:
        console = Terminal(width=None if sys.stdout.isatty() else 100)
        for result in examination.results:
            if result.cause is None and not result.is_left_out:
                show_row(console, result)
        show_rest(console, examination)
        style = STYLES["failed" if examination.failures else "passed"]
        console.print(Text(f"\n{summary(examination)}", style))
    return 1 if examination.failures else 0
