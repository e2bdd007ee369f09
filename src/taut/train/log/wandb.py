"""Numbers of a run as Weights & Biases curves. Needs the extra ``taut[wandb]`` (LogConfig refuses to do without).

Each start of a run, a resumed one too, is a W&B run of its own; those of one ``out`` are in one group.
Imported by ``taut.train.log`` where it is asked for.
"""

from __future__ import annotations

from pathlib import Path

import wandb

from taut.train.log.events import Event, ReportLost, plain
from taut.train.log.scalars import scalars


class WeightsAndBiases:
    """A sink that reports to a project."""

    def __init__(self, project: str, out: Path) -> None:
        self._run = wandb.init(project=project, name=out.name, group=out.name, dir=str(out))

    def __call__(self, event: Event) -> None:
        try:
            self._report(event)
        except (wandb.Error, OSError) as error:  # its service process, or the network
            raise ReportLost(f"Weights & Biases takes no more: {error}") from error

    def _report(self, event: Event) -> None:
        if event["kind"] == "start":
            self._run.config.update(plain(event))
        values = scalars(event)
        if values:
            self._run.log(values, step=event["step"])

    def close(self) -> None:
        self._run.finish()
